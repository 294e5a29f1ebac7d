"""Devices by their datasheets, and the profile that a roofline gives a model on them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from coserve.adapters.base import Adapter
from coserve.adapters.methods.lora import LoraConfig
from coserve.devices.counting import job_counts, model_counts
from coserve.models.backbone import Backbone
from coserve.scheduling.profile import Curve, Profile
from coserve.scheduling.sharing import Share, Sharing
from coserve.tuning.programs import training_programs

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
# Bytes of an optimizer step per parameter: gradient, master and two moments in float32, read, and all but one written.
_UPDATE_BYTES = 28
# A backward pass moves about this many times the bytes of a forward pass over the same rows, beside the weights.
_LOSS_BYTES_PER_LOGIT = 24
# Drawing a token passes over the logits in float32 some times (scale, exponentials and their sum, the sum up to the
# token); a score needs the exponentials' sum alone. A mask is unpacked, and passes over them once.
_SAMPLE_BYTES_PER_LOGIT, _SCORE_BYTES_PER_LOGIT, _MASK_BYTES_PER_LOGIT = 24, 12, 14


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Sustained rates of a device: what large matrix products and streaming reads reach, not what the paper says.

    call_s: what starting one operator costs. num_units: among which a step can be divided (1: it cannot).
    memory_bytes: of the device. host_bytes_per_s: between it and the host's memory, one way.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    call_s: float
    num_units: int = 1
    memory_bytes: int = 80 * 10**9
    host_bytes_per_s: float = 2.2e10


# bfloat16 or float16 with float32 sums: large products reach 0.6 to 0.7 of what datasheets say, and reads 0.8. Divided
# in tenths of their multiprocessors, as HARLI section 5.2 does. Copies to the host reach some 0.7 of PCIe 4 or 5.
A100 = Hardware(name="A100", flops_per_s=2.2e14, bytes_per_s=1.6e12, call_s=5e-6, num_units=10)
H100 = Hardware(name="H100", flops_per_s=6.0e14, bytes_per_s=2.7e12, call_s=4e-6, num_units=10, host_bytes_per_s=4.5e10)
H200 = replace(H100, name="H200", bytes_per_s=3.8e12, memory_bytes=141 * 10**9)
A40 = replace(A100, name="A40", flops_per_s=1.0e14, bytes_per_s=5.5e11, memory_bytes=48 * 10**9)
RTX3090 = replace(A100, name="RTX 3090", flops_per_s=5.0e13, bytes_per_s=7.5e11, memory_bytes=24 * 10**9)
ADA6000 = replace(A100, name="RTX 6000 Ada", flops_per_s=2.3e14, bytes_per_s=7.7e11, memory_bytes=48 * 10**9)
# By the names of commands.
CATALOGUE = {"a100": A100, "h100": H100, "h200": H200, "a40": A40, "rtx3090": RTX3090, "ada6000": ADA6000}
# Of a device's units, the share that can take all of its memory's bandwidth: decode steps hardly get faster with more
# (HARLI figure 9).
_BANDWIDTH_SHARE = 0.5
_SHARE_ROWS = (1, 4, 16, 64, 128, 256, 512)
# Of the tasklets whose traffic forward passes beside them notice.
_ROWS_OF_TASKLET = 512


def roofline_profile(backbone: Backbone, hardware: Hardware) -> Profile:
    """The profile of a model (on the "meta" device, or any) on hardware that is not here.

    Every piece takes the longer of its arithmetic and its memory traffic, and a call for each operator.
    """
    architecture = backbone.architecture
    adapter = Adapter(backbone, LoraConfig(r=16, alpha=32, target_modules="all-linear"))
    programs = training_programs(adapter)
    model, job = model_counts(backbone), job_counts(adapter, programs)
    num_calls = sum(len(architecture.graphs[part].nodes) for part in architecture.parts[:-1])
    block_bytes = model.flops_per_row / 2 * backbone.dtype.itemsize
    head_bytes = model.head_flops_per_row / 2 * backbone.dtype.itemsize
    num_parts = max(1, job.num_parts)

    def seconds(flops: float, num_bytes: float, share: float = 1.0) -> float:
        bandwidth = hardware.bytes_per_s * min(1.0, share / _BANDWIDTH_SHARE)
        return max(flops / (hardware.flops_per_s * share), num_bytes / bandwidth)

    def curve(
        flops_per_row: float, weight_bytes: float, bytes_per_row: float, calls: float, share: float = 1.0
    ) -> Curve:
        """On a share of the device's units."""
        return Curve(
            rows=_ROWS,
            seconds=tuple(
                seconds(n * flops_per_row, weight_bytes + n * bytes_per_row, share) + calls * hardware.call_s
                for n in _ROWS
            ),
        )

    row_bytes = 20 * architecture.hidden_size * backbone.dtype.itemsize * architecture.num_layers
    saved_bytes = programs.kept_bytes_per_token(backbone.dtype)
    forward = partial(curve, model.flops_per_row, block_bytes, row_bytes, num_calls)
    backward_row_bytes = (2 * row_bytes + saved_bytes) / num_parts
    backward = partial(
        curve, job.backward_flops_per_row, block_bytes / num_parts, backward_row_bytes, 2 * num_calls / num_parts
    )
    traffic_s = (block_bytes / num_parts + _ROWS_OF_TASKLET * backward_row_bytes) / hardware.bytes_per_s
    return Profile(
        model=model,
        job=job,
        forward=forward(),
        head=curve(model.head_flops_per_row, head_bytes, architecture.vocab_size * backbone.dtype.itemsize, 8),
        sample=curve(0.0, 0.0, _SAMPLE_BYTES_PER_LOGIT * architecture.vocab_size, 8),
        mask=curve(0.0, 0.0, _MASK_BYTES_PER_LOGIT * architecture.vocab_size, 6),
        score=curve(model.head_flops_per_row, head_bytes, _SCORE_BYTES_PER_LOGIT * architecture.vocab_size, 8),
        loss=curve(2 * model.head_flops_per_row, 2 * head_bytes, _LOSS_BYTES_PER_LOGIT * architecture.vocab_size, 20),
        backward=backward(),
        s_per_pair=model.flops_per_pair / hardware.flops_per_s,
        backward_s_per_pair=job.backward_flops_per_pair / hardware.flops_per_s,
        s_per_key=model.kv_bytes_per_key / hardware.bytes_per_s,
        s_per_span=hardware.call_s,
        s_per_bypass=3 * hardware.call_s,
        s_per_window_row=seconds(job.flops_per_row, 2 * saved_bytes),
        s_per_parameter=_UPDATE_BYTES / hardware.bytes_per_s,
        update_s=10 * hardware.call_s,
        s_per_copied_byte=1 / hardware.host_bytes_per_s,
        saved_bytes_per_token=saved_bytes,
        sharing=_sharing(hardware, forward, backward, traffic_s / backward().at(_ROWS_OF_TASKLET)),
    )


def _sharing(
    hardware: Hardware, forward: Callable[..., Curve], backward: Callable[..., Curve], traffic: float
) -> Sharing | None:
    """How fast parts of the device are; forward, backward: curves on a share of it.

    traffic: the share of its time in which a tasklet moves data. Both sides wait for the memory meanwhile (HARLI
    equation 5, with a forward pass that needs all of its bandwidth).
    """
    if hardware.num_units == 1:
        return None
    whole = forward(), backward()
    shares = []
    for units in range(1, hardware.num_units):
        parts = [side(share=units / hardware.num_units) for side in (forward, backward)]
        speeds = [tuple([a.at(n) / b.at(n) for n in _SHARE_ROWS]) for a, b in zip(whole, parts, strict=True)]
        shares.append(Share(units=units, rows=_SHARE_ROWS, forward=speeds[0], backward=speeds[1]))
    return Sharing(
        num_units=hardware.num_units,
        shares=tuple(shares),
        forward_interference=traffic,
        backward_interference=traffic,
    )
