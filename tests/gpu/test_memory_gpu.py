"""Memory of a GPU that changes hands: pages to the host and back, and weights of another model
through a window."""

from dataclasses import replace
from random import Random

import pytest
import torch
from support import make_adapter, make_backbone, model_directory, random_sequences, worst_error

from coserve.devices.torch.optimizer_memory import OptimizerMemory
from coserve.memory.tensors.host_pages import HostPages
from coserve.memory.tensors.paged_kv import PagedKv
from coserve.memory.tensors.weight_window import WeightWindow
from coserve.models import load_backbone
from coserve.models.mapped_weights import MappedWeights
from coserve.tuning import TrainingPass, make_pack, run_alone, training_programs
from coserve.tuning.config import OptimizerConfig
from coserve.tuning.layerwise import LayerwisePass
from coserve.tuning.optimizer import AdapterOptimizer


@pytest.fixture(autouse=True)
def _exact_products():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def test_pages_go_to_the_host_and_come_back_elsewhere():
    backbone = load_backbone(str(model_directory("llama")), device="cuda")
    pages = PagedKv(backbone, num_pages=64, block_tokens=4)
    host = HostPages(pages, num_slots=16)
    pages.storage.random_(0, 255)
    before = pages.storage.clone()
    leaving, slots, back = [3, 4, 9, 20, 21, 22], [0, 1, 5, 7, 8, 9], [40, 2, 41, 42, 11, 60]
    host.copy_out(leaving, slots)
    host.wait()
    pages.storage[leaving] = 0  # after the copies, on the device
    host.copy_in(back, slots)
    host.wait()
    assert torch.equal(pages.storage[back], before[leaving])
    others = [page for page in range(64) if page not in leaving + back]
    assert torch.equal(pages.storage[others], before[others])


def test_tensors_go_to_the_host_and_come_back():
    backbone = load_backbone(str(model_directory("llama")), device="cuda")
    pages = PagedKv(backbone, num_pages=64, block_tokens=4)
    host = HostPages(pages, num_slots=64)
    tensors = [torch.randn(shape, device="cuda") for shape in ((7, 33), (1,), (256,))]
    shapes = [torch.empty_like(tensor, device="meta") for tensor in tensors]
    slots = list(range(1, 1 + -(-sum(each.nbytes for each in tensors) // pages.page_bytes)))
    host.store(tensors, slots)
    for on_device in (True, False):
        found = host.load(shapes, slots, on_device=on_device)
        for one, other in zip(found, tensors, strict=True):
            assert one.is_cuda == on_device and torch.equal(one.cpu(), other.cpu())


@pytest.mark.parametrize("name", ["llama", "llama-biases-tied", "qwen3"])
def test_gradients_through_the_window_are_those_of_resident_weights(name):
    backbone = make_backbone(name)
    pack = make_pack(random_sequences((7, 11, 1, 5)))
    resident = make_adapter(backbone, seed=1)
    expected = TrainingPass(resident, training_programs(resident), pack)
    run_alone(expected, forward_rows=100, backward_rows=100)
    on_gpu = load_backbone(str(model_directory(name)), device="cuda")
    mapped = MappedWeights(on_gpu.architecture, model_directory(name))
    memory = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    window = WeightWindow(on_gpu.architecture, mapped, memory, dtype=torch.float32)
    window.resize(range(64, 64 + window.least_bytes + 64))
    adapter = make_adapter(replace(on_gpu, weights=window), seed=1)
    rng = Random(1)
    for _ in range(2):
        training = LayerwisePass(window, adapter, training_programs(adapter), pack)
        while not training.done:
            training.run_tasklet(rng.randint(1, 9))
        gradients = {key: gradient.cpu() for key, gradient in training.gradients.items()}
        assert training.sums.loss == pytest.approx(expected.sums.loss, rel=1e-5)
        assert worst_error(gradients, expected.gradients) < 1e-4
    assert window.num_bytes_copied > window.all_bytes, "it was too small for all of it"
    window.close()


def test_moments_in_pages_on_the_host_and_back_give_the_same_steps():
    backbone = load_backbone(str(model_directory("llama")), device="cuda")
    pages = PagedKv(backbone, num_pages=400, block_tokens=4)
    adapters = [make_adapter(backbone, seed=1) for _ in range(2)]
    config = OptimizerConfig(learning_rate=1e-2)
    beside, placed = [AdapterOptimizer(adapter.masters, config) for adapter in adapters]
    memory = OptimizerMemory(placed, backbone.device, need_pages=True)
    size = -(-sum(2 * each.nbytes for each in adapters[0].masters.values()) // pages.page_bytes)
    generator = torch.Generator(device="cuda").manual_seed(3)
    for run in ((7, size), (7, size), (0, 0), (100, size), (103, size)):
        memory.place(pages, *run)
        moments = placed.moments.values()
        assert all(each.is_cuda == bool(run[1]) for each in moments)
        if not run[1]:
            pages.storage.random_(0, 255, generator=generator)  # others have the pages
            continue
        gradients = {
            name: torch.randn(each.shape, device="cuda", generator=generator)
            for name, each in adapters[0].masters.items()
        }
        for optimizer in (beside, placed):
            copies = {name: gradient.clone() for name, gradient in gradients.items()}
            optimizer.step(copies, num_trained=3, num_steps=10)
    for name, master in adapters[0].masters.items():
        assert torch.equal(master, adapters[1].masters[name])
    state = placed.state(on_host=True)
    assert all(not value.is_cuda for value in state.values())
    assert all(torch.equal(state[name], value.cpu()) for name, value in beside.state().items())
    resumed = AdapterOptimizer(adapters[0].masters, config)
    resumed.load_state(state, on_host=True)
    assert not any(each.is_cuda for each in resumed.moments.values())
    OptimizerMemory(resumed, backbone.device, need_pages=True).place(pages, 5, size)
    assert all(torch.equal(value.cpu(), state[name]) for name, value in resumed.moments.items())
    assert all(each.is_cuda for each in resumed.moments.values())
