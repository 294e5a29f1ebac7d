"""Memory that an adapter would take is known before it is taken, from the headers of its files."""

import json
import struct
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import examples_of, make_engine
from support import make_adapter, make_backbone

from coserve.adapters import LoraConfig, load_adapter, save_adapter
from coserve.adapters.layout import AdapterLayout
from coserve.devices.torch import adapter_memory
from coserve.devices.torch.adapter_memory import AdapterMemory, room_for_a_job
from coserve.devices.torch.process_memory import pool_bytes
from coserve.errors import AdapterError, AdapterTooLargeError
from coserve.tuning.config import TuningConfig

# More than any machine has: 550 GB at one module.
HUGE = 2**31 - 1
REFERENCE = LoraConfig(r=16, target_modules="all-linear").sizes(make_backbone("llama").architecture)
ONE_MODULE: dict[str, Any] = {"target_modules": ["q_proj"], "layers_to_transform": [0]}
# Without a check this rank takes 1.6 GB.
LARGE = 300_000
MOST_BYTES = 300 << 20


def write_header(path: Path, shapes: dict[str, list[int]]) -> None:
    """A safetensors file of these shapes, in float32, of which the disk holds nothing but the
    header."""
    header, end = {}, 0
    for name, shape in shapes.items():
        num_bytes = 4
        for size in shape:
            num_bytes *= size
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + num_bytes]}
        end += num_bytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def edit_config(directory: Path, **fields: object) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A whole adapter of rank 4 at one module."""
    save_adapter(make_adapter(make_backbone("llama"), **ONE_MODULE), tmp_path / "adapter")
    return tmp_path / "adapter"


def huge(directory: Path) -> Path:
    """The same with HUGE as its rank, in the config and in the tensors."""
    edit_config(directory, r=HUGE)
    prefix = "base_model.model.model.layers.0.self_attn.q_proj."
    shapes = {f"{prefix}lora_A.weight": [HUGE, 32], f"{prefix}lora_B.weight": [32, HUGE]}
    write_header(directory / "adapter_model.safetensors", shapes)
    return directory


@pytest.mark.long
def test_a_rank_that_the_tensors_do_not_have_takes_no_memory(tmp_path):
    """A process of its own measures its memory."""
    save_adapter(make_adapter(make_backbone("llama"), target_modules="all-linear"), tmp_path)
    edit_config(tmp_path, r=LARGE)
    code = f"""
import resource, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from engines import make_engine
from coserve.errors import AdapterError
engine = make_engine()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    engine.load_adapter("x", {str(tmp_path)!r})
except AdapterError as error:
    print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    message, num_bytes = done.stdout.splitlines()
    assert f"needs [{LARGE}, 32]" in message
    assert "lora_A.weight has shape [4, 32]" in message
    assert int(num_bytes) < MOST_BYTES


def test_tensors_that_no_machine_holds_are_named(directory):
    engine = make_engine()
    with pytest.raises(AdapterTooLargeError) as caught:
        engine.load_adapter("x", str(huge(directory)))
    assert str(directory) in str(caught.value)
    assert (
        f"needs 549.8 GB of memory (its largest tensor is "
        f"model.layers.0.self_attn.q_proj.lora_A.weight, [{HUGE}" in (str(caught.value))
    )
    assert "bytes are missing: lower its rank" in str(caught.value)
    assert "x" not in engine.versions


def test_a_job_of_a_rank_that_no_machine_holds_is_refused():
    engine = make_engine()
    config = LoraConfig(r=HUGE, target_modules=("q_proj",), layers_to_transform=0)
    with pytest.raises(
        AdapterTooLargeError, match=r"job .* needs 4,947.8 GB of memory .*lora_A.weight"
    ):
        engine.submit(examples_of((5, 6)), TuningConfig(), adapter=config)
    assert not engine.jobs
    engine.submit(examples_of((5, 6)), TuningConfig(), adapter=LoraConfig())
    engine.check_integrity()


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "optimizer.safetensors"])
def test_a_checkpoint_with_absurd_tensors_is_refused(tmp_path, file):
    engine = make_engine()
    data, config = examples_of((5, 6, 7, 8)), TuningConfig(num_epochs=2, batch_size=1)
    job = engine.submit(data, config, adapter=LoraConfig(r=4, **ONE_MODULE))
    while engine.jobs[job].num_steps_done < 2:
        engine.step()
    checkpoint = engine.checkpoint(job).write(tmp_path)
    error: type[AdapterError]
    if file == "adapter_model.safetensors":
        huge(checkpoint)
        error, said = AdapterTooLargeError, "4,947.8 GB"
    else:
        name = "model.layers.0.self_attn.q_proj.lora_A.weight"
        write_header(checkpoint / file, {"num_steps_done": [], f"{name}/exp_avg": [HUGE, 32]})
        error, said = (
            AdapterError,
            rf"lora_A.weight/exp_avg, of shape \[{HUGE}, 32\], must have the shape \[4, 32\]",
        )
    other = make_engine()
    with pytest.raises(error, match=said):
        other.submit_examples(data, config, checkpoint=checkpoint, job_id="again")
    assert not other.jobs


def test_a_header_that_is_none_is_refused(directory):
    (directory / "adapter_model.safetensors").write_bytes(struct.pack("<Q", 2**40) + b"{}")
    with pytest.raises(AdapterError, match="its header would have 1,099,511,627,776 bytes"):
        load_adapter(make_backbone("llama"), directory)


def test_a_config_that_is_none_is_refused(directory):
    path = directory / "adapter_config.json"
    for content, said in (
        (b"[" * 100_000, "nested too deeply"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b" " * (5 << 20), "is too long"),
        (path.read_bytes().replace(b'"r": 4', b'"r": ' + b"9" * 5000), "not valid"),
        (path.read_bytes().replace(b'"r": 4', b'"r": 1e400'), "whole number from 1 to"),
        (path.read_bytes().replace(b'"r": 4', b'"r": ' + b"9" * 400), "whole number from 1 to"),
    ):
        path.write_bytes(content)
        with pytest.raises(AdapterError, match=said) as caught:
            load_adapter(make_backbone("llama"), directory)
        assert len(str(caught.value)) < 1000


def test_those_that_load_at_the_same_time_share_what_is_free(monkeypatch):
    monkeypatch.setattr(adapter_memory, "available_bytes", lambda device: 8_000_000)
    memory = AdapterMemory(torch.device("cpu"), torch.float32)
    config = LoraConfig(r=10_000, **ONE_MODULE)
    layout = AdapterLayout.of(config, make_backbone("llama").architecture)
    assert layout.num_parameters == 640_000
    for _ in range(3):  # a refusal leaves no trace
        with (
            pytest.raises(
                AdapterTooLargeError,
                match=r"three needs 2.6 MB of memory .* 2.3 MB are there for it",
            ),
            memory.for_serving("one", layout),
            memory.for_serving("two", layout),
            memory.for_serving("three", layout),
        ):
            pass


@pytest.mark.parametrize(
    ("free", "is_apart", "fits", "need_pages"),
    [
        (46, False, True, False),
        (44, False, False, False),
        (41, True, True, False),
        (39, True, True, True),
        (26, True, True, True),
        (24, True, False, True),
    ],
)
def test_moments_may_lie_in_pages_where_the_hosts_memory_is_another_one(
    free, is_apart, fits, need_pages, monkeypatch
):
    """free: bytes for each parameter, of which 80% count. All that training takes is 9 numbers of 4
    bytes, 4 of these for moments; one is there when they are asked about.
    """
    layout = LoraConfig(**ONE_MODULE).sizes(make_backbone("llama").architecture)
    num_parameters = layout.num_parameters
    monkeypatch.setattr(adapter_memory, "available_bytes", lambda device: free * num_parameters)
    memory = AdapterMemory(torch.device("cpu"), torch.float32, host_is_apart=is_apart)
    refused = pytest.raises(
        AdapterTooLargeError, match="or start with less --memory for the page pool"
    )
    with nullcontext() if fits else refused, memory.for_training("job x", layout):
        pass
    assert memory.moments_need_pages(num_parameters) == need_pages


def test_a_gpus_pool_leaves_room_for_a_job(monkeypatch):
    """A GPU of 24 GB with an 8B model on it has 7.5 GB free, of which a job takes some."""
    job_bytes = room_for_a_job(make_backbone("llama"))
    assert job_bytes * 0.8 == pytest.approx(
        AdapterMemory(torch.device("cpu"), torch.float32).training_bytes(REFERENCE)
    )
    cuda, sizes = torch.device("cuda"), {}
    for job_gb in (0.5, 1.5, 9.0):
        monkeypatch.setattr(
            torch.cuda, "mem_get_info", lambda device: (7_500_000_000, 24_000_000_000)
        )
        sizes[job_gb] = pool_bytes(cuda, int(job_gb * 1e9)) / 1e9
    assert sizes == pytest.approx({0.5: 0.85 * 7.5, 1.5: 0.95 * 7.5 - 1.5, 9.0: 0.25 * 7.5})
