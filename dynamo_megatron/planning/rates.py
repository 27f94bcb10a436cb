"""The rates that all times of a plan come from: what one H100 gave with a model of Qwen2.5-1.5B's shape.

Another GPU is taken to reach the same share of what its maker states, and links between GPUs all of it: nothing of that
has been measured (`extrapolated` of planning/report.py names it). `benchmarks/planned.py` compares what follows from
this table with every committed run.
"""

from __future__ import annotations

from typing import NamedTuple

from dynamo_megatron.planning.hardware import GPU, GPUS

MEASURED_ON, MEASURED_PARAMETERS = GPUS["h100-80"], 1.54e9


class Rate(NamedTuple):
    value: float
    unit: str
    source: str  # a file of benchmarks/results/gpu, and what was read there


TRACE = "2026-11-27-h100/traces.json, trace_te: "
LIVE = "2026-11-26-h100/device.json, live-disk: "
LAUNCHES = "the part of old and new code of benchmarks/results/launches.json"
RATES = {
    "products": Rate(
        750e12, "FLOP/s", TRACE + "788 TFLOP/s of fc1, 721 of weight gradients; 2026-11-26-h100/gemms.json: 650 to 780"
    ),
    "attention": Rate(242e12, "FLOP/s of the causal half", TRACE + "52.5 ms of both kernels for 12.7 TFLOP"),
    "copies": Rate(2.97e12, "bytes/s, read and written", "2026-11-26-h100/device.json, probe: a copy"),
    "passing": Rate(
        2.1,
        "bytes read and written in a pass for each that autograd keeps of a layer",
        TRACE + "the GPU's busy seconds without products, attention and Adam",
    ),
    "busy": Rate(
        0.81, "of the seconds of log-probs and update", TRACE + "1.07 s in the third step, of the second's 1.33"
    ),
    "forward launches": Rate(
        1.8e-3, "s a layer and micro-batch", f"{LIVE}1.87 s for 22 micro-batches, times 0.60, {LAUNCHES}"
    ),
    "launches": Rate(
        4.9e-3, "s a layer and micro-batch, with backward", f"{LIVE}4.25 s for 22 micro-batches, times 0.72, {LAUNCHES}"
    ),
    "decode": Rate(
        95e-6, "s a layer and token", "2026-11-26-h100/device.json, smoke and live-disk: beside the bytes read"
    ),
    "decode without graphs": Rate(
        1.4e-3, "s a layer and token", "2026-11-27-h100/layers.json, live-turns: the server's log"
    ),
    "disk": Rate(
        0.87e9,
        "bytes/s of the model, written and loaded",
        LIVE + "3.09 GB in 3.4 to 4.7 s; 2026-11-27-h100/layers.json: written in 3.6 s",
    ),
    "ipc": Rate(
        2.6e9,
        "bytes/s of a server rank",
        "2026-11-27-h100/layers.json, live-turns: one sync, without the server's compilation of 4.7 s",
    ),
}


def rate(name: str, gpu: GPU | None = None) -> float:
    """The rate's value; with `gpu`, that GPU's, by the ratio of what the makers state."""
    if gpu is None:
        return RATES[name].value
    stated, measured = (g.memory_bandwidth if name == "copies" else g.flops for g in (gpu, MEASURED_ON))
    return RATES[name].value * stated / measured
