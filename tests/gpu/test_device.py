"""The same code on a GPU gives the CPU's numbers: one path by device."""

import pytest
import torch
from support import FAMILIES, make_adapter, model_directory, random_sequences, random_tokens, worst_error

from coserve.kernels import find_backend
from coserve.kernels.attention import AttentionSpec, Segment
from coserve.kernels.base import Backend
from coserve.kernels.bits import pack_signs, unpack_signs
from coserve.kernels.dropout import dropout_mask, dropout_row_ids
from coserve.models import CachedSequence, forward, load_backbone, logits
from coserve.tuning import TrainingPass, make_pack, run_alone, training_programs
from coserve.tuning.config import OptimizerConfig
from coserve.tuning.optimizer import AdapterOptimizer


@pytest.fixture(autouse=True)
def _exact_products():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_cpus(family):
    results = []
    for device in ("cpu", "cuda"):
        backbone = load_backbone(str(model_directory(family)), device=device)
        adapter = make_adapter(backbone)
        sequences = [CachedSequence(backbone, 12, bypasses) for bypasses in (None, adapter.bypasses())]
        rows = []
        for length in (7, 1, 4):
            tokens = random_tokens(length, length)
            rows.append(forward(backbone, [sequence.extend(tokens) for sequence in sequences]))
        results.append(logits(backbone, torch.cat(rows)).cpu())
    torch.testing.assert_close(results[1], results[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_the_cpus(family):
    results = []
    for device in ("cpu", "cuda"):
        backbone = load_backbone(str(model_directory(family)), device=device)
        adapter = make_adapter(backbone, dropout=0.2)
        training = TrainingPass(adapter, training_programs(adapter), make_pack(random_sequences((9, 6, 12))))
        run_alone(training, forward_rows=8, backward_rows=5)
        results.append({name: gradient.cpu() for name, gradient in training.gradients.items()})
    assert worst_error(results[1], results[0]) < 1e-4


def test_an_optimizer_goes_on_from_its_state():
    results = []
    for device in ("cpu", "cuda"):
        masters = {"w": torch.linspace(-1, 1, 12, device=device).view(3, 4)}
        first = AdapterOptimizer(masters, OptimizerConfig(learning_rate=0.1))
        first.step({"w": masters["w"] * 2}, num_trained=3, num_steps=2)
        second = AdapterOptimizer(masters, OptimizerConfig(learning_rate=0.1))
        second.load_state({name: value.cpu() for name, value in first.state().items()})
        second.step({"w": masters["w"] * 3}, num_trained=3, num_steps=2)
        results.append(masters["w"].cpu())
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=0)


def test_masks_and_signs_are_the_same_bits():
    keys = dropout_row_ids(3, torch.arange(50))
    assert torch.equal(dropout_mask(keys.cuda(), 33, p=0.3, salt=5).cpu(), dropout_mask(keys, 33, p=0.3, salt=5))
    x = torch.randn(5, 13)
    assert torch.equal(unpack_signs(pack_signs(x.cuda()), 13).cpu(), x > 0)


def attend(backend: Backend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch = backend.prepare_attention([Segment(num_rows=len(q), num_keys=len(k))], block_tokens=len(k))
    return backend.attention(q, k.flatten(1)[None], v.flatten(1)[None], batch, AttentionSpec(scale=0.125))


def test_the_attention_of_the_device_equals_its_plain_twin():
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, heads, 64) for n, heads in ((9, 8), (40, 2), (40, 2)))
    plain, lse = attend(find_backend(torch.device("cpu"), "plain"), q, k, v)
    out, norm = attend(find_backend(torch.device("cuda")), q.cuda(), k.cuda(), v.cuda())
    torch.testing.assert_close(out.cpu(), plain, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(norm.cpu(), lse, atol=1e-4, rtol=1e-4)
