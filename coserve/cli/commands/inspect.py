"""`coserve inspect`: shows what a block computes, and what training an adapter saves of it."""

import json
import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coserve.cli.adapter_settings import adapter_settings
from coserve.errors import AdapterError

if TYPE_CHECKING:
    from rich.table import Table

    from coserve.adapters.base import Adapter, AdapterConfig
    from coserve.graph.program import Program
    from coserve.graph.rematerialize import Retention
    from coserve.tuning.programs import TrainingPrograms


def inspect(
    model: Annotated[
        str,
        typer.Argument(help="Directory, hub id, dummy:PRESET, or dummy:PATH of a config.json."),
    ],
    adapter: Annotated[
        str,
        typer.Option(
            metavar="METHOD",
            help="PEFT method: lora, ia3, vera, bottleneck, … (docs/methods.md).",
        ),
    ] = "lora",
    adapter_setting: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Setting of the method, its value as JSON or text. Repeatable.",
        ),
    ] = None,
    r: Annotated[int | None, typer.Option(help="LoRA rank. [16]")] = None,
    alpha: Annotated[
        float | None, typer.Option(help="LoRA alpha; the update is scaled by alpha / r. [32]")
    ] = None,
    targets: Annotated[
        str | None,
        typer.Option(
            help=(
                "Target modules: names separated by commas, all-linear, or a regular "
                "expression. [as for jobs; LoRA: all-linear]"
            )
        ),
    ] = None,
    dropout: Annotated[float | None, typer.Option(help="LoRA dropout in training. [0]")] = None,
    seq: Annotated[int, typer.Option(min=1, help="Tokens of the training sequence.")] = 1024,
    budget: Annotated[
        int | None,
        typer.Option(
            min=0, help="Maximum bytes that a block saves per token; the rest is recomputed."
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, float16, or auto: the model's own.")
    ] = "auto",
    tensor_parallel: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Also show how this many ranks would divide the model; nothing runs.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON instead of tables.")
    ] = False,
) -> None:
    """Show a block of MODEL as the program that trains an adapter, and the memory for it.

    Only the shape is read, not the weights. A tensor of the forward pass is saved, restored
    (produced by the backward pass on its way, at no cost), rematerialized (recomputed), or dropped
    because no requested gradient needs it. Memory that only the training of some methods needs (the
    encoder of p-tuning, the masks of diff pruning) comes on top of what is shown.
    """
    given = {"r": r, "alpha": alpha, "target_modules": _targets(targets), "dropout": dropout}
    settings = {
        name: value for name, value in given.items() if value is not None
    } | adapter_settings(adapter_setting)
    report = _examine(
        model, _config(adapter, settings), seq=seq, budget=budget, dtype=dtype, size=tensor_parallel
    )
    if as_json:
        print(json.dumps(report.as_dict(), allow_nan=False))
    else:
        _show(report)


@dataclass(frozen=True, kw_only=True)
class _Report:
    """All that `coserve inspect` shows, as data."""

    model: str
    """Model, as the command names it."""
    family: str
    """Model type."""
    dtype: str
    """Compute dtype."""
    adapter: dict[str, Any]
    """Settings of the adapter in PEFT's format, with its type."""
    seq: int
    """Tokens of the training sequence."""
    num_layers: int
    """Number of blocks."""
    layer: int
    """Block that is shown: the topmost that runs backward."""
    max_positions: int
    """Maximum number of tokens that the model was made for."""
    saved_bytes_per_token: int
    """Bytes that the block saves per token."""
    conventional_bytes_per_token: float | None
    """Bytes that autograd saves per token; None: not LoRA, or PEFT is not installed."""
    extra_flops_fraction: float
    """FLOPs of recomputing, as a share of those of forward and backward."""
    frontier: list[dict[str, Any]]
    """Choices between saved bytes per token and extra FLOPs."""
    memory_bytes: dict[str, int]
    """Bytes for training on the sequence, by purpose."""
    conventional_memory_bytes: dict[str, int] | None
    """The same under transformers and PEFT, if it is known."""
    forward: list[dict[str, Any]]
    """Tensors of the block's forward pass."""
    backward: list[dict[str, Any]]
    """Instructions of the block's backward pass."""
    ranks: dict[str, Any] | None
    """Division of the model among ranks, if it is requested."""

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def _targets(given: str | None) -> tuple[str, ...] | str | None:
    from coserve.adapters.targets import ALL_LINEAR

    if given is None or given.strip().lower() == ALL_LINEAR or not re.fullmatch(r"[\w., ]+", given):
        return given
    return tuple(name.strip() for name in given.split(",") if name.strip())


def _config(name: str, settings: dict[str, Any]) -> "AdapterConfig":
    """Return the configuration of an adapter.

    Raises:
        AdapterError: The method or a setting is wrong.
    """
    from coserve.adapters.methods import method

    try:
        kind = method(name)
        if kind.is_model:
            raise AdapterError(
                f"{name!r} trains the model's own weights; inspect shows what an adapter adds"
            )
        # All configurations are dataclasses.
        known = [each.name for each in fields(kind)]  # type: ignore[arg-type]
        if unknown := [setting for setting in settings if setting not in known]:
            raise AdapterError(f"{name} has no setting {unknown[0]!r}; it has {', '.join(known)}")
        return kind(**{**kind.job_defaults, **settings})
    except (ValueError, TypeError) as error:
        raise AdapterError(str(error)) from None


def _examine(
    model: str,
    config: "AdapterConfig",
    *,
    seq: int,
    budget: int | None,
    dtype: str,
    size: int | None,
) -> _Report:
    import torch

    from coserve.adapters.base import Adapter
    from coserve.adapters.methods.lora import LoraConfig
    from coserve.bench.conventional import conventional_saved_bytes
    from coserve.cli.rank_layout import rank_layout
    from coserve.graph.rematerialize import Weighing
    from coserve.models.backbone import build_backbone
    from coserve.models.source import find_model
    from coserve.tuning.programs import frontier_of_part, training_programs

    source = find_model(model, with_weights=False)
    backbone = build_backbone(source, dtype=dtype, device=torch.device("meta"))
    for name, wrong in config.misfits(backbone.architecture):
        raise AdapterError(f"{name} {wrong}")
    # Mean number of keys that a row of a causal sequence of `seq` tokens attends to.
    adapter, keys = Adapter(backbone, config), (seq + 1) / 2
    by = Weighing(compute_dtype=backbone.dtype, mean_context_len=keys)
    programs = training_programs(adapter, budget_bytes_per_token=budget, mean_context_len=keys)
    architecture = backbone.architecture
    trained = [part for part in programs.parts if isinstance(part, int)]
    layer = max(trained, default=0)
    program = programs.program[layer]
    conventional = None
    if isinstance(config, LoraConfig) and not config.use_dora:
        conventional = conventional_saved_bytes(
            architecture, config, rows=seq, dtype=backbone.dtype
        )
    memory = _memory(adapter, programs, seq)
    choices = frontier_of_part(programs, adapter, layer, mean_context_len=keys) if trained else ()
    return _Report(
        model=model,
        family=source.config.model_type,
        dtype=str(backbone.dtype).removeprefix("torch."),
        adapter={"type": config.peft_type.lower()}
        | {name: value for name, value in config.to_peft().items() if name != "peft_type"},
        seq=seq,
        num_layers=architecture.num_layers,
        layer=layer,
        max_positions=architecture.max_positions,
        saved_bytes_per_token=program.saved_bytes_per_token(backbone.dtype),
        conventional_bytes_per_token=None if conventional is None else conventional[layer] / seq,
        extra_flops_fraction=program.retention.extra_flops_fraction,
        frontier=[_point(choice) for choice in choices],
        memory_bytes=memory,
        conventional_memory_bytes=_conventional_memory(memory, conventional, seq),
        forward=_forward_rows(program, backbone.dtype),
        backward=_backward_rows(program, backbone.dtype),
        ranks=None
        if size is None
        else rank_layout(config, adapter.layout, size, layer, program, by),
    )


def _point(choice: "Retention") -> dict[str, Any]:
    return {
        "bytes_per_token": choice.bytes_per_token,
        "extra_flops_fraction": choice.extra_flops_fraction,
    }


def _memory(adapter: "Adapter", programs: "TrainingPrograms", seq: int) -> dict[str, int]:
    from coserve.memory.tensors.activations import group_bytes
    from coserve.models.weights import weight_tensors
    from coserve.tuning.pass_memory import state_shapes, workspace_shapes

    backbone = adapter.backbone
    weights = {id(t): t for held in backbone.weights.values() for t in weight_tensors(held)}
    masters = 4 * adapter.num_parameters
    copies = 0 if backbone.dtype.itemsize == 4 else backbone.dtype.itemsize * adapter.num_parameters
    per_token = programs.saved_bytes_per_token(backbone.dtype)
    states = group_bytes(state_shapes(programs, seq))
    return {
        "weights": sum(tensor.nbytes for tensor in weights.values()),
        "adapter": masters + copies,
        "gradients": masters,
        # The two moments of AdamW, in float32 like the masters.
        "optimizer": 2 * masters,
        "activations_per_token": per_token,
        "activations": per_token * seq,
        **({"states": states} if states else {}),
        "workspace": group_bytes(workspace_shapes(programs, backbone, seq)),
    }


def _conventional_memory(
    ours: dict[str, int], blocks: dict[int, int] | None, seq: int
) -> dict[str, int] | None:
    if blocks is None:
        return None
    return {
        "weights": ours["weights"],
        "adapter": ours["gradients"],
        "gradients": ours["gradients"],
        "optimizer": ours["optimizer"],
        "activations_per_token": sum(blocks.values()) // seq,
        "activations": sum(blocks.values()),
    }


def _forward_rows(program: "Program", dtype: Any) -> list[dict[str, Any]]:
    """Return the row tensors of the graph: their operator, inputs, and state."""
    graph, keep = program.graph, program.retention
    rows = []
    for spec in graph.with_kind("row"):
        node = graph.producer.get(spec.name)
        states = {"saved": keep.saved, "restored": keep.restored, "rematerialized": keep.recomputed}
        state = next((word for word, names in states.items() if spec.name in names), "dropped")
        rows.append(
            {
                "tensor": spec.name,
                "operator": node.op if node else "input",
                "inputs": [name for name in node.input.values() if graph.spec[name].per_row]
                if node
                else [],
                "shape": list(spec.shape),
                "bytes": spec.num_bytes(dtype),
                "state": state,
            }
        )
    order = {name: index for index, node in enumerate(graph.nodes) for name in node.output.values()}
    return sorted(rows, key=lambda row: order.get(row["tensor"], -1))


def _backward_rows(program: "Program", dtype: Any) -> list[dict[str, Any]]:
    """Return the backward instructions; shapes and bytes are those of the gradients, per row, or of
    a whole parameter.
    """
    spec, rows = program.graph.spec, []
    for step in program.backward:
        gradients = [spec[name] for name in step.gradients]
        rows.append(
            {
                "instruction": step.kind,
                "operator": step.node.op,
                "node": step.node.name,
                "reads": [name for _, name in step.reads if spec[name].per_row],
                "gradients": list(step.gradients),
                "shapes": [list(gradient.shape) for gradient in gradients],
                "bytes": sum(gradient.num_bytes(dtype) for gradient in gradients),
                "restores": list(step.restores),
            }
        )
    return rows


# -- tables -------------------------------------------------------------------

_STYLES = {"saved": "bold green", "restored": "cyan", "rematerialized": "yellow", "dropped": "dim"}


def _show(report: _Report) -> None:
    from rich.text import Text

    from coserve.cli.tables import console

    screen = console()
    shape = f"{report.family}, {report.num_layers} blocks, {report.dtype}"
    screen.print(
        Text.assemble(
            (report.model, "bold"), f"  {shape}; {_in_words(report)}; {report.seq:,} tokens\n"
        )
    )
    if report.seq > report.max_positions:
        screen.print(
            f"The model was made for at most {report.max_positions:,} tokens.\n", style="yellow"
        )
    wide = screen.width >= 120
    screen.print(_forward_table(report, wide))
    if report.backward:
        screen.print(_backward_table(report, wide))
    else:
        screen.print("No block runs backward: the adapter sits above them all.\n")
    if report.ranks is not None:
        from coserve.cli.rank_layout import layout_table, layout_words

        screen.print(layout_table(report.ranks, report.layer, wide))
        screen.print(layout_words(report.ranks) + "\n")
    screen.print(_memory_table(report))
    if report.frontier:
        screen.print(_frontier_table(report))


def _in_words(report: _Report) -> str:
    """Return the adapter in words: its method, and its targets if they are known."""
    rank, targets = report.adapter.get("r"), report.adapter.get("target_modules")
    kind = report.adapter["type"]
    name = "LoRA" if kind == "lora" else str(kind)
    if rank is not None:
        name += f" r={rank}"
    return (
        f"{name} on {targets if isinstance(targets, str) else ', '.join(targets)}"
        if targets
        else name
    )


def _table(title: str, *columns: str) -> "Table":
    from coserve.cli.tables import table

    return table(*columns, title=title)


def _forward_table(report: _Report, wide: bool) -> "Table":
    """Return the table of the forward pass; a narrow terminal gets no inputs."""
    from rich.text import Text

    columns = ["operator", "tensor", *(["from"] * wide), ">per row", ">bytes per row", "kept"]
    table = _table(f"Forward, block {report.layer}", *columns)
    for row in report.forward:
        table.add_row(
            row["operator"],
            row["tensor"],
            *([", ".join(row["inputs"])] * wide),
            "×".join(str(size) for size in row["shape"]),
            f"{row['bytes']:,}",
            Text(row["state"], style=_STYLES[row["state"]]),
        )
    table.add_section()
    table.add_row(
        "", "saved in all", *([""] * wide), "", f"{report.saved_bytes_per_token:,}", _share(report)
    )
    return table


def _share(report: _Report) -> str:
    if not report.conventional_bytes_per_token:
        return ""
    conventional = report.conventional_bytes_per_token
    return f"{report.saved_bytes_per_token / conventional:.1%} of autograd's {conventional:,.0f}"


def _backward_table(report: _Report, wide: bool) -> "Table":
    """Return the table of the backward pass; a narrow terminal gets no reads."""
    columns = [">", "instruction", *(["reads"] * wide), "gradients of", ">bytes", "restores"]
    table = _table(f"Backward, block {report.layer}", *columns)
    for index, row in enumerate(report.backward):
        table.add_row(
            str(index),
            f"{row['instruction']} {row['node']}",
            *([", ".join(row["reads"])] * wide),
            ", ".join(row["gradients"]),
            f"{row['bytes']:,}",
            ", ".join(row["restores"]),
        )
    return table


def _memory_table(report: _Report) -> "Table":
    table = _table(
        f"Memory to train on {report.seq:,} tokens", "", ">coserve", ">transformers + PEFT"
    )
    ours, theirs = report.memory_bytes, report.conventional_memory_bytes
    for name, num_bytes in ours.items():
        other = "not counted" if theirs is None else _size(theirs[name]) if name in theirs else ""
        table.add_row(name.replace("_", " "), _size(num_bytes), other)
    table.add_section()
    table.add_row("in all", _size(_total(ours)), "" if theirs is None else _size(_total(theirs)))
    return table


def _total(memory: dict[str, int]) -> int:
    return sum(num_bytes for name, num_bytes in memory.items() if name != "activations_per_token")


def _frontier_table(report: _Report) -> "Table":
    """Return the table of the frontier, without points that save less than 3% over the one above;
    `--json` has all points.
    """
    table = _table(
        "Keep less, compute more (extra FLOPs: of forward and backward together)",
        *(">bytes per token", ">of autograd's", ">extra FLOPs", ""),
    )
    most, last, conventional = (
        report.frontier[0]["bytes_per_token"],
        None,
        report.conventional_bytes_per_token,
    )
    for point in report.frontier:
        num_bytes = point["bytes_per_token"]
        chosen = num_bytes == report.saved_bytes_per_token
        if (
            last is not None
            and num_bytes > 0.97 * last
            and not chosen
            and point is not report.frontier[-1]
        ):
            continue
        last = num_bytes
        table.add_row(
            f"{num_bytes:,}",
            f"{num_bytes / conventional:.1%}" if conventional else "",
            f"{point['extra_flops_fraction']:.1%}",
            "█" * round(40 * num_bytes / most) + ("  ← shown above" if chosen else ""),
        )
    return table


def _size(num_bytes: int) -> str:
    size, units = float(num_bytes), ["B", "KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:,.1f} {units[0]}"
