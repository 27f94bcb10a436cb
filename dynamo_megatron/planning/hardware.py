"""Accelerators by name: what their makers state, and how much of the memory a process finds.

Memory is what CUDA reports as a device's total capacity, as torch's out-of-memory messages in public reports quote it.
Rates are the data sheets': dense bfloat16 matrix products, memory, NVLink in one direction, and a GPU's share of the
network in its maker's reference node of eight (DGX: A100 200 Gbit/s, H100, H200 and B200 400 Gbit/s).
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class GPU:
    name: str
    memory: float  # bytes
    flops: float  # bfloat16, dense, a second
    memory_bandwidth: float  # bytes a second
    nvlink: float  # bytes a second, one direction
    network: float  # bytes a second, one direction, of a GPU's share of its node's network
    fp8_sync: bool = True  # SGLang takes FP8 weights from ranks: docs/rollouts.md


GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("a100-80", 79.1 * GIB, 312e12, 2.039e12, 300e9, 25e9, fp8_sync=False),
        GPU("h100-80", 79.1 * GIB, 989.4e12, 3.35e12, 450e9, 50e9),
        GPU("h200-141", 139.8 * GIB, 989.4e12, 4.8e12, 450e9, 50e9),
        GPU("b200-180", 178.3 * GIB, 2250e12, 8.0e12, 900e9, 50e9, fp8_sync=False),
    )
}
SAME_MEMORY = 0.05  # by which a device's memory may differ from that of its kind


def gpu_named(name: str, memory: float) -> GPU | None:
    """The kind of a device that CUDA calls `name` ("NVIDIA H100 80GB HBM3") and that has `memory` bytes; None where it
    is in no row."""
    words = name.replace("-", " ").lower().split()
    named = (gpu for gpu in GPUS.values() if gpu.name.partition("-")[0] in words)
    return next((gpu for gpu in named if abs(memory / gpu.memory - 1) <= SAME_MEMORY), None)


@dataclass(frozen=True)
class Cluster:
    gpu: GPU
    gpus: int  # of the training, in all
    gpus_per_node: int

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    def link(self, ranks: int, apart: int = 1) -> float:
        """Bytes a second, one direction, that a rank of a group of `ranks` has to the others, at best.

        `apart`: the distance of neighbouring members in global rank. Where the group leaves its node, its ring crosses
        the network as many times as it has members in a node, each with a GPU's share.
        """
        if ranks * apart <= self.gpus_per_node:
            return self.gpu.nvlink
        return min(self.gpu.nvlink, self.gpu.network * max(1, self.gpus_per_node // apart))
