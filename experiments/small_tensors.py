"""Page pool memory of packs beyond their bytes: does it need a place of its own for small tensors?

    python -m experiments.small_tensors

HARLI (section 4.5) has a pool with buddies for tensors smaller than its blocks of 2 MB, of which it
counts over 5,000 in an iteration of two sequences of 1,024 tokens. Here a pack takes one run of
pages for all that it saves of a part of the model, each tensor aligned to 64 bytes. Counts, not
timings. Prints a table, and one line of JSON.
"""

from math import prod

from coserve.adapters import Adapter, LoraConfig
from coserve.devices.counting import trainer_opened
from coserve.devices.messages.jobs import group_bytes
from coserve.memory.tensors.activations import Shapes
from coserve.memory.tensors.paged_kv import kv_page_bytes
from coserve.models import load_backbone
from coserve.tuning import training_programs
from coserve.tuning.pass_memory import saved_shapes, workspace_shapes
from coserve.tuning.programs import evaluation_programs
from experiments.results import print_result, save_option

MODELS = ("qwen2.5-0.5b", "llama-3.1-8b")
ROWS = (64, 512, 2048)
BLOCK_TOKENS, HARLI_BLOCK, MIB = 16, 2 << 20, 1 << 20


def row(model: str, num_rows: int) -> dict[str, object]:
    """Return the bytes of a pack of this many tokens, by allocator."""
    backbone = load_backbone(f"dummy:{model}", device="meta", dtype="bfloat16")
    adapter = Adapter(backbone, LoraConfig(r=16, target_modules="all-linear"))
    programs = training_programs(adapter)
    parts = backbone.architecture.parts[:-1]
    groups: list[Shapes] = [workspace_shapes(programs, backbone, num_rows)]
    groups += [saved_shapes(programs, backbone, part, num_rows) for part in parts]
    sizes = [prod(shape) * kind.itemsize for group in groups for shape, kind in group.values()]
    page = kv_page_bytes(backbone, BLOCK_TOKENS)
    opened = trainer_opened(adapter, programs, evaluation_programs(adapter))
    runs = [-(-group_bytes(row_bytes, num_rows) // page) for row_bytes in opened.training]
    return {
        "model": model,
        "tokens": num_rows,
        "tensors": len(sizes),
        "under_2_mib": sum(size < HARLI_BLOCK for size in sizes),
        "mib": sum(sizes) / MIB,
        "taken_mib": sum(runs) * page / MIB,
        "page_each_mib": sum(-(-size // page) for size in sizes) * page / MIB,
        "harli_block_each_mib": sum(-(-size // HARLI_BLOCK) for size in sizes) * HARLI_BLOCK / MIB,
    }


def main() -> None:
    """Count and print."""
    save = save_option(__doc__)
    rows = [row(model, num_rows) for model in MODELS for num_rows in ROWS]
    print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for each in rows:
        print(
            "| "
            + " | ".join(
                f"{value:,.1f}" if isinstance(value, float) else str(value)
                for value in each.values()
            )
            + " |"
        )
    print_result("small_tensors", {"rows": rows}, save)


if __name__ == "__main__":
    main()
