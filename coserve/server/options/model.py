"""What is served, and how it computes."""

from dataclasses import dataclass

from coserve.server.options.lora_option import lora_module
from coserve.server.options.option import OptionGroup, option
from coserve.server.tool_parsers import parser_class, parser_names
from coserve.settings import check_whole


@dataclass(frozen=True, kw_only=True)
class ModelOptions(OptionGroup):
    """Which one, in which numbers, and how its texts are read."""

    model: str = option(
        "tiny", "", "A directory in Hugging Face's layout, a hub id, or the built-in model, tiny."
    )
    served_model_names: tuple[str, ...] = option(
        (),
        "--served-model-name",
        "What clients call the model; may be given several times: the first is shown, and begins "
        "the names of "
        "fine-tuned models.",
        metavar="NAME",
        shown="MODEL; of a directory, its own name",
    )
    max_model_len: int | None = option(
        None,
        "--max-model-len",
        "Tokens of a prompt and its answer together, and of an example of a job.",
        parse=int,
        metavar="N",
        shown="what the model and the pool allow",
    )
    dtype: str = option("auto", "--dtype", "float32, bfloat16, float16, or auto: the model's own.")
    weights: str = option(
        "dense",
        "--weights",
        "How weights of linear layers are stored: dense, or such as int8 (docs/kernels.md has "
        "all).",
    )
    device: str = option(
        "auto", "--device", "Such as cpu or cuda:0; auto takes a GPU if there is one."
    )
    threads: int | None = option(
        None,
        "--threads",
        "Of the CPU, for the engine's arithmetic.",
        parse=int,
        metavar="N",
        shown="one for a small model, all for others; with ranks, an equal share of all",
    )
    tensor_parallel: int = option(
        1,
        "--tensor-parallel",
        "Number of ranks: processes that hold the model together, each on a GPU or on CPU cores of "
        "its own "
        "(docs/parallel.md); --threads, --memory and --host-memory are then those of each.",
    )
    deterministic: bool = option(
        False,
        "--deterministic",
        "Answers and adapters are the same bit for bit, whatever runs beside them; steps take "
        "longer.",
    )
    tool_call_parser: str = option(
        "auto",
        "--tool-call-parser",
        f"How the model writes calls of tools: {', '.join(parser_names())}; auto: as its chat "
        f"template does.",
    )
    chat_template: str | None = option(
        None,
        "--chat-template",
        "How chats are written for the model, in Jinja: a file, or the template itself.",
        metavar="FILE",
        shown="the model's own",
    )
    lora_modules: tuple[str, ...] = option(
        (),
        "--lora-modules",
        'Adapter that all tenants may ask for: NAME=DIR, or {"name": NAME, "path": DIR}; may be given several times.',
        metavar="NAME=DIR",
        shown="none",
    )
    generation_config: str = option(
        "auto",
        "--generation-config",
        "Where temperature, top_k, top_p, min_p and repetition_penalty come from that a request "
        "does not say: auto, "
        "the model's generation_config.json; none; or a directory with another.",
    )

    def check(self) -> None:
        """ValueError names the field and its range."""
        if self.threads is not None:
            check_whole("threads", self.threads, 1)
        check_whole("tensor_parallel", self.tensor_parallel, 1)
        if self.max_model_len is not None:
            check_whole("max_model_len", self.max_model_len, 2)
        if any(not name.strip() or "@" in name for name in self.served_model_names):
            raise ValueError(
                "served_model_names must be names without an @, which begins a version"
            )
        if len(set(self.served_model_names)) != len(self.served_model_names):
            raise ValueError("served_model_names must differ from one another")
        if self.tool_call_parser != "auto":
            parser_class(self.tool_call_parser)
        for module in self.lora_modules:
            lora_module(module)
