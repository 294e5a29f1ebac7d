"""Devices, by what others have measured on them."""

from dataclasses import dataclass, replace
from math import ceil

from coserve.simulate.links import NVLINK_3, NVLINK_4, NVLINK_BRIDGE, PCIE_4, Link

# Products are made in tiles of this many rows and columns, of fewer rows where there are fewer.
_TILE, _MIN_TILE_ROWS = 128, 16
# Into how many parts the sums of a product may be divided for more tiles, and the pace that is left
# to each of them.
_PACE_OF_PARTS = {1: 1.0, 2: 0.9, 4: 0.8}
# Of a device's units, the share that can take all of its memory's bandwidth: decode steps hardly
# get faster with more (HARLI figure 9).
_BANDWIDTH_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The sustained performance of a device."""

    name: str
    """Name of the device."""
    flops_per_s: float
    """Pace of large matrix products."""
    bytes_per_s: float
    """Pace of streaming reads and writes."""
    call_s: float
    """Minimum time of an operator."""
    num_units: int = 1
    """Units among which a step can be divided; 1 if it cannot."""
    num_processors: int = 1
    """Processors to which tiles of products are dealt; 1 if products of any shape run at full pace.
    """
    attention: float = 1.0
    """Pace of attention over sequences, as a share of that of products."""
    attention_backward: float = 1.0
    """The same of its backward pass."""
    memory_bytes: int = 80 * 10**9
    """Bytes of its memory."""
    host_bytes_per_s: float = 2.2e10
    """Pace of copies between the device and the host's memory, one way."""
    link: Link | None = None
    """Link between the devices of a group; None if unknown."""

    def product_s(self, rows: int, num_outputs: int, num_inputs: int, itemsize: int) -> float:
        """Return the time of a product of [rows, num_inputs] with [num_inputs, num_outputs].

        Tiles are dealt to processors in rounds, the last of which leaves some idle ("Matrix
        Multiplication Background User's Guide", NVIDIA DU-09799, section 3).
        """
        # Tiles have a power of two of rows, as few as hold all of them.
        tile_rows = min(_TILE, max(_MIN_TILE_ROWS, 1 << (rows - 1).bit_length()))
        num_tiles = ceil(rows / tile_rows) * ceil(num_outputs / _TILE)
        tile_flops = 2 * tile_rows * _TILE * num_inputs
        if self.num_processors == 1:
            compute_s = 2 * rows * num_outputs * num_inputs / self.flops_per_s
        else:
            processor_s = tile_flops / (self.flops_per_s / self.num_processors)
            # Dividing the sums into parts fills idle processors, at a lower pace of each part.
            compute_s = min(
                ceil(num_tiles * parts / self.num_processors) / parts * processor_s / pace
                for parts, pace in _PACE_OF_PARTS.items()
            )
        num_bytes = itemsize * (rows * (num_inputs + num_outputs) + num_inputs * num_outputs)
        return self.call_s + max(compute_s, num_bytes / self.bytes_per_s)

    def pass_s(self, flops: float, num_bytes: float) -> float:
        """Return the time of any other operator."""
        return self.call_s + max(flops / self.flops_per_s, num_bytes / self.bytes_per_s)

    def part(self, num_units: int) -> "Hardware":
        """Return some of its units, while nothing else runs on it."""
        share = num_units / self.num_units
        return replace(
            self,
            flops_per_s=self.flops_per_s * share,
            bytes_per_s=self.bytes_per_s * min(1.0, share / _BANDWIDTH_SHARE),
            num_processors=max(1, round(self.num_processors * share)),
            num_units=num_units,
        )


# Sources of the catalogue, read on 2026-11-25. benchmarks/hardware.md holds the model against what
# they measured.
# - Products, bfloat16: the largest pace that github.com/zzc0721/torch-performance-test-data
#   (database.md) found over square sizes: A100 40 GB 246, 80 GB 265, H100 798, H200 790, RTX 3090
#   76.6 TFLOP/s; L40S 269 and RTX A6000 123, 0.74 and 0.80 of their datasheets, which stand in for
#   the RTX 6000 Ada and the A40 (the same chips). The table of github.com/stas00/ml-engineering
#   (compute/accelerator) agrees: A100 271, H100 and H200 795.
# - Memory: the share of the datasheet's bandwidth that a streaming kernel reaches on each device,
#   from the table of github.com/ProjectPhysX/FluidX3D: A100 0.77 (40 GB: 0.84), H100 0.80, H200
#   0.73, A40 0.74, RTX 3090 0.89, Ada 0.80.
# - call_s: what the smallest product takes on an H100, in the tables of matrix products of
#   github.com/openxla/xla (xla/service/gpu/model/matmul_interpolator_data.h).
# - Attention: FlashAttention-2, causal, heads of 128. A100: 144 to 159 TFLOP/s forward
#   (github.com/liangan1/GPU_travel, performance/flash-attn), and backward 63% of the datasheet's at
#   best (arXiv 2307.08691, section 4.1), of which four fifths are taken. H100: 335 over both passes
#   (there). RTX 4090, for all of its kin: 151 forward and 99 backward (apache/tvm
#   tl_doc/flash_perf.md), where products reach 163.
# - Links: `links.py`. Those of an A100 or H100 are of boards with NVSwitch.
# Divided in tenths of their multiprocessors, as HARLI section 5.2 does. Copies to the host reach
# some 0.7 of PCIe.
A100 = Hardware(
    name="A100",
    flops_per_s=2.65e14,
    bytes_per_s=1.57e12,
    call_s=5.5e-6,
    num_units=10,
    num_processors=108,
    attention=0.57,
    attention_backward=0.6,
    link=NVLINK_3,
)
A100_40GB = replace(
    A100, name="A100 40 GB", flops_per_s=2.46e14, bytes_per_s=1.3e12, memory_bytes=40 * 10**9
)
H100 = Hardware(
    name="H100",
    flops_per_s=7.9e14,
    bytes_per_s=2.68e12,
    call_s=5.5e-6,
    num_units=10,
    num_processors=132,
    attention=0.42,
    attention_backward=0.42,
    host_bytes_per_s=4.5e10,
    link=NVLINK_4,
)
H200 = replace(H100, name="H200", bytes_per_s=3.5e12, memory_bytes=141 * 10**9)
A40 = replace(
    A100,
    name="A40",
    flops_per_s=1.2e14,
    bytes_per_s=5.15e11,
    num_processors=84,
    attention=0.93,
    attention_backward=0.61,
    memory_bytes=48 * 10**9,
    link=NVLINK_BRIDGE,
)
RTX3090 = replace(
    A40,
    name="RTX 3090",
    flops_per_s=7.6e13,
    bytes_per_s=8.3e11,
    num_processors=82,
    memory_bytes=24 * 10**9,
)
ADA6000 = replace(
    A40,
    name="RTX 6000 Ada",
    flops_per_s=2.7e14,
    bytes_per_s=7.7e11,
    num_processors=142,
    link=PCIE_4,
)
# By the names of commands.
CATALOGUE = {
    "a100": A100,
    "a100-40gb": A100_40GB,
    "h100": H100,
    "h200": H200,
    "a40": A40,
    "rtx3090": RTX3090,
    "ada6000": ADA6000,
}
