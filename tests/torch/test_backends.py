"""A backend is one folder, a step runs as many operations for many requests as for one, and int8
backbones are served and fine-tuned on.
"""

import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from support import make_adapter, model_directory, random_sequences, random_tokens, worst_error
from torch.utils._python_dispatch import TorchDispatchMode

from coserve import kernels
from coserve.errors import ModelError
from coserve.kernels import weights as kernel_weights
from coserve.memory.tensors.paged_kv import PagedKv
from coserve.models import CachedSequence, forward, load_backbone, logits
from coserve.models.weights import weight_tensors
from coserve.tuning import TrainingPass, make_pack, run_alone, training_programs

FAKE = """
from collections import Counter
from coserve.kernels.plain import PlainBackend


class BACKEND(PlainBackend):
    priority = 100
    calls = Counter()

    def product(self, x, weight, bias=None):
        self.calls["product"] += 1
        return super().product(x, weight, bias)

    def attention(self, *given):
        self.calls["attention"] += 1
        return super().attention(*given)
"""


def load(family="llama", **settings):
    return load_backbone(str(model_directory(family)), dtype="float32", **settings)


# -- a folder that is added is a backend --------------------------------------------


def test_a_folder_that_is_added_is_a_backend(monkeypatch, tmp_path):
    """It is found by its name, chosen by its priority, and runs a model: requests and
    fine-tuning."""
    monkeypatch.delenv("COSERVE_KERNELS", raising=False)
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "__init__.py").write_text(FAKE)
    monkeypatch.setattr(kernels, "__path__", [*kernels.__path__, str(tmp_path)])
    assert "fake" in kernels.backend_names()
    backbone, plain = load(), load(kernels="plain")
    fake = type(backbone.backend)
    monkeypatch.delitem(sys.modules, "coserve.kernels.fake")
    tokens = random_tokens(9, 0)
    found, expected = (
        logits(b, forward(b, [CachedSequence(b, 9).extend(tokens)])) for b in (backbone, plain)
    )
    assert torch.equal(found, expected)
    layers = backbone.architecture.num_layers
    assert fake.calls == {"attention": layers, "product": 4 * layers + 1}, (
        "q, k and v are one, gate and up are one"
    )
    gradients = []
    for each in (backbone, plain):
        adapter = make_adapter(each, seed=1)
        training = TrainingPass(
            adapter, training_programs(adapter), make_pack(random_sequences((9, 4)))
        )
        run_alone(training, forward_rows=13, backward_rows=7)
        gradients.append(training.gradients)
    assert worst_error(*gradients) == 0


def test_files_beside_the_folders_are_no_backends(monkeypatch, tmp_path):
    (tmp_path / "util.py").write_text("SHARED = 1\n")
    (tmp_path / "_common").mkdir()
    (tmp_path / "_common" / "__init__.py").write_text("")
    names = kernels.backend_names()
    monkeypatch.setattr(kernels, "__path__", [*kernels.__path__, str(tmp_path)])
    assert kernels.backend_names() == names
    load()


# -- storages of weights ----------------------------------------------------------------


def test_a_class_that_is_added_is_a_storage_of_weights(monkeypatch):
    """It is found by its format, and runs a model."""
    made = []

    class Doubled(kernel_weights.DenseWeight):
        format = "doubled"

        @classmethod
        def from_dense(cls, weight):
            made.append(weight.shape)
            return cls(2 * weight)

    storages = [*kernel_weights.Weight.__subclasses__(), Doubled]
    monkeypatch.setattr(kernel_weights.Weight, "__subclasses__", lambda: storages)
    assert kernel_weights.weight_formats() == ("dense", "int8", "doubled")
    tokens, backbone = random_tokens(9, 0), load(weights="doubled")
    logits(backbone, forward(backbone, [CachedSequence(backbone, 9).extend(tokens)]))
    assert len(made) == 7 * backbone.architecture.num_layers + 1
    with pytest.raises(ModelError, match="weights 'int3' is not one of dense, int8, doubled"):
        load(weights="int3")


def test_the_table_of_formats_has_all_of_them():
    page = (Path(kernels.__file__).parents[2] / "docs" / "kernels.md").read_text()
    table = page.split("| format |")[1].split("\n\n")[0]
    assert tuple(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == kernel_weights.weight_formats()


# -- operations do not grow with requests ---------------------------------------------


# What launches nothing: another view of the same memory.
VIEWS = frozenset(
    (
        *(
            "view",
            "_unsafe_view",
            "slice",
            "select",
            "unbind",
            "t",
            "transpose",
            "permute",
            "expand",
            "unsqueeze",
        ),
        *(
            "split",
            "split_with_sizes",
            "detach",
            "detach_",
            "lift_fresh",
            "alias",
            "as_strided",
            "_reshape_alias",
        ),
    )
)


class Operations(TorchDispatchMode):
    """Counts what PyTorch runs within, but for views."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.counts[name] += name not in VIEWS
        return function(*args, **(kwargs or {}))


def decode_operations(num_requests, *, num_adapters=0):
    """Of a step in which this many requests decode, each after a prompt of its own length."""
    backbone = load(kernels="plain")
    pages = PagedKv(backbone, num_pages=64 * 3, block_tokens=16)
    pages.storage.zero_()
    adapters = [make_adapter(backbone, seed=seed).bypasses() for seed in range(num_adapters)] or [
        None
    ]
    spans = [
        pages.rows([(range(3 * i, 3 * i + 3), 34 + i % 11, [5])], adapters[i % len(adapters)])
        for i in range(num_requests)
    ]
    with torch.inference_mode(), Operations() as operations:
        hidden = forward(backbone, spans)
        users = [(1, span.bypasses) for span in spans]
        backbone.backend.argmax(logits(backbone, hidden, users))
    return operations.counts


def test_a_decode_step_of_64_requests_runs_as_many_operations_as_a_step_of_one():
    one = decode_operations(1)
    assert one == decode_operations(64)
    assert one.total() < 110 * 3, "of three layers"


def test_a_decode_step_with_many_adapters_runs_as_many_operations_as_one_with_a_few():
    two = decode_operations(4, num_adapters=2)
    assert two == decode_operations(64, num_adapters=2)
    assert two == decode_operations(64, num_adapters=16)


def window_operations(lengths):
    """Of the forward window of a pack, and of its backward tasklets."""
    backbone = load(kernels="plain")
    adapter = make_adapter(backbone, seed=1, dropout=0.1)
    training = TrainingPass(
        adapter, training_programs(adapter), make_pack(random_sequences(lengths))
    )
    num_rows = sum(lengths)
    with torch.inference_mode():
        with Operations() as forward_operations:
            training.finish_window(forward(backbone, [training.next_window(num_rows)]))
        while not training.loss_done:
            training.run_loss(num_rows)
        with Operations() as backward_operations:
            while not training.done:
                training.next_tasklet(num_rows).run()
    return forward_operations.counts, backward_operations.counts


def test_a_packed_window_of_32_sequences_runs_as_many_operations_as_one_of_a_single_sequence():
    assert window_operations([4] * 32) == window_operations([128])


# -- int8 weights -----------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["plain", None])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_an_int8_backbone_is_the_dequantised_model(backend, family):
    """Logits to rounding, and the tokens that greedy decoding gives."""
    int8, full = load(family, weights="int8", kernels=backend), load(family, kernels=backend)
    exact = {part: dict(held) for part, held in full.weights.items()}
    for part, held in int8.weights.items():
        for name, weight in held.items():
            if not isinstance(weight, torch.Tensor):
                exact[part][name] = kernel_weights.DenseWeight(weight.dense())
    twin = type(full)(**{**vars(full), "weights": exact})
    assert not torch.equal(
        exact[0]["self_attn.q_proj.weight"].dense(),
        full.weights[0]["self_attn.q_proj.weight"].dense(),
    )
    prompt, found = random_tokens(12, 3), []
    for backbone in (int8, twin):
        sequence, tokens = CachedSequence(backbone, 40), []
        scores = [logits(backbone, forward(backbone, [sequence.extend(prompt)]))]
        for _ in range(20):
            tokens.append(int(scores[-1][-1].argmax()))
            scores.append(
                logits(backbone, forward(backbone, [sequence.extend(torch.tensor(tokens[-1:]))]))
            )
        found.append((torch.cat(scores), tokens))
    torch.testing.assert_close(found[0][0], found[1][0], atol=2e-5, rtol=0)
    assert found[0][1] == found[1][1]
    gradients = []
    for backbone in (int8, twin):
        adapter = make_adapter(backbone, seed=1)
        training = TrainingPass(
            adapter, training_programs(adapter), make_pack(random_sequences((20, 9)))
        )
        run_alone(training, forward_rows=29, backward_rows=17)
        gradients.append(training.gradients)
    assert worst_error(*gradients) < 1e-5


def test_an_int8_backbone_holds_a_quarter_of_the_bytes_of_float32():
    full, int8 = load(), load(weights="int8")
    sizes = [
        sum(t.nbytes for part in range(3) for t in weight_tensors(b.weights[part]))
        for b in (full, int8)
    ]
    assert sizes[1] < 0.4 * sizes[0], "with scales, and norms as they were"
    with pytest.raises(ModelError, match="weights 'int4' is not one of dense, int8"):
        load(weights="int4")
