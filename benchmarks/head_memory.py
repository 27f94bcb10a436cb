"""Peak memory of the policy head's PyTorch reference on the CPU, by chunk size.

    python -P benchmarks/head_memory.py [--out benchmarks/results] [--tiny]

Writes head_memory.json and prints a table. Every row is a process of its own that calls `policy_loss` and its backward
once. "tensors": the most bytes alive at once in tensors made during the call; "process": by how much the process's
resident memory rose above what it was before (the kernel's VmHWM), which also has what operators take inside
themselves. Hidden states, weight and their labels are there before and do not count.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves this folder out
from measure import machine, peak_bytes

from dynamo_megatron.config import ModulationConfig, PolicyLossConfig
from dynamo_megatron.evaluation.results import markdown_row
from dynamo_megatron.kernels import chunked, policy_loss, reference

SHAPE = {"tokens": 4096, "vocabulary": 152064, "hidden": 256}
TINY = {"tokens": 64, "vocabulary": 3000, "hidden": 16}
CHUNKS: dict[str, tuple[int | None, ...]] = {"full": (256, 1024, None), "tiny": (8, 32, None)}  # None: the bound's own


def peak_resident() -> int:
    """Bytes, since the process began or `reset_peak_resident`."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def reset_peak_resident() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measure(tokens: int, vocabulary: int, hidden: int, chunk: int | None, gradient: str) -> dict[str, int]:
    """Peak bytes as "tensors" and as "process"."""
    torch.manual_seed(0)
    x = torch.randn(tokens, hidden, requires_grad=True)
    weight = (torch.randn(vocabulary, hidden) / hidden**0.5).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,))
    advantages, old = torch.randn(tokens), torch.full((tokens,), -10.0)
    weights = torch.full((tokens,), 1 / tokens)
    config = PolicyLossConfig(modulation=ModulationConfig())

    def call() -> None:
        loss = policy_loss(
            x,
            weight,
            labels,
            advantages,
            old,
            weights,
            config,
            ranges=(0.0, 12.0, 1.0),
            gradient=gradient,
            backend="torch",
            chunk_tokens=chunk,
        ).loss
        loss.backward()

    (torch.randn(8, hidden) @ weight[:8].t()).sum().backward()  # starts the threads, whose stacks are not the head's
    weight.grad = None
    gc.collect()
    reset_peak_resident()
    before = peak_resident()
    call()
    process = peak_resident() - before
    x.grad = weight.grad = None
    return {"tensors": peak_bytes(call, x.device), "process": process}


def in_child(**arguments: Any) -> dict[str, int]:
    command = [sys.executable, "-P", __file__, "--measure", json.dumps(arguments)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576"}  # what is freed goes back at once
    answer = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=1200, env=environment).stdout
    return json.loads(answer)


def rows(shape: dict[str, int], chunks: tuple[int | None, ...]) -> list[dict[str, Any]]:
    token_bytes = reference.workspace_buffers(torch.float32, torch.device("cpu")) * shape["vocabulary"] * 4
    result = []
    for gradient in ("eager", "recompute"):
        for asked in chunks:
            chunk = min(asked or chunked.chunk_size(token_bytes), shape["tokens"])
            row = {"gradient": gradient, "chunk": chunk, "default": asked is None}
            row["workspace"] = chunk * token_bytes
            row["weight gradient"] = shape["vocabulary"] * shape["hidden"] * 4
            result.append({**row, **in_child(**shape, chunk=asked, gradient=gradient)})
    return result


def markdown(result: dict[str, Any]) -> str:
    """Gigabytes (10^9)."""
    columns = ("workspace", "weight gradient", "tensors", "process")
    lines = [markdown_row(["gradient", "chunk", *columns]), markdown_row(["---", *["---:"] * 5])]
    for row in result["rows"]:
        chunk = f"{row['chunk']}{' (default)' if row['default'] else ''}"
        lines.append(markdown_row([row["gradient"], chunk, *(f"{row[name] / 1e9:.2f}" for name in columns)]))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", metavar="FOLDER")
    parser.add_argument("--tiny", action="store_true", help="shapes that prove that it works and no more")
    parser.add_argument("--measure", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(**options.measure)))
        return
    shape, chunks = (TINY, CHUNKS["tiny"]) if options.tiny else (SHAPE, CHUNKS["full"])
    result = {"machine": machine(["torch", "numpy"]), "shape": shape, "rows": rows(shape, chunks)}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "head_memory.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(markdown(result))


if __name__ == "__main__":
    main()
