"""What the checksums of a checkpoint cost: seconds, CPU seconds and GB/s, beside writing and reading the same files.

    python -P benchmarks/checkpoint_checksums.py --folder runs --out benchmarks/results/checkpoint_checksums.json

Writes `--gigabytes` of float32 tensors as a rank's part of a checkpoint, without and with hashing, and reads them back,
as tensors and for their checksum alone, in turns. The files are read from the page cache: what a disk takes comes on
top of everything else, and its share does not grow with the checksums'.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import xxhash

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves this folder out
from measure import machine, summary
from torch.distributed.checkpoint.utils import _create_file_view

from dynamo_megatron.checkpoint.checksums import ChecksumWriter, file_checksum, file_checksums

TENSOR_BYTES = 64 << 20  # a layer's matrix
FILES = 4


def write(file: Path, tensors: list[torch.Tensor], hashed: bool) -> list[int]:
    """Returns where each tensor ends."""
    ends = []
    with ChecksumWriter(file) if hashed else open(file, "wb") as stream:
        for tensor in tensors:
            torch.save(tensor, stream)
            ends.append(stream.tell())
        if hashed:
            stream.digest.hexdigest()
        stream.flush()
        os.fsync(stream.fileno())
    return ends


def read(file: Path, ends: list[int]) -> None:
    with open(file, "rb") as stream:
        for start, end in pairwise([0, *ends]):
            torch.load(_create_file_view(stream, start, end - start), map_location="cpu", weights_only=True)


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """(seconds, CPU seconds of this process)."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


def measured(folder: Path, gigabytes: float, rounds: int) -> dict[str, dict[str, Any]]:
    count = max(1, round(gigabytes * 1e9 / FILES / TENSOR_BYTES))
    tensors = [torch.rand(TENSOR_BYTES // 4) for _ in range(count)]
    plain, hashed = ([folder / f"{name}-{i}" for i in range(FILES)] for name in ("plain", "hashed"))
    ends = [write(file, tensors, hashed=True) for file in (*plain, *hashed)]
    memory = [tensor.numpy() for tensor in tensors] * FILES
    calls = {
        "hash memory": lambda: [xxhash.xxh3_128_digest(values) for values in memory],
        "write": lambda: [write(file, tensors, hashed=False) for file in plain],
        "write and hash": lambda: [write(file, tensors, hashed=True) for file in hashed],
        "read tensors": lambda: [read(file, ends[0]) for file in hashed],
        "verify, 1 thread": lambda: [file_checksum(file) for file in hashed],
        f"verify, {os.cpu_count()} threads": lambda: file_checksums(hashed),
    }
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            samples[name].append(timed(call))
    size = sum(file.stat().st_size for file in hashed)
    result = {}
    for name, pairs in samples.items():
        seconds, cpu = (summary(column) for column in zip(*pairs, strict=True))
        rates = {"GB/s": size / 1e9 / seconds["median"], "GB/s of CPU time": size / 1e9 / cpu["median"]}
        result[name] = {"bytes": size, "seconds": seconds, "CPU seconds": cpu, **rates}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("."), help="on the disk to write to")
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = machine(["torch", "xxhash"])
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        results = measured(Path(folder), options.gigabytes, options.rounds)
    cpu = {name: entry["CPU seconds"]["median"] for name, entry in results.items()}
    shares = {
        "of the CPU time of writing": cpu["hash memory"] / cpu["write"],
        "of the CPU time of reading tensors": cpu["verify, 1 thread"] / cpu["read tensors"],
    }
    report = {
        "machine": found,
        "load average after": os.getloadavg()[0],
        "results": results,
        "cost of checksums": shares,
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for name, entry in results.items():
        print(f"{name}: {entry['GB/s']:.2f} GB/s, {entry['GB/s of CPU time']:.2f} GB/s of CPU time")
    for name, share in shares.items():
        print(f"checksums cost {share:.1%} {name}")


if __name__ == "__main__":
    main()
