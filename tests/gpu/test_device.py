"""The same code on a GPU gives the CPU's numbers: one path by device."""

import pytest
import torch
from devices import Driver
from support import (
    FAMILIES,
    make_adapter,
    model_directory,
    random_sequences,
    random_tokens,
    worst_error,
)

from coserve.adapters.methods.lora import LoraConfig
from coserve.devices.loading import torch_device
from coserve.devices.messages.steps import RequestRows, Tasklets, Update
from coserve.devices.sampling_params import SamplingParams
from coserve.kernels import find_backend
from coserve.kernels.attention import AttentionSpec, Segment
from coserve.kernels.base import Backend
from coserve.kernels.bits import pack_signs, unpack_signs
from coserve.kernels.dropout import dropout_mask, dropout_row_ids
from coserve.memory.tensors.paged_kv import kv_page_bytes
from coserve.models import CachedSequence, forward, load_backbone, logits
from coserve.simulate.hardware import Hardware
from coserve.simulate.roofline import roofline_profile
from coserve.tuning import TrainingPass, make_pack, run_alone, training_programs
from coserve.tuning.config import OptimizerConfig, TuningConfig
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
        sequences = [
            CachedSequence(backbone, 12, bypasses) for bypasses in (None, adapter.bypasses())
        ]
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
        training = TrainingPass(
            adapter, training_programs(adapter), make_pack(random_sequences((9, 6, 12)))
        )
        run_alone(training, forward_rows=8, backward_rows=5)
        results.append({name: gradient.cpu() for name, gradient in training.gradients.items()})
    assert worst_error(results[1], results[0]) < 1e-4


def test_an_optimizer_resumes_from_its_state():
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
    assert torch.equal(
        dropout_mask(keys.cuda(), 33, p=0.3, salt=5).cpu(), dropout_mask(keys, 33, p=0.3, salt=5)
    )
    x = torch.randn(5, 13)
    assert torch.equal(unpack_signs(pack_signs(x.cuda()), 13).cpu(), x > 0)


def attend(
    backend: Backend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    batch = backend.prepare_attention(
        [Segment(num_rows=len(q), num_keys=len(k))], block_tokens=len(k)
    )
    return backend.attention(
        q, k.flatten(1)[None], v.flatten(1)[None], batch, AttentionSpec(scale=0.125)
    )


def test_the_attention_of_the_device_equals_its_plain_twin():
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, heads, 64) for n, heads in ((9, 8), (40, 2), (40, 2)))
    plain, lse = attend(find_backend(torch.device("cpu"), "plain"), q, k, v)
    out, norm = attend(find_backend(torch.device("cuda")), q.cuda(), k.cuda(), v.cuda())
    torch.testing.assert_close(out.cpu(), plain, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(norm.cpu(), lse, atol=1e-4, rtol=1e-4)


def test_a_device_on_a_gpu_says_what_one_on_a_cpu_says():
    """Tokens, log-probabilities, losses and norms, with sections timed by events and tasklets under
    a time limit."""
    told = []
    for place in ("cpu", "cuda"):
        backbone = load_backbone(str(model_directory("llama")), device=place)
        profile = roofline_profile(
            backbone, Hardware(name="any", flops_per_s=1e12, bytes_per_s=1e12, call_s=1e-6)
        )
        driver = Driver(
            torch_device(backbone, memory_bytes=2000 * kv_page_bytes(backbone, 4), profile=profile)
        )
        params = SamplingParams(max_tokens=6, temperature=0.8, top_p=0.9, repetition_penalty=1.2)
        tokens = driver.generate("drawn", random_tokens(9, 1).tolist(), params, seed=3)
        driver.open(
            "scored", SamplingParams(max_tokens=1, temperature=0.0, logprobs=2, prompt_logprobs=1)
        )
        ids = tuple(random_tokens(9, 2).tolist())
        rows = RequestRows("scored", 0, ids, driver.pages_for(9), samples=True, targets=ids[1:])
        result = driver.step(requests=[rows])
        scores = [one.logprob for one in (*result.prompts["scored"], result.tokens["scored"])]
        fields = LoraConfig(r=4, target_modules="all-linear").to_peft()
        opened = driver.open_trainer("job", TuningConfig(seed=1), adapter=fields)
        sums = driver.train("job", opened, random_sequences((9, 6, 12)), window=8, tasklet=5).packs[
            "job"
        ]
        norm = driver.step(updates=[Update("job", sums.num_trained, 2)]).norms["job"]
        told.append((tokens, torch.tensor([*scores, sums.loss, norm]), sums.num_correct))
        driver.train("job", opened, random_sequences((9, 6, 12)))
        assert 0 < result.forward_s < 60 and result.backward_s == pytest.approx(0, abs=0.1)
    (tokens, numbers, correct), (gpu_tokens, gpu_numbers, gpu_correct) = told
    assert gpu_tokens == tokens and gpu_correct == correct
    torch.testing.assert_close(gpu_numbers, numbers, atol=1e-3, rtol=1e-4)


def test_tasklets_on_a_gpu_stop_soon_after_the_time_limit():
    backbone = load_backbone(str(model_directory("llama")), device="cuda")
    profile = roofline_profile(
        backbone, Hardware(name="any", flops_per_s=1e12, bytes_per_s=1e12, call_s=1e-6)
    )
    driver = Driver(
        torch_device(backbone, memory_bytes=2000 * kv_page_bytes(backbone, 4), profile=profile)
    )
    fields = LoraConfig(r=4, target_modules="all-linear").to_peft()
    opened = driver.open_trainer("job", TuningConfig(), adapter=fields)
    driver.forward_and_loss("job", opened, random_sequences((9, 6, 12)))
    result = driver.step(tasklets=[Tasklets("job", 1, 27)], backward_limit_s=0.0)
    assert result.num_tasklets == {"job": 1}
