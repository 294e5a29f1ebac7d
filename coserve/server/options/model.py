"""Options of the model and its computation."""

from dataclasses import dataclass

from coserve.server.options.lora_option import lora_module
from coserve.server.options.option import OptionGroup, option
from coserve.server.tool_parsers import parser_class, parser_names
from coserve.settings import check_whole


@dataclass(frozen=True, kw_only=True)
class ModelOptions(OptionGroup):
    """Options of the model, its number formats, and its text."""

    model: str = option(
        "tiny",
        "",
        "Model to serve: a directory in Hugging Face's layout, a hub id, or the "
        "built-in model, tiny.",
    )
    served_model_names: tuple[str, ...] = option(
        (),
        "--served-model-name",
        "Name by which clients ask for the model; can be given several times. The first is the one "
        "shown, and the prefix of names of fine-tuned models.",
        metavar="NAME",
        shown="MODEL; of a directory, its own name",
    )
    max_model_len: int | None = option(
        None,
        "--max-model-len",
        "Maximum number of tokens of a prompt and its answer together, and of a training example.",
        parse=int,
        metavar="N",
        shown="what the model and the pool allow",
    )
    dtype: str = option(
        "auto",
        "--dtype",
        "Data type of the weights: float32, bfloat16, float16, or auto for the model's own.",
    )
    weights: str = option(
        "dense",
        "--weights",
        "Storage of the weights of linear layers: dense, or a quantised format such as int8 "
        "(docs/kernels.md lists all).",
    )
    device: str = option(
        "auto", "--device", "Device to run on, such as cpu or cuda:0; auto: a GPU if there is one."
    )
    threads: int | None = option(
        None,
        "--threads",
        "Number of CPU threads for the engine.",
        parse=int,
        metavar="N",
        shown="one for a small model, all for others; with ranks, an equal share of all",
    )
    tensor_parallel: int = option(
        1,
        "--tensor-parallel",
        "Number of ranks: processes that share the model, each on its own GPU or CPU cores "
        "(docs/parallel.md). --threads, --memory and --host-memory then apply to each rank.",
    )
    deterministic: bool = option(
        False,
        "--deterministic",
        "Make answers and adapters bitwise reproducible, whatever else runs at the same time; "
        "steps take longer.",
    )
    tool_call_parser: str = option(
        "auto",
        "--tool-call-parser",
        f"Format in which the model writes tool calls: {', '.join(parser_names())}; auto: detect "
        f"it from the chat template.",
    )
    chat_template: str | None = option(
        None,
        "--chat-template",
        "Chat template in Jinja: a file, or the template itself.",
        metavar="FILE",
        shown="the model's own",
    )
    lora_modules: tuple[str, ...] = option(
        (),
        "--lora-modules",
        "Adapter that all tenants can use: NAME=DIR, or JSON with name and path; can be given "
        "several times.",
        metavar="NAME=DIR",
        shown="none",
    )
    generation_config: str = option(
        "auto",
        "--generation-config",
        "Source of defaults for temperature, top_k, top_p, min_p and repetition_penalty: auto for "
        "the model's generation_config.json; none; or a directory with another one.",
    )

    def check(self) -> None:
        """Check the fields.

        Raises:
            ValueError: One is out of range; the message names it.
        """
        if self.threads is not None:
            check_whole("threads", self.threads, 1)
        check_whole("tensor_parallel", self.tensor_parallel, 1)
        if self.max_model_len is not None:
            check_whole("max_model_len", self.max_model_len, 2)
        if any(not name.strip() or "@" in name for name in self.served_model_names):
            raise ValueError(
                "served_model_names must be names without an @, which separates name and version"
            )
        if len(set(self.served_model_names)) != len(self.served_model_names):
            raise ValueError("served_model_names must differ from one another")
        if self.tool_call_parser != "auto":
            parser_class(self.tool_call_parser)
        for module in self.lora_modules:
            lora_module(module)
