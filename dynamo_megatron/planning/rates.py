"""The rates that all times of a plan come from: what one H100, for CUDA IPC and adapters an H200, gave with a model of
the shape of Qwen2.5-1.5B.

Another GPU is taken to reach the same share of what its maker states, and links between GPUs all of it: of that only an
H200 has been measured. `benchmarks/planned.py` compares what follows from this table with every committed run.
"""

from __future__ import annotations

from typing import NamedTuple

from dynamo_megatron.planning.hardware import GPU, GPUS

MEASURED_ON = GPUS["h100-80"]


class Rate(NamedTuple):
    value: float
    unit: str
    source: str  # a file of benchmarks/results/gpu, and what was read there; or that it is an allowance


PROBE, LIVE = (f"2026-11-26-h100/device.json, {part}: " for part in ("probe", "live-disk"))
TRACE, TURNS = "2026-11-27-h100/traces.json, trace_te: ", "2026-11-27-h100/layers.json, live-turns: "
H200 = "2026-11-27-h200/night.json: "
LORA = "2026-11-27-h200/lora.json: "
NEW = "of launches.json's first two versions; the third has not run on a GPU"
RATES = {
    "products": Rate(750e12, "FLOP/s", f"{TRACE}788 TFLOP/s of fc1, 721 of weight gradients; {PROBE}785"),
    "attention": Rate(242e12, "FLOP/s of the causal half", f"{TRACE}52.5 ms of both kernels for 12.7 TFLOP"),
    "copies": Rate(2.97e12, "bytes/s, read and written", f"{PROBE}a copy"),
    "passing": Rate(2.1, "bytes a pass for each saved", f"{TRACE}busy seconds without products, attention and Adam"),
    "busy": Rate(0.81, "of log-probs and update", f"{TRACE}1.07 s in the third step, of the second's 1.33"),
    "forward launches": Rate(1.8e-3, "s a layer and micro-batch", f"{LIVE}1.87 s for 22 of them, times 0.60, {NEW}"),
    "launches": Rate(4.9e-3, "s, with the backward pass", f"{LIVE}4.25 s for 22 micro-batches, times 0.72, {NEW}"),
    "adapter": Rate(0.67e-3, "s an adapter and micro-batch", f"{LORA}1.26, 1.29 s, less launches; Megatron's linears"),
    "decode": Rate(95e-6, "s a layer and token", f"{LIVE}beside the bytes read; smoke in the same file"),
    "decode without graphs": Rate(1.4e-3, "s a layer and token", f"{TURNS}the server's log"),
    "host memory": Rate(30e9, "bytes/s of a rank's optimizer", "an allowance, which no run has shown"),
    "disk": Rate(0.87e9, "bytes/s of the model", f"{LIVE}3.09 GB written, loaded and proved in 3.4 to 4.7 s"),
    "ipc": Rate(14.7e9, "bytes/s of a server rank", f"{H200}3.09 GB read and proved in 0.17 to 0.23 s"),
}


def rate(name: str, gpu: GPU | None = None) -> float:
    """The rate's value; with `gpu`, that GPU's, by the ratio of what the makers state."""
    if gpu is None:
        return RATES[name].value
    stated, measured = (g.memory_bandwidth if name == "copies" else g.flops for g in (gpu, MEASURED_ON))
    return RATES[name].value * stated / measured
