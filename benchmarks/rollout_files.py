"""What compression makes of a run's rollouts: bytes a response's token, and CPU time of writing and reading.

    python -P benchmarks/rollout_files.py RUN [RUN ...] --out benchmarks/results/rollout_files.json

Takes the rollouts of each run's newest step, at most `--rollouts` of them, and compresses their lines at some levels:
a frame for each line, as runs do, and all lines in one frame that is flushed after each (a kill would cost more to mend
there). `store` is RolloutStore: JSON, compression and the write into the page cache.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import zstandard

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves this folder out
from measure import machine, summary

from dynamo_megatron.rollout.line_files import LEVEL
from dynamo_megatron.rollout.store import RolloutStore, read_lines, step_file, step_files
from dynamo_megatron.types import Rollout

LEVELS = (1, 3, 9)


def cpu_seconds(call: Callable[[], Any], rounds: int) -> dict[str, Any]:
    samples = []
    for _ in range(rounds):
        before = time.process_time()
        call()
        samples.append(time.process_time() - before)
    return summary(samples)


def in_one_frame(lines: list[bytes], level: int) -> bytes:
    frame = zstandard.ZstdCompressor(level=level).compressobj()
    parts = [frame.compress(line) + frame.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK) for line in lines]
    return b"".join([*parts, frame.flush()])


def in_frames(lines: list[bytes], level: int) -> bytes:
    compressor = zstandard.ZstdCompressor(level=level, write_checksum=True)
    return b"".join(map(compressor.compress, lines))


def measured(rollouts: list[Rollout], rounds: int) -> dict[str, Any]:
    lines = [r.to_json().encode() + b"\n" for r in rollouts]
    tokens = sum(sum(r.response_mask) for r in rollouts)
    size = sum(map(len, lines))
    result: dict[str, Any] = {
        "rollouts": len(rollouts),
        "response tokens": tokens / len(rollouts),
        "largest token id": max(max(r.tokens) for r in rollouts),
        "bytes a line": size / len(rollouts),
        "bytes a token": size / tokens,
        "level in use": LEVEL,
    }
    for name, compress in (("a frame a line", in_frames), ("one frame", in_one_frame)):
        for level in LEVELS:
            small = len(compress(lines, level))
            result[f"{name}, level {level}"] = {
                "ratio": size / small,
                "bytes a line": small / len(lines),
                "bytes a token": small / tokens,
                "CPU seconds": cpu_seconds(lambda c=compress, at=level: c(lines, at), rounds),
            }
    with tempfile.TemporaryDirectory() as folder:

        def store() -> None:
            step_file(folder, rollouts[0].step).unlink(missing_ok=True)
            writer = RolloutStore(folder)
            for rollout in rollouts:
                writer.append(rollout)
            writer.close()

        result["store"] = {"CPU seconds": cpu_seconds(store, rounds)}
        file = step_file(folder, rollouts[0].step)
        result["read and parse"] = {"CPU seconds": cpu_seconds(lambda: [None for _ in read_lines(file)], rounds)}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="+", help="output folder of a run")
    parser.add_argument("--rollouts", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    report: dict[str, Any] = {"machine": machine(["zstandard"]), "runs": {}}
    for run in options.run:
        file = list(step_files(run).values())[-1]
        report["runs"][run.name] = measured(list(islice(read_lines(file), options.rollouts)), options.rounds)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    for name, result in report["runs"].items():
        used = result[f"a frame a line, level {LEVEL}"]
        print(f"{name}: {result['bytes a token']:.1f} bytes a token, {used['bytes a token']:.1f} compressed")


if __name__ == "__main__":
    main()
