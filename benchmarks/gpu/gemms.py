"""The head's three matrix products in the forms that cuBLAS may be given, and the head by kernel and by chunk."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # python -P leaves this folder out
from head_cases import Case, Inputs, make_inputs
from head_contenders import ours
from measure import interleaved, peak_bytes

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BACKEND = "triton" if DEVICE.type == "cuda" else "torch"
ROUNDS = {"warm_up": 2, "rounds": (3, 7), "seconds": 1.0}
KERNELS = 24


def products(tokens: int, columns: int, hidden: int) -> dict[str, dict[str, Any]]:
    """Of one chunk. `strided`: the logits' gradient as the in-place kernel leaves it, with a row stride of 2 columns.
    "failed" has the reason where there is no such product on this device."""
    half, single = torch.bfloat16, torch.float32
    x = torch.randn(tokens, hidden, device=DEVICE, dtype=half)
    w = (torch.randn(columns, hidden, device=DEVICE) / hidden**0.5).to(half)
    strided = torch.empty(tokens, columns, device=DEVICE).view(half)[:, :columns]
    dz = torch.randn(tokens, columns, device=DEVICE, dtype=half)
    strided.copy_(dz)
    main = torch.zeros(columns, hidden, device=DEVICE)
    calls: dict[str, Callable[[], Any]] = {
        "logits, bf16": lambda: x @ w.t(),
        "logits, fp32": lambda: torch.mm(x, w.t(), out_dtype=single),
        "dX, bf16": lambda: dz @ w,
        "dX, bf16 of strided": lambda: strided @ w,
        "dX, fp32 of strided": lambda: torch.mm(strided, w, out_dtype=single),
        "dW, bf16": lambda: dz.t() @ x,
        "dW, fp32": lambda: torch.mm(dz.t(), x, out_dtype=single),
        "dW += fp32": lambda: torch.addmm(main, dz.t(), x, out_dtype=single, out=main),
        "dW += fp32 of strided": lambda: torch.addmm(main, strided.t(), x, out_dtype=single, out=main),
    }
    found: dict[str, dict[str, Any]] = {}
    for name, call in calls.items():
        try:
            seconds = interleaved({name: call}, DEVICE, **ROUNDS)[name]["median"]
            found[name] = {"ms": 1000 * seconds, "TFLOP/s": 2 * tokens * columns * hidden / seconds / 1e12}
        except (RuntimeError, TypeError) as error:
            found[name] = {"failed": f"{type(error).__name__}: {str(error)[:160]}"}
    return found


def by_kernel(inputs: Inputs) -> dict[str, Any]:
    """Milliseconds of a pass of the head by kernel, on a CPU by operator."""
    ours(inputs, BACKEND, "eager")
    inputs.forget_gradients()
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if DEVICE.type == "cuda" else activity.CPU]) as profiler:
        ours(inputs, BACKEND, "eager")
    rows: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.device_type == getattr(torch.autograd.DeviceType, DEVICE.type.upper()):
            rows.setdefault(event.name[:110], []).append(event.time_range.elapsed_us() / 1000)
    longest = sorted(rows.items(), key=lambda row: -sum(row[1]))[:KERNELS]
    kernels = [{"kernel": name, "count": len(taken), "ms": sum(taken)} for name, taken in longest]
    return {"kernels": kernels, "ms of all": sum(sum(taken) for taken in rows.values())}


def by_chunk(inputs: Inputs) -> dict[str, dict[str, float]]:
    """Milliseconds and peak gigabytes of a pass in chunks of that many tokens."""
    found, tokens = {}, inputs.case.tokens
    for size in (tokens // 8, tokens // 4, tokens // 2, tokens):
        call = {"head": functools.partial(ours, inputs, BACKEND, "eager", size)}
        seconds = interleaved(call, DEVICE, before=inputs.forget_gradients, **ROUNDS)["head"]["median"]
        found[str(size)] = {"ms": 1000 * seconds, "peak GB": peak_bytes(call["head"], DEVICE) / 1e9}
    return found


def figures(tokens: int, columns: int, hidden: int) -> dict[str, Any]:
    found: dict[str, Any] = {"tokens": tokens, "columns": columns, "hidden": hidden}
    for chunk in (tokens // 2, tokens, tokens // 8):
        found[f"chunk of {chunk}"] = products(chunk, columns, hidden)
    inputs = make_inputs(Case("gemms", tokens, hidden, columns), DEVICE)
    return {**found, "head by kernel": by_kernel(inputs), "head by chunk": by_chunk(inputs)}
