"""metrics.jsonl and allocation.jsonl: one JSON object a step (a prompt), cut back to the checkpoint on resume."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


class StepLog:
    """Append-only JSON lines, each with a `step`. Lines past `keep_to` (and a torn last one) are dropped at opening."""

    def __init__(self, path: Path, keep_to: int):
        kept = []
        if path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
                if line.endswith("\n") and json.loads(line)["step"] <= keep_to:
                    kept.append(line)
            aside = path.with_suffix(".tmp")
            aside.write_text("".join(kept), encoding="utf-8")
            aside.rename(path)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._file.write("".join(json.dumps(row) + "\n" for row in rows))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def log_line(metrics: Mapping[str, float], steps: int) -> str:
    """The one line a step that a user reads."""
    m = metrics
    return (
        f"step {m['step']:>{len(str(steps))}}/{steps}  reward {m['reward/mean']:.3f}  success {m['reward/success']:.3f}"
        f"  length {m['rollout/response_length_mean']:.1f}  entropy {m['policy/entropy']:.3f}"
        f"  loss {m['policy/loss']:+.4f}  grad {m['policy/grad_norm']:.3f}"
        f"  gap {m['rollout/logprob_gap_mean']:.1e}/{m['rollout/logprob_gap_max']:.1e}"
        f"  n {m['allocation/n_min']:.0f}..{m['allocation/n_max']:.0f}"
        f"  {m['time/step']:.1f} s (generate {m['time/generate']:.1f}, update {m['time/update']:.1f})"
    )
