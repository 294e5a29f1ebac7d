"""The profile of a model on a device that is not here, from its operators and the device's paces."""

from collections.abc import Callable, Iterable
from math import prod
from typing import TypeVar

from coserve.adapters.base import Adapter
from coserve.adapters.methods.lora import LoraConfig
from coserve.devices.counting import job_counts, model_counts
from coserve.graph.ir import Graph, Node
from coserve.graph.operators.base import Cost, Load
from coserve.graph.program import Instruction, Program
from coserve.models.backbone import Backbone
from coserve.scheduling.profile import Curve, Profile
from coserve.scheduling.sharing import Share, Sharing
from coserve.simulate.hardware import Hardware
from coserve.tuning.programs import training_programs

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
# Bytes of an optimizer step per parameter: gradient, master and two moments in float32, read, and all but one written.
_UPDATE_BYTES = 28
_LOSS_BYTES_PER_LOGIT = 24
# Drawing a token passes over the logits in float32 some times (scale, exponentials and their sum, the sum up to the
# token); a score needs the exponentials' sum alone. A mask is unpacked, and passes over them once.
_SAMPLE_BYTES_PER_LOGIT, _SCORE_BYTES_PER_LOGIT, _MASK_BYTES_PER_LOGIT = 24, 12, 14
# Sums over joined devices: after the attention and after the units of a block, each way.
_SUMS_PER_BLOCK = 2
_SHARE_ROWS = (1, 4, 16, 64, 128, 256, 512)
# Of the tasklets whose traffic forward passes beside them notice.
_ROWS_OF_TASKLET = 512
_Part = TypeVar("_Part", Graph, Program)


def roofline_profile(backbone: Backbone, hardware: Hardware) -> Profile:
    """The profile of a model (on the "meta" device, or any) on hardware that is not here.

    Every operator takes the longer of its arithmetic, at the pace of its shape, and its memory traffic, and at least a
    call; joined devices add the sums over all of them.
    """
    local = backbone.local
    adapter = Adapter(backbone, LoraConfig(r=16, alpha=32, target_modules="all-linear"))
    programs = training_programs(adapter)
    model, job = model_counts(backbone), job_counts(adapter, programs)
    timer, num_parts = _Timer(backbone), max(1, job.num_parts)
    blocks = [local.graphs[part] for part in local.parts[:-1]]
    head, vocab = local.graphs["head"], backbone.architecture.vocab_size

    def forward(on: Hardware) -> Curve:
        return _curve(lambda rows: timer.graphs_s(on, blocks, rows) + timer.sums_s(on, len(blocks), rows))

    def backward(on: Hardware) -> Curve:
        reversed_ = [programs.program[part] for part in programs.parts]
        return _curve(
            lambda rows: (timer.programs_s(on, reversed_, rows) + timer.sums_s(on, len(reversed_), rows)) / num_parts
        )

    def head_s(rows: int) -> float:
        return timer.graphs_s(hardware, [head], rows)

    def passes(calls: int, bytes_per_logit: int, after: Callable[[int], float] = lambda rows: 0.0) -> Curve:
        """Over the logits of rows."""
        return _curve(
            lambda n: after(n) + (calls - 1) * hardware.call_s + hardware.pass_s(0, n * bytes_per_logit * vocab)
        )

    saved_bytes = programs.kept_bytes_per_token(backbone.dtype)
    window_row_s = hardware.pass_s(job.flops_per_row, 2 * saved_bytes) - hardware.call_s
    return Profile(
        model=model,
        job=job,
        forward=forward(hardware),
        head=passes(8, backbone.dtype.itemsize, head_s),
        sample=passes(8, _SAMPLE_BYTES_PER_LOGIT),
        mask=passes(6, _MASK_BYTES_PER_LOGIT),
        score=passes(8, _SCORE_BYTES_PER_LOGIT, head_s),
        loss=passes(20, _LOSS_BYTES_PER_LOGIT, lambda rows: 2 * head_s(rows)),
        backward=backward(hardware),
        s_per_pair=model.flops_per_pair / (hardware.attention * hardware.flops_per_s),
        backward_s_per_pair=job.backward_flops_per_pair / (hardware.attention_backward * hardware.flops_per_s),
        s_per_key=model.kv_bytes_per_key / hardware.bytes_per_s,
        s_per_span=hardware.call_s,
        s_per_bypass=3 * hardware.call_s,
        s_per_window_row=window_row_s,
        s_per_parameter=_UPDATE_BYTES / hardware.bytes_per_s,
        update_s=10 * hardware.call_s,
        s_per_copied_byte=1 / hardware.host_bytes_per_s,
        saved_bytes_per_token=saved_bytes,
        sums=_curve(lambda rows: timer.sums_s(hardware, len(blocks), rows)),
        backward_sums=_curve(lambda rows: timer.sums_s(hardware, len(programs.parts), rows) / num_parts),
        sharing=_sharing(hardware, forward, backward, timer.traffic(hardware, programs.program[programs.parts[-1]])),
    )


class _Timer:
    """What the operators of a model take on a device."""

    def __init__(self, backbone: Backbone) -> None:
        self._dtype, self._width = backbone.dtype, backbone.architecture.hidden_size

    def graphs_s(self, on: Hardware, graphs: Iterable[Graph], rows: int) -> float:
        """Of forward passes; products that read the same rows run as one."""
        load = self._load(rows)

        def run_s(graph: Graph, run: tuple[Node, ...]) -> float:
            if run[0].op == "linear":
                return self._product_s(on, rows, graph, run)
            return sum(self._pass_s(on, graph.node_cost(node, load)) for node in run)

        return _total(graphs, lambda graph: sum(run_s(graph, run) for run in graph.runs))

    def programs_s(self, on: Hardware, programs: Iterable[Program], rows: int) -> float:
        """Of passes backward."""
        load = self._load(rows)

        def step_s(program: Program, step: Instruction) -> float:
            if step.node.op == "linear" and tuple(step.wanted) == ("x",):
                return self._product_s(on, rows, program.graph, [step.node])
            return self._pass_s(on, program.step_cost(step, load))

        return _total(programs, lambda program: sum(step_s(program, step) for step in program.backward))

    def sums_s(self, on: Hardware, num_blocks: int, rows: int) -> float:
        """Of the sums over joined devices."""
        return _SUMS_PER_BLOCK * num_blocks * on.sum_s(rows * self._width * self._dtype.itemsize)

    def traffic(self, on: Hardware, program: Program) -> float:
        """The share of a tasklet's time in which it moves data."""
        num_bytes = program.backward_cost(self._load(_ROWS_OF_TASKLET)).bytes
        return min(1.0, num_bytes / on.bytes_per_s / self.programs_s(on, [program], _ROWS_OF_TASKLET))

    def _load(self, rows: int) -> Load:
        return Load(rows=rows, mean_context_len=0, compute_dtype=self._dtype)

    def _product_s(self, on: Hardware, rows: int, graph: Graph, run: Iterable[Node]) -> float:
        shapes = [graph.spec[node.input["weight"]].shape for node in run]
        num_outputs, num_inputs = sum(shape[0] for shape in shapes), prod(shapes[0][1:])
        return on.product_s(rows, num_outputs, num_inputs, self._dtype.itemsize)

    def _pass_s(self, on: Hardware, cost: Cost) -> float:
        """Nothing for what only hands tensors on."""
        return on.pass_s(cost.flops, cost.bytes) if cost.bytes else 0.0


def _total(parts: Iterable[_Part], seconds: Callable[[_Part], float]) -> float:
    """Over all parts, of which most are the same."""
    listed = list(parts)
    found = {key: seconds(part) for key, part in {id(part): part for part in listed}.items()}
    return sum(found[id(part)] for part in listed)


def _curve(seconds: Callable[[int], float]) -> Curve:
    return Curve(rows=_ROWS, seconds=tuple([seconds(rows) for rows in _ROWS]))


def _sharing(
    hardware: Hardware,
    forward: Callable[[Hardware], Curve],
    backward: Callable[[Hardware], Curve],
    traffic: float,
) -> Sharing | None:
    """How fast parts of the device are; forward, backward: curves on it or a part.

    traffic: the share of its time in which a tasklet moves data. Both sides wait for the memory meanwhile (HARLI
    equation 5, with a forward pass that needs all of its bandwidth).
    """
    if hardware.num_units == 1:
        return None
    whole = forward(hardware), backward(hardware)
    shares = []
    for units in range(1, hardware.num_units):
        parts = [side(hardware.part(units)) for side in (forward, backward)]
        speeds = [tuple([a.at(n) / b.at(n) for n in _SHARE_ROWS]) for a, b in zip(whole, parts, strict=True)]
        shares.append(Share(units=units, rows=_SHARE_ROWS, forward=speeds[0], backward=speeds[1]))
    return Sharing(
        num_units=hardware.num_units,
        shares=tuple(shares),
        forward_interference=traffic,
        backward_interference=traffic,
    )
