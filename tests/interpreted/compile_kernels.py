"""Compile every kernel for a GPU of some capability, which need not be there; prints how many there
were."""

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from coserve.kernels.triton import adapter_kernels, attention_kernels, row_kernels

NUMBERS, SUMS = "*i64", "*fp32"
SCORES = {"slopes": SUMS, "scale": "fp32", "soft_cap": "fp32", "window": "i32"}
# Bytes that the programs of an A100 share.
MOST_SHARED = 166_912


class Compiler:
    """Compiles for one target, and counts."""

    def __init__(self, capability: int) -> None:
        self.target, self.number = GPUTarget("cuda", capability, 32), 0

    def __call__(
        self, kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: Any
    ) -> None:
        """types: of the arguments that are none of the constants."""
        names = [parameter.name for parameter in kernel.params]
        assert set(names) == {*types, *constants}, set(names) ^ {*types, *constants}
        source = ASTSource(
            fn=kernel,
            signature={name: types.get(name, "constexpr") for name in names},
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs={
                (names.index(name),): [["tt.divisibility", 16]]
                for name, kind in types.items()
                if kind.startswith("*")
            },
        )
        made = triton.compile(source, target=self.target, options=options)
        assert made.metadata.shared <= MOST_SHARED, (
            kernel.__name__,
            constants,
            made.metadata.shared,
        )
        self.number += 1


def integers(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "i32")


def compile_attention(compile_one: Compiler, rows: str, *, exact: bool) -> None:
    read = {
        **dict.fromkeys(("q", "k", "v"), rows),
        "lse": SUMS,
        "segments": NUMBERS,
        "tiles": NUMBERS,
    }
    for width, groups, has in ((64, 7, False), (128, 4, True), (256, 2, True)):
        is_large = width > 128 or exact
        sizes = {"NUM_HEADS": 8 * groups, "WIDTH": width, "WIDTH_BLOCK": width}
        shape = {
            **sizes,
            "GROUPS": groups,
            "EXACT": exact,
            "HAS_CAP": has,
            "HAS_SLOPES": has,
            "HAS_WINDOW": has,
        }
        types = {**read, **SCORES, "out": rows, "sums": SUMS, "pages": NUMBERS, "sinks": rows}
        types |= integers("q_step", "page_step", "token_step")
        tiled = {"BLOCK_M": 32 if is_large else 64, "BLOCK_N": 64 if width <= 64 else 32}
        single = {"BLOCK_M": 16, "BLOCK_N": 32 if is_large else 64}
        for is_single, splits, block, stages in (
            (True, 8, single, 2),
            (False, 1, tiled, 1 if is_large else 3),
        ):
            paging = {
                "TOKENS": 16,
                "IS_PAGED": True,
                "IS_SINGLE": is_single,
                "SPLITS": splits,
                "HAS_SINKS": has,
            }
            compile_one(
                attention_kernels.attend,
                types,
                {**shape, **paging, **block},
                num_warps=4,
                num_stages=stages,
            )
        merged = {"sums": SUMS, "out": rows, "lse": SUMS, "segments": NUMBERS, "sinks": rows}
        compile_one(
            attention_kernels.merge_splits, merged, {**sizes, "SPLITS": 8, "HAS_SINKS": has}
        )
        types = {
            **read,
            **SCORES,
            "grad": rows,
            "delta": SUMS,
            **integers("grad_step", "q_step", "token_step"),
        }
        block, options = (
            {**tiled, "BLOCK_N": 32},
            {"num_warps": 4, "num_stages": 1 if is_large else 3},
        )
        compile_one(
            attention_kernels.query_gradients, {**types, "dq": rows}, {**shape, **block}, **options
        )
        compile_one(
            attention_kernels.key_gradients,
            {**types, "dk": SUMS, "dv": SUMS},
            {**shape, **block},
            **options,
        )
    compile_one(
        attention_kernels.row_products,
        {"grad": rows, "out": rows, "delta": SUMS, **integers("grad_step", "out_step")},
        {"WIDTH": 64, "WIDTH_BLOCK": 64},
    )


def compile_rows(compile_one: Compiler, rows: str) -> None:
    def all_rows(*names: str) -> dict[str, str]:
        return dict.fromkeys(names, rows)

    norm = {"FEATURES": 896, "BLOCK": 1024}
    compile_one(
        row_kernels.rms_norm, {**all_rows("x", "weight", "y"), "x_step": "i32", "eps": "fp32"}, norm
    )
    compile_one(
        row_kernels.rms_norm_gradient,
        {
            **all_rows("grad", "x", "weight", "dx", "y"),
            **integers("grad_step", "x_step"),
            "eps": "fp32",
        },
        {**norm, "WITH_Y": True},
    )
    unit = integers("gate_step", "up_step", "width")
    compile_one(row_kernels.silu_mul, {**all_rows("gate", "up", "y"), **unit}, {"BLOCK": 1024})
    compile_one(
        row_kernels.silu_mul_gradients,
        {**all_rows("grad", "gate", "up", "gate_grad", "up_grad", "y"), **unit, "grad_step": "i32"},
        {"BLOCK": 1024, "WITH_Y": True},
    )
    for reverse in (False, True):
        compile_one(
            row_kernels.rope,
            {**all_rows("x", "cos", "sin", "y"), **integers("x_step", "angle_step")},
            {"HEADS": 14, "HALF": 32, "BLOCK_HEADS": 16, "BLOCK_HALF": 32, "REVERSE": reverse},
        )
    places = {
        "pages": NUMBERS,
        "offsets": NUMBERS,
        **integers("x_step", "page_step", "token_step", "width"),
    }
    compile_one(row_kernels.store_rows, {**all_rows("x", "store"), **places}, {"BLOCK": 1024})


def compile_copies(compile_one: Compiler) -> None:
    tables = dict.fromkeys(("own", "others", "rows"), NUMBERS)
    for loads, in_place, word_bytes in (
        (False, False, 8),
        (True, True, 4),
        (False, True, 2),
        (True, False, 1),
    ):
        constants = {"LOADS": loads, "IN_PLACE": in_place, "WORD_BYTES": word_bytes, "BLOCK": 2048}
        compile_one(row_kernels.copy_rows, tables, constants)


def compile_adapters(compile_one: Compiler, rows: str, *, exact: bool) -> None:
    for rank in (16, 128):
        constants = {
            "NUMBERS": 9,
            "ROWS": 16,
            "RANK": rank,
            "SPLITS": 2,
            "BLOCK": 128,
            "EXACT": exact,
        }
        tables = {"sums": SUMS, "blocks": NUMBERS, "table": NUMBERS, "adapter_step": "i32"}
        compile_one(
            adapter_kernels.narrow, {**tables, "x": rows, **integers("x_step", "inner")}, constants
        )
        more = integers("y_step", "outer", "place", "num_places")
        compile_one(adapter_kernels.widen, {**tables, "y": rows, **more}, constants)


def main() -> None:
    compile_one = Compiler(int(sys.argv[1]))
    for rows, exact in (("*bf16", False), ("*fp32", True)):
        compile_attention(compile_one, rows, exact=exact)
        compile_rows(compile_one, rows)
        compile_adapters(compile_one, rows, exact=exact)
    compile_copies(compile_one)
    print(compile_one.number)


if __name__ == "__main__":
    main()
