"""Tracing on CPUs: calls of kernels are recorded as numbers, which `calls.cpp` goes through.

`stand_ins.py` has what operators get meanwhile, `traced_calls.py` runs the calls.
"""

from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from struct import pack, unpack
from typing import cast

import torch
from torch import Tensor

from coserve.kernels.attention import AttentionBatch, AttentionSpec
from coserve.kernels.cpu import tile_products
from coserve.kernels.cpu.adapters import many_rows
from coserve.kernels.cpu.attention import paged_kernels
from coserve.kernels.cpu.compiled import Library
from coserve.kernels.cpu.products import (
    MAX_FLOAT32_ROWS,
    fit_float32,
    fit_vectors,
    kernel_for_few_int8_rows,
    kernel_for_few_rows,
)
from coserve.kernels.cpu.stand_ins import (
    CONSTANT,
    ROWS,
    STEP,
    STEP_NUMBERS,
    Argument,
    MemorySlot,
    RowMemory,
    StepNumber,
    TracedRows,
    step,
)
from coserve.kernels.cpu.traced_calls import CpuCalls, WrittenCalls
from coserve.kernels.cpu.traced_group import TracedGroup
from coserve.kernels.groups.base import RankGroup
from coserve.kernels.low_rank import PLACE_NUMBERS, AdapterBatch, LowRankRows
from coserve.kernels.plain import PlainBackend
from coserve.kernels.trace import Trace, TracedCalls, UntraceableError

_KERNELS = (
    *(
        "product",
        "product_onto",
        "gated_product",
        "pair_product",
        "vector_product",
        "float32_product",
    ),
    *(
        "int8_product_by_tiles",
        "int8_pair_product",
        "int8_product_bfloat16",
        "int8_product_float32",
    ),
    *("rms_norm", "silu_mul", "rope", "add", "store_rows", "rank_sum"),
    *(
        "add_adapters",
        "paged_attention_by_tiles",
        "paged_attention_bfloat16",
        "paged_attention_float32",
    ),
    *("keep_rows", "attend_in_windows", "attend_in_pieces"),
)
# Arguments of kernels for training windows: the table of windows.
_WINDOWS = (step("windows"), step("num_windows"))


class CpuTrace(Trace[PlainBackend]):
    """A trace on a CPU.

    The kernels are those that `CpuBackend` calls for the same operators, so results are equal to
    the last bit. In float32, up to `FEW_FLOAT32_ROWS` rows of requests alone are summed in another
    order.

    Tensors that it records by their addresses (weights, stores) must stay where they are.
    """

    def __init__(self, kernels: Library, device: torch.device, dtype: torch.dtype) -> None:
        if dtype not in paged_kernels(kernels):
            raise UntraceableError
        self._kernels, self.dtype = kernels, dtype
        self._numbers = _kernel_numbers(kernels)
        self._calls: list[int] = []
        self._names: list[str] = []  # of the kernels, call by call
        self._memory = RowMemory()
        self._inputs: dict[str, int] = {}
        self._read: list[Tensor] = []
        self._groups: list[RankGroup] = []
        self.kept: dict[Hashable, int] = {}
        self._kept_names: dict[
            int, Hashable
        ] = {}  # by the address of the store that has the same of requests
        self._device = device
        # Stand-ins by their identity alone: whatever reads them is refused.
        self._attention = cast(AttentionBatch, object())
        self._adapters = cast(AdapterBatch, object())
        self.has_adapters = False
        self.has_attention_tiles = kernels.has_tiles and dtype == torch.bfloat16
        self.head_width = 0
        # Limits of the whole list of calls: each recorded call may lower them.
        self.max_rows = 1 << 30
        self.has_tile_products = False

    @property
    def backend(self) -> PlainBackend:
        return _Tracer(
            self._device, self
        )  # not kept: a cycle would hold the pool's memory until it is collected

    @property
    def attention(self) -> AttentionBatch:
        return self._attention

    @property
    def adapters(self) -> AdapterBatch:
        return self._adapters

    @property
    def kernels(self) -> Library:
        return self._kernels

    @property
    def is_bfloat16(self) -> bool:
        return self.dtype == torch.bfloat16

    @property
    def finishes_products(self) -> bool:
        """Return whether there are products that compute the operation after them before the result
        is written.
        """
        return self.is_bfloat16 and self._numbers["product_onto"] >= 0

    def group(self, group: RankGroup) -> RankGroup:
        if group.size == 1:
            return group
        if group not in self._groups:
            self._groups.append(group)
        return TracedGroup(self, group)

    def input(self, name: str, width: int) -> Tensor:
        # Addresses of inputs come after the fixed numbers of a step.
        number = self._inputs.setdefault(name, len(STEP_NUMBERS) + len(self._inputs))
        return cast(Tensor, TracedRows(self, number, width=width, step=width))

    def keep(self, name: Hashable, rows: Tensor) -> None:
        x: object = rows
        if not isinstance(x, MemorySlot | TracedRows):
            raise UntraceableError
        step_bytes = x.row_bytes if isinstance(x, MemorySlot) else x.step * self.dtype.itemsize
        # The distance of two rows, and the bytes of one: rows may be columns of wider ones.
        self.call(
            "keep_rows", x, step_bytes, x.row_bytes, *_WINDOWS, len(self.kept), step("num_threads")
        )
        self.kept[name] = x.row_bytes

    def store(self, name: Hashable, rows: Tensor, store: Tensor) -> None:
        x = self.rows(rows)
        self._kept_names[store.data_ptr()] = name
        page_step, *within = store.stride()
        # Rows are copied as bytes: same dtype, same width, and no gaps within a page.
        if store.dtype != self.dtype or store.shape[2] != x.width or within != [x.width, 1]:
            raise UntraceableError
        size = self.dtype.itemsize
        places = (step("pages"), step("offsets"), step("num_paged_rows"))
        self.call("store_rows", x, x.step * size, store, page_step * size, *places, x.width * size)

    def kept_as(self, store: Tensor) -> int:
        """Return the place, among the tensors that windows keep, of the one that a store has for
        requests.
        """
        return list(self.kept).index(self._kept_names[store.data_ptr()])

    def end(self, output: Tensor) -> TracedCalls:
        """Complete the trace, whose result are these rows."""
        y = self.rows(output)
        # The output must be rows of their own in the step's memory, not columns of others.
        if not isinstance(y.source, MemorySlot) or y.first or y.step != y.width:
            raise UntraceableError
        return CpuCalls(
            WrittenCalls(
                kernels=self._kernels,
                dtype=self.dtype,
                numbers=array("q", self._calls),
                names=self._names,
                read=self._read,
                inputs=list(self._inputs),
                row_bytes=self._memory.num_bytes,
                output=y.source,
                width=y.width,
                max_rows=self.max_rows,
                has_tile_products=self.has_tile_products,
                has_adapters=self.has_adapters,
                has_attention_tiles=self.has_attention_tiles,
                head_width=self.head_width,
                kept=self.kept,
                groups=self._groups,
            )
        )

    # -- what is written down ----------------------------------------------------------

    def new(self, width: int, *, heads: int = 1) -> TracedRows:
        """Return room for rows of the compute dtype."""
        return TracedRows(
            self, self.room(width * self.dtype.itemsize), width=width, step=width, heads=heads
        )

    def room(self, num_bytes: int) -> MemorySlot:
        """Return room for as many bytes a row."""
        return MemorySlot(self._memory, num_bytes)

    def add(self, one: object, other: object) -> TracedRows:
        a, b = self.rows(one), self.rows(other)
        if a.width != b.width:
            raise UntraceableError
        y = self.new(a.width)
        self.call(
            "add",
            a,
            a.step,
            b,
            b.step,
            y,
            step("num_rows"),
            a.width,
            self.is_bfloat16,
            step("num_threads"),
        )
        return y

    def rows(self, value: object) -> TracedRows:
        """Return a value that is a stand-in for rows of this trace; refuse any other."""
        if not isinstance(value, TracedRows):
            raise UntraceableError
        return value

    def call(self, name: str, *arguments: object) -> None:
        """Record one call. Arguments are numbers, tensors (real ones and stand-ins), or None for no
        address.
        """
        if self._numbers[name] < 0:
            raise UntraceableError
        # As `calls.cpp` reads it: kernel, number of arguments, and three numbers for each of these.
        self._calls += [self._numbers[name], len(arguments)]
        for argument in arguments:
            self._calls += self._argument(argument)
        self._names.append(name)

    def _argument(self, value: object) -> Argument:
        match value:
            case StepNumber():
                return STEP, value.place, value.more
            case TracedRows():
                return value.argument
            case MemorySlot():
                return ROWS, value.start, 0
            case Tensor():
                # Recorded by its address, so the calls hold the tensor to keep its memory.
                self._read.append(value)
                return CONSTANT, 0, value.data_ptr()
            case float():
                # All numbers are int64: a float travels as its bits.
                return CONSTANT, 0, unpack("q", pack("d", value))[0]
            case int() | None:
                return CONSTANT, 0, int(value or 0)
        raise UntraceableError


class _Tracer(PlainBackend):
    """The backend of a trace. Operations that it does not record are refused by the stand-ins."""

    def __init__(self, device: torch.device, trace: CpuTrace) -> None:
        super().__init__(device)
        self._trace = trace

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        # The same choice of a kernel as `CpuBackend.product` makes, for the same bits.
        if not (fit_vectors if self._trace.is_bfloat16 else fit_float32)(weight, bias):
            raise UntraceableError
        if not self._trace.is_bfloat16:
            return self._product(
                "float32_product", x, (weight,), bias, step("few_rows"), max_rows=MAX_FLOAT32_ROWS
            )
        if self._fit_tiles(weight, bias):
            return self._tile_product("product", x, weight, bias, (), weight.shape[0])
        name, max_rows = kernel_for_few_rows(self._trace.kernels)
        return self._product(name, x, (weight,), bias, max_rows=max_rows)

    @property
    def fused(self) -> Mapping[str, Callable[..., Tensor | None]]:  # type: ignore[override]
        if not self._trace.finishes_products:
            return {}
        return {"linear_onto": self._linear_onto, "gated_linear": self._gated_linear}

    def _linear_onto(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, onto: Tensor
    ) -> Tensor | None:
        rows, width = self._trace.rows(onto), weight.shape[0]
        if not self._fit_tiles(weight, bias) or rows.width != width:
            # Not refused: the fused operator then runs its parts, which are recorded instead.
            return None
        return self._tile_product("product_onto", x, weight, bias, (rows, rows.step), width)

    def _gated_linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        added: Sequence[LowRankRows],
        keep: Sequence[Tensor],
    ) -> Tensor | None:
        # Gate and up are cut into tiles of 32 columns each. Traced LoRAs come by `add_adapters`.
        if added or keep or not self._fit_tiles(weight, bias) or weight.shape[0] % 64:
            return None
        return self._tile_product("gated_product", x, weight, bias, (), weight.shape[0] // 2)

    def _fit_tiles(self, weight: Tensor, bias: Tensor | None) -> bool:
        is_bfloat16 = self._trace.is_bfloat16 and fit_vectors(weight, bias)
        return (
            is_bfloat16 and self._trace.kernels.has_tiles and tile_products.fit_weight(weight, bias)
        )

    def _tile_product(
        self,
        kernel: str,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        more: tuple[object, ...],
        width: int,
    ) -> Tensor:
        """Record a product in tiles that gives rows of a width.

        Args:
            more: further arguments of the kernel.
        """
        trace, rows, (outer, inner) = self._trace, self._trace.rows(x), weight.shape
        self._check(rows, (weight,), bias)
        trace.has_tile_products = True
        y = trace.new(width)
        sizes = (step("num_rows"), inner, outer, step("num_threads"))
        trace.call(kernel, rows, rows.step, weight, bias, *more, y, *sizes)
        return cast(Tensor, y)

    def int8_product(
        self, x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        if (
            self._trace.kernels.has_amx
            and self._trace.is_bfloat16
            and tile_products.fit_weight(values, bias)
        ):
            return self._product(
                "int8_product_by_tiles",
                x,
                (values, scales),
                bias,
                max_rows=tile_products.MAX_ROWS,
            )
        name, max_rows = kernel_for_few_int8_rows(self._trace.kernels, self._trace.dtype)
        return self._product(name, x, (values, scales), bias, max_rows=max_rows)

    def _product(
        self,
        kernel: str,
        x: Tensor,
        weight: tuple[Tensor, ...],
        bias: Tensor | None,
        *more: StepNumber,
        max_rows: int,
    ) -> Tensor:
        trace, rows, (outer, inner) = self._trace, self._trace.rows(x), weight[0].shape
        self._check(rows, weight, bias)
        # Beyond this, `CpuBackend` would take another product, with other bits.
        trace.max_rows = min(trace.max_rows, max_rows)
        y = trace.new(outer)
        sizes = (step("num_rows"), inner, outer, *more, step("num_threads"))
        trace.call(kernel, rows, rows.step, *weight, bias, y, *sizes)
        return cast(Tensor, y)

    def _check(self, rows: TracedRows, weight: tuple[Tensor, ...], bias: Tensor | None) -> None:
        if rows.width != weight[0].shape[1] or not all(tensor.is_contiguous() for tensor in weight):
            raise UntraceableError
        if bias is not None and (bias.dtype != self._trace.dtype or not bias.is_contiguous()):
            raise UntraceableError

    def add_adapters(
        self, x: Tensor, outputs: Sequence[Tensor], first_place: int, batch: AdapterBatch
    ) -> None:
        trace, rows = self._trace, self._trace.rows(x)
        # The adapters of a step are known when it runs: the calls read them from its numbers.
        if batch is not trace.adapters:
            raise UntraceableError
        trace.has_adapters = True
        # Three arguments for each site that reads these rows.
        sites = [number for y in map(trace.rows, outputs) for number in (y, y.step, y.width)]
        adapters = (step("adapter_rows"), step("adapter_ends"), step("num_adapters"))
        # Bytes to the first place's row of the table of factors; 8 for each number.
        table = (step("adapter_addresses", 8 * PLACE_NUMBERS * first_place), step("num_places"))
        more = (many_rows(trace.kernels), trace.is_bfloat16, step("num_threads"), len(outputs))
        trace.call("add_adapters", rows, rows.step, rows.width, *adapters, *table, *more, *sites)

    def attention(
        self, q: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        trace, rows = self._trace, self._trace.rows(q)
        (_, block_tokens, row_width), width = keys.shape, rows.width // rows.heads
        page_step, *within = keys.stride()
        if (
            batch is not trace.attention
            or not spec.is_basic
            or rows.step != rows.width
            or width % 16
        ):
            raise UntraceableError
        if (
            keys.dtype != trace.dtype
            or within != [row_width, 1]
            or values.stride() != keys.stride()
        ):
            raise UntraceableError
        # Three kernels fill one output: each takes the rows of a step that are for it, and leaves
        # the others. Rows of prompts that attend in tiles have length 0 for the first.
        y, lse = trace.new(rows.width, heads=rows.heads), trace.room(4 * rows.heads)
        tables = (step("table"), step("first_page"), step("lengths"))
        heads, seen = (
            (rows.heads, row_width // width, width),
            (spec.sliding_window or 0, float(spec.scale)),
        )
        sizes = (step("num_paged_rows"), *heads, block_tokens, page_step)
        kernel = paged_kernels(trace.kernels)[trace.dtype]
        trace.call(kernel, rows, keys, values, *tables, y, lse, *sizes, *seen, step("num_threads"))
        # Tiles are only used if every layer of the model can.
        trace.has_attention_tiles &= not width % 32
        trace.head_width = max(trace.head_width, width)
        if trace.has_attention_tiles:
            pieces = (step("table"), y, lse, step("pieces"), step("num_pieces"))
            within_pages = (*heads, block_tokens, page_step)
            trace.call(
                "attend_in_pieces",
                rows,
                keys,
                values,
                *pieces,
                *within_pages,
                *seen,
                step("num_threads"),
            )
        # Only a trace with windows keeps anything; then their rows attend to the pack's own keys.
        if trace.kept:
            kept = (trace.kept_as(keys), trace.kept_as(values))
            more = (trace.has_attention_tiles, trace.is_bfloat16, step("num_threads"))
            trace.call("attend_in_windows", rows, y, lse, *_WINDOWS, *kept, *heads, *seen, *more)
        return cast(Tensor, y), cast(Tensor, lse)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        trace, rows, (features,) = self._trace, self._trace.rows(x), weight.shape
        if weight.dtype != trace.dtype or not weight.is_contiguous() or rows.width % features:
            raise UntraceableError
        y = trace.new(rows.width)
        sizes = (
            step("num_rows"),
            rows.width,
            features,
            float(eps),
            trace.is_bfloat16,
            step("num_threads"),
        )
        trace.call("rms_norm", rows, rows.step, weight, y, *sizes)
        return cast(Tensor, y)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        trace, one, other = self._trace, self._trace.rows(gate), self._trace.rows(up)
        if one.width != other.width:
            raise UntraceableError
        y = trace.new(one.width)
        sizes = (step("num_rows"), one.width, trace.is_bfloat16, step("num_threads"))
        trace.call("silu_mul", one, one.step, other, other.step, y, *sizes)
        return cast(Tensor, y)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        trace, rows, angles = (
            self._trace,
            self._trace.rows(x),
            [self._trace.rows(each) for each in (cos, sin)],
        )
        if rows.width % angles[0].width or angles[0].width != angles[1].width:
            raise UntraceableError
        y = trace.new(rows.width)
        tables = [number for each in angles for number in (each, each.step)]
        sizes = (step("num_rows"), rows.width, angles[0].width)
        trace.call(
            "rope",
            rows,
            rows.step,
            *tables,
            y,
            *sizes,
            False,
            trace.is_bfloat16,
            step("num_threads"),
        )
        return cast(Tensor, y)


@cache
def _kernel_numbers(kernels: Library) -> dict[str, int]:
    """Return the numbers of kernels in lists of calls; -1 for one that was not compiled."""
    # Filled in place by the library, by the kernels' names.
    numbers = array("q", [-1] * len(_KERNELS))
    kernels.kernel_numbers(" ".join(_KERNELS).encode(), numbers.buffer_info()[0])
    return dict(zip(_KERNELS, numbers, strict=True))
