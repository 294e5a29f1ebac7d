"""The profile of a model on a device that is not here, from its operators and the device's
paces.
"""

from collections.abc import Callable, Iterable
from math import prod
from typing import TypeVar

from coserve.adapters.base import Adapter
from coserve.adapters.methods.lora import LoraConfig
from coserve.devices.counting import job_counts, model_counts
from coserve.errors import BudgetError
from coserve.graph.ir import Graph, Node
from coserve.graph.operators.base import Cost, Load
from coserve.graph.program import Instruction, Program
from coserve.models.backbone import Backbone
from coserve.scheduling.profile import Curve, Profile
from coserve.scheduling.sharing import Share, Sharing
from coserve.simulate.hardware import Hardware
from coserve.tuning.programs import training_programs

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
# Bytes of an optimizer step per parameter: gradient, master and two moments in float32, read, and
# all but one written.
_UPDATE_BYTES = 28
_LOSS_BYTES_PER_LOGIT = 24
# Drawing a token passes over the logits in float32 some times (scale, exponentials and their sum,
# the sum up to the token); a score needs the exponentials' sum alone. A mask is unpacked, and
# passes over them once.
_SAMPLE_BYTES_PER_LOGIT, _SCORE_BYTES_PER_LOGIT, _MASK_BYTES_PER_LOGIT = 24, 12, 14
# Collectives that leave the sum of whole tensors on every rank; all others move half as much
# (`Link.gather_s`).
_SUMS = frozenset({"rank_sum", "rank_copy", "rank_rms_norm"})
# Bytes that each rank sends for a row: the logit of its likeliest token, and the token, float32.
_LIKELIEST_BYTES = 8
_SHARE_ROWS = (1, 4, 16, 64, 128, 256, 512)
# Of the tasklets whose traffic forward passes beside them notice.
_ROWS_OF_TASKLET = 512
_Part = TypeVar("_Part", Graph, Program)


def roofline_profile(
    backbone: Backbone, hardware: Hardware, *, link_flops_per_byte: float | None = None
) -> Profile:
    """Return the profile of a model (on the "meta" device, or any) on hardware that is not here.

    Every operator takes the longer of its arithmetic, at the pace of its shape, and its memory
    traffic, and at least a call. Of several ranks (`on_ranks`), each on a device of its own, the
    profile is that of one: its graphs have the shapes that it computes, and collectives where the
    group sums and gathers over its link.

    Args:
        backbone: the model, or what one rank has of it.
        hardware: the device of each rank.
        link_flops_per_byte: see `training_programs`; None: what follows from the hardware.

    Raises:
        BudgetError: the hardware has no link for several ranks.
    """
    if backbone.ranks.size > 1 and hardware.link is None:
        raise BudgetError(
            f"{hardware.name} has no link for {backbone.ranks.size} ranks: give its hardware one"
        )
    local = backbone.local
    adapter = Adapter(backbone, LoraConfig(r=16, alpha=32, target_modules="all-linear"))
    if link_flops_per_byte is None:
        link_flops_per_byte = modelled_link_flops_per_byte(backbone, hardware)
    # Not with the kernels of the device that the backbone may be on: it is not the one that is
    # modelled.
    programs = training_programs(adapter, link_flops_per_byte=link_flops_per_byte, fused=())
    model, job = model_counts(backbone), job_counts(adapter, programs)
    timer, link, num_parts = _Timer(backbone), _LinkTimer(backbone, hardware), max(1, job.num_parts)
    blocks = [local.graphs[part] for part in local.parts[:-1]]
    own_head = local.own_head[0] if backbone.ranks.size > 1 else local.graphs["head"]
    reversed_ = [programs.program[part] for part in programs.parts]
    vocab, own_vocab = backbone.architecture.vocab_size, _num_logits(programs.loss)

    def forward(on: Hardware) -> Curve:
        return _curve(lambda rows: timer.graphs_s(on, blocks, rows) + link.graphs_s(blocks, rows))

    def backward(on: Hardware) -> Curve:
        return _curve(
            lambda rows: (
                (timer.programs_s(on, reversed_, rows) + link.programs_s(reversed_, rows))
                / num_parts
            )
        )

    def head_s(rows: int) -> float:
        """Return what the logits take that a rank has of rows."""
        return timer.graphs_s(hardware, [own_head], rows) + link.graphs_s([own_head], rows)

    def likeliest_s(rows: int) -> float:
        """Return what the likeliest token takes, of which each rank sends two numbers to rank 0."""
        return head_s(rows) + link.gather_s(rows * backbone.ranks.size * _LIKELIEST_BYTES)

    def gathered_s(rows: int) -> float:
        """Return what takes the logits of all ranks to rank 0, which alone chooses tokens."""
        return link.gather_s(rows * vocab * backbone.dtype.itemsize)

    def loss_s(rows: int) -> float:
        """Return what the head takes forward and backward, whose logits the ranks keep apart."""
        moved_s = link.graphs_s([programs.loss.graph], rows) + link.programs_s(
            [programs.loss], rows
        )
        # The product of the head, and that of its gradient.
        return 2 * timer.graphs_s(hardware, [own_head], rows) + moved_s

    def passes(
        calls: int, row_bytes: int, after: Callable[[int], float] = lambda rows: 0.0
    ) -> Curve:
        """Return what passes over the logits of rows take, which read and write as many bytes of
        each.
        """
        return _curve(
            # `pass_s` includes the first call.
            lambda n: after(n) + (calls - 1) * hardware.call_s + hardware.pass_s(0, n * row_bytes)
        )

    saved_bytes = programs.kept_bytes_per_token(backbone.dtype)
    moved_s = [
        link.graphs_s(graphs, _ROWS_OF_TASKLET)
        for graphs in ([each.graph for each in programs.program.values()], blocks)
    ]
    # What training adds to a row; the forward pass makes the call anyway.
    window_row_s = hardware.pass_s(job.flops_per_row, 2 * saved_bytes) - hardware.call_s
    window_row_s += (moved_s[0] - moved_s[1]) / _ROWS_OF_TASKLET
    return Profile(
        model=model,
        job=job,
        forward=forward(hardware),
        head=passes(8, backbone.dtype.itemsize * own_vocab, likeliest_s),
        sample=passes(8, _SAMPLE_BYTES_PER_LOGIT * vocab, gathered_s),
        mask=passes(6, _MASK_BYTES_PER_LOGIT * vocab, gathered_s),
        score=passes(
            8, _SCORE_BYTES_PER_LOGIT * vocab, lambda rows: head_s(rows) + gathered_s(rows)
        ),
        loss=passes(20, _LOSS_BYTES_PER_LOGIT * own_vocab, loss_s),
        backward=backward(hardware),
        s_per_pair=model.flops_per_pair / (hardware.attention * hardware.flops_per_s),
        backward_s_per_pair=job.backward_flops_per_pair
        / (hardware.attention_backward * hardware.flops_per_s),
        s_per_key=model.kv_bytes_per_key / hardware.bytes_per_s,
        s_per_span=hardware.call_s,
        s_per_bypass=3 * hardware.call_s,
        s_per_window_row=window_row_s,
        s_per_parameter=_UPDATE_BYTES / hardware.bytes_per_s,
        update_s=10 * hardware.call_s + link.parameters_s(adapter),
        s_per_copied_byte=1 / hardware.host_bytes_per_s,
        saved_bytes_per_token=saved_bytes,
        sums=_curve(lambda rows: link.graphs_s(blocks, rows)),
        backward_sums=_curve(lambda rows: link.programs_s(reversed_, rows) / num_parts),
        sharing=_sharing(
            hardware,
            forward,
            backward,
            timer.traffic(hardware, programs.program[programs.parts[-1]]),
        ),
    )


def modelled_link_flops_per_byte(backbone: Backbone, hardware: Hardware) -> float:
    """Return the FLOPs that a rank computes while a gather moves a byte of a window's rows.

    It is 0 for one rank, and where no link is known.
    """
    if hardware.link is None or backbone.ranks.size == 1:
        return 0.0
    num_bytes = _ROWS_OF_TASKLET * backbone.architecture.hidden_size * backbone.dtype.itemsize
    return hardware.flops_per_s * hardware.link.gather_s(num_bytes, backbone.ranks.size) / num_bytes


class _Timer:
    """Times of a rank's operators on its device, without what they move to others and wait for."""

    def __init__(self, backbone: Backbone) -> None:
        self._dtype = backbone.dtype

    def graphs_s(self, on: Hardware, graphs: Iterable[Graph], rows: int) -> float:
        """Return what forward passes take; products that read the same rows run as one."""
        load = self._load(rows)

        def run_s(graph: Graph, run: tuple[Node, ...]) -> float:
            if run[0].op == "linear":
                return self._product_s(on, rows, graph, run)
            return sum(self._pass_s(on, node, graph.node_cost(node, load)) for node in run)

        return _total(graphs, lambda graph: sum(run_s(graph, run) for run in graph.runs))

    def programs_s(self, on: Hardware, programs: Iterable[Program], rows: int) -> float:
        """Return what passes backward take."""
        load = self._load(rows)

        def step_s(program: Program, step: Instruction) -> float:
            if step.node.op == "linear" and tuple(step.wanted) == ("x",):
                return self._product_s(on, rows, program.graph, [step.node])
            return self._pass_s(on, step.node, program.step_cost(step, load))

        return _total(
            programs, lambda program: sum(step_s(program, step) for step in program.backward)
        )

    def traffic(self, on: Hardware, program: Program) -> float:
        """Return the share of a tasklet's time in which it moves data to and from the device's
        memory.
        """
        load, num_bytes = self._load(_ROWS_OF_TASKLET), 0
        for step in program.backward:
            cost = program.step_cost(step, load)
            num_bytes += 0 if _is_collective(step.node, cost) else cost.bytes
        return min(
            1.0, num_bytes / on.bytes_per_s / self.programs_s(on, [program], _ROWS_OF_TASKLET)
        )

    def _load(self, rows: int) -> Load:
        return Load(rows=rows, mean_context_len=0, compute_dtype=self._dtype)

    def _product_s(self, on: Hardware, rows: int, graph: Graph, run: Iterable[Node]) -> float:
        shapes = [graph.spec[node.input["weight"]].shape for node in run]
        num_outputs, num_inputs = sum(shape[0] for shape in shapes), prod(shapes[0][1:])
        return on.product_s(rows, num_outputs, num_inputs, self._dtype.itemsize)

    def _pass_s(self, on: Hardware, node: Node, cost: Cost) -> float:
        """Return nothing for what only hands tensors on, to other ranks included."""
        return (
            0.0
            if _is_collective(node, cost) or not cost.bytes
            else on.pass_s(cost.flops, cost.bytes)
        )


class _LinkTimer:
    """Times of the collectives of a rank's graphs, in which it waits for the link."""

    def __init__(self, backbone: Backbone, hardware: Hardware) -> None:
        self._dtype, self._num_ranks, self._link = (
            backbone.dtype,
            backbone.ranks.size,
            hardware.link,
        )

    def graphs_s(self, graphs: Iterable[Graph], rows: int) -> float:
        """Return what forward passes take."""
        return _total(
            graphs,
            lambda graph: sum(
                self._node_s(graph, node, rows) for node in graph.nodes if node.operator.moves
            ),
        )

    def programs_s(self, programs: Iterable[Program], rows: int) -> float:
        """Return what passes backward take; what is made again is summed again."""

        def step_s(graph: Graph, step: Instruction) -> float:
            operator = step.node.operator
            moves = operator.moves if step.kind == "recompute" else operator.moves_gradient
            return self._node_s(graph, step.node, rows) if moves else 0.0

        return _total(
            programs, lambda program: sum(step_s(program.graph, step) for step in program.backward)
        )

    def parameters_s(self, adapter: Adapter) -> float:
        """Return what the sum of gradients takes of which every rank has a part, once an optimizer
        step.
        """
        num_bytes = sum(adapter.masters[name].nbytes for name in adapter.graphs.summed)
        return self._sum_s(num_bytes) if num_bytes else 0.0

    def gather_s(self, num_bytes: float) -> float:
        """Return what a gather of a tensor takes; nothing of one rank."""
        return self._link.gather_s(num_bytes, self._num_ranks) if self._link is not None else 0.0

    def _node_s(self, graph: Graph, node: Node, rows: int) -> float:
        """Return what a node takes in a direction in which it moves something."""
        num_bytes = rows * node.operator.moved_bytes_per_row(graph.slot_specs(node), self._dtype)
        if node.op == "rank_linear_cross_entropy":  # its bytes are one rank's part of the gather
            num_bytes *= self._num_ranks
        return self._sum_s(num_bytes) if node.op in _SUMS else self.gather_s(num_bytes)

    def _sum_s(self, num_bytes: float) -> float:
        assert self._link is not None, "one rank has no collectives"
        return self._link.sum_s(num_bytes, self._num_ranks)


def _is_collective(node: Node, cost: Cost) -> bool:
    """Return whether a node moves something between ranks, in one direction at least, and computes
    nothing.
    """
    operator = node.operator
    return (operator.moves or operator.moves_gradient) and not cost.flops


def _num_logits(loss: Program) -> int:
    """Return the number of logits of a row of which a rank takes the loss."""
    graph = loss.graph
    return graph.spec[graph.producer[graph.outputs[0]].tensor["logits"]].shape[-1]


def _total(parts: Iterable[_Part], seconds: Callable[[_Part], float]) -> float:
    """Return the sum over all parts, most of which are the same."""
    listed = list(parts)
    part_s = {key: seconds(part) for key, part in {id(part): part for part in listed}.items()}
    return sum(part_s[id(part)] for part in listed)


def _curve(seconds: Callable[[int], float]) -> Curve:
    return Curve(rows=_ROWS, seconds=tuple([seconds(rows) for rows in _ROWS]))


def _sharing(
    hardware: Hardware,
    forward: Callable[[Hardware], Curve],
    backward: Callable[[Hardware], Curve],
    traffic: float,
) -> Sharing | None:
    """Return the speeds of parts of the device.

    Args:
        forward: Returns the curve of forward passes on the device or a part.
        backward: Returns the curve of tasklets.
        traffic: Share of its time in which a tasklet moves data. Both sides wait for the memory
            meanwhile (HARLI equation 5, with a forward pass that needs all of its bandwidth).
    """
    if hardware.num_units == 1:
        return None
    whole = forward(hardware), backward(hardware)
    shares = []
    for units in range(1, hardware.num_units):
        parts = [side(hardware.part(units)) for side in (forward, backward)]
        speeds = [
            tuple([a.at(n) / b.at(n) for n in _SHARE_ROWS])
            for a, b in zip(whole, parts, strict=True)
        ]
        shares.append(Share(units=units, rows=_SHARE_ROWS, forward=speeds[0], backward=speeds[1]))
    return Sharing(
        num_units=hardware.num_units,
        shares=tuple(shares),
        forward_interference=traffic,
        backward_interference=traffic,
    )
