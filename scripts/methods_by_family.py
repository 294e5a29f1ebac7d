"""The table of PEFT methods and model families in docs/methods.md, from trials on tiny random
models.

    .venv/bin/python scripts/methods_by_family.py

For every pair, an adapter is served, trained (its gradients are numbers, and not all zero), mixed
with rows of another adapter and of none (each gets what it gets alone), and written in PEFT's
format and read again.
"""

import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support import (  # noqa: E402
    CONFIGS,
    FAMILIES,
    make_adapter,
    make_backbone,
    random_sequences,
    random_tokens,
)

from coserve.adapters import Adapter, load_adapter, save_adapter  # noqa: E402
from coserve.adapters.methods import method, method_names  # noqa: E402
from coserve.errors import CoserveError  # noqa: E402
from coserve.models import Backbone, CachedSequence, forward, logits  # noqa: E402
from coserve.tuning import TrainingPass, make_pack, run_alone, training_programs  # noqa: E402

from family_configs import MORE_CONFIGS  # noqa: E402  isort: skip

PAGE = ROOT / "docs" / "methods.md"
_BEGIN, _END = "<!-- made by scripts/methods_by_family.py -->\n", "<!-- end of the table -->"
_FEW = {"num_virtual_tokens": 3, "r": 4, "reduction_factor": 4}


def forms() -> dict[str, str]:
    """Return the tiny model of each family, by its model_type: the first of its forms."""
    found: dict[str, str] = {}
    for name, config in {**{name: CONFIGS[name] for name in FAMILIES}, **MORE_CONFIGS}.items():
        found.setdefault(config["model_type"], name)
    return dict(sorted(found.items()))


def rows(adapter: Adapter | None, tokens: Tensor) -> Tensor:
    """Return the tokens with the virtual ones before them."""
    num_virtual = 0 if adapter is None else adapter.config.num_virtual_tokens
    return torch.cat((-1 - torch.arange(num_virtual), tokens))


def run(backbone: Backbone, users: list[tuple[Adapter | None, Tensor]]) -> list[Tensor]:
    """Return the logits of each user's own tokens, all in one batch."""
    spans, of = [], []
    for adapter, tokens in users:
        own, bypasses = rows(adapter, tokens), None if adapter is None else adapter.bypasses()
        spans.append(CachedSequence(backbone, len(own), bypasses).extend(own))
        of.append((len(own), bypasses))
    parts = torch.split(
        logits(backbone, forward(backbone, spans), of), [num_rows for num_rows, _ in of]
    )
    return [part[-len(tokens) :] for part, (_, tokens) in zip(parts, users, strict=True)]


def made(backbone: Backbone, kind: str) -> Adapter:
    """Return an adapter with random parameters."""
    method_type = method(kind)
    known = [each.name for each in fields(method_type)]  # type: ignore[arg-type]
    settings: dict[str, Any] = {
        **method_type.job_defaults,
        **{n: v for n, v in _FEW.items() if n in known},
    }
    config = method_type(**settings)
    adapter = config.as_served(Adapter(backbone, config, seed=1), is_fresh=True)
    generator = torch.Generator().manual_seed(2)
    for master in adapter.masters.values():
        master.add_(torch.randn(master.shape, generator=generator) * 0.1)
    adapter.sync_compute_copy()
    return adapter


def is_served(adapter: Adapter) -> bool:
    """Return whether the adapter's rows get numbers other than those of the bare model."""
    tokens = random_tokens(7, 1)
    (ours,), (bare,) = (run(adapter.backbone, [(each, tokens)]) for each in (adapter, None))
    return bool(ours.isfinite().all()) and not torch.equal(ours, bare)


def is_trained(adapter: Adapter) -> bool:
    """Return whether the gradients are numbers, and not all zero."""
    sequences = [
        (
            rows(adapter, torch.tensor(ids)).tolist(),
            [False] * adapter.config.num_virtual_tokens + [False, *marks[1:]],
        )
        for ids, marks in random_sequences((7, 9))
    ]
    training = TrainingPass(adapter, training_programs(adapter), make_pack(sequences))
    run_alone(training, forward_rows=5, backward_rows=6)
    gradients = training.gradients.values()
    return all(bool(each.isfinite().all()) for each in gradients) and any(
        bool(each.any()) for each in gradients
    )


def is_mixed(adapter: Adapter) -> bool:
    """Return whether all rows of a mixed batch get what they get alone."""
    other = make_adapter(adapter.backbone, seed=3)
    users = [
        (each, random_tokens(5 + i, i)) for i, each in enumerate((adapter, None, other, adapter))
    ]
    alone = [run(adapter.backbone, [user])[0] for user in users]
    together = run(adapter.backbone, users)
    return all(
        torch.allclose(a, b, atol=1e-4, rtol=1e-4) for a, b in zip(alone, together, strict=True)
    )


def is_exported(adapter: Adapter) -> bool:
    """Return whether the adapter is the same bit for bit after it is written and read."""
    directory = mkdtemp(prefix="coserve-table-")
    save_adapter(adapter, directory)
    again = load_adapter(adapter.backbone, directory)
    return all(torch.equal(again.masters[name], master) for name, master in adapter.masters.items())


CHECKS: dict[str, Callable[[Adapter], bool]] = {
    "S": is_served,
    "T": is_trained,
    "M": is_mixed,
    "E": is_exported,
}


def cell(backbone: Backbone, kind: str) -> str:
    """Return what works for a method on a model."""
    try:
        adapter = made(backbone, kind)
        return " ".join(letter if check(adapter) else "✗" for letter, check in CHECKS.items())
    except CoserveError as error:
        print(backbone.architecture.config.model_type, kind, error)
        return "–"


def table() -> str:
    """Return the table as Markdown."""
    names = [name.replace("-", "_") for name in method_names()]
    methods = [name for name in names if not method(name).is_model]
    lines = [
        f"| | {' | '.join(f'`{name}`' for name in methods)} |",
        "|---" * (len(methods) + 1) + "|",
    ]
    for family, form in forms().items():
        backbone = make_backbone(form)
        lines.append(f"| `{family}` | {' | '.join(cell(backbone, name) for name in methods)} |")
    return "\n".join(lines) + "\n"


def filled(page: str) -> str:
    """Return the page with the current table."""
    before, rest = page.split(_BEGIN)
    return before + _BEGIN + table() + _END + rest.split(_END, 1)[1]


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
