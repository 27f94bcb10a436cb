"""metrics.jsonl and allocation.jsonl, one JSON object a step (a prompt), cut back on resume; and the step line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


class StepLog:
    """Append-only JSON lines, each with a `step`. Lines past `keep_to` (and a torn last one) are dropped at opening."""

    def __init__(self, path: Path, keep_to: int):
        if path.is_file():
            kept = [json.dumps(row) + "\n" for row in read_rows(path) if row["step"] <= keep_to]
            aside = path.with_suffix(".tmp")
            aside.write_text("".join(kept), encoding="utf-8")
            aside.rename(path)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._file.write("".join(json.dumps(row) + "\n" for row in rows))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; none without a file. A last line without a newline was torn by a kill.

    Raises ValueError (path:line) for any other line that is broken.
    """
    if not path.is_file():
        return []
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: not JSON ({error})") from None
    return rows


def fit_fields(fields: Sequence[str], width: int | None) -> str:
    """One line of as many of `fields`, from the first on, as `width` columns hold; None: of all."""
    line = fields[0]
    for field in fields[1:]:
        longer = f"{line}  {field}"
        if width is not None and len(longer.rstrip()) > width:
            break
        line = longer
    return line.rstrip()


def log_line(metrics: Mapping[str, float], steps: int, width: int | None = None) -> str:
    """The one line a step that a user reads, in columns, the important first; `width`: the terminal's columns.

    Without a width (the output is not a terminal) all fields are there.
    """
    m = metrics
    fields = [
        f"step {m['step']:>{len(str(steps))}}/{steps}",
        f"reward {m['reward/mean']:>6.3f}",
        f"success {m['reward/success']:.3f}",
        f"entropy {m['policy/entropy']:.3f}",
        f"n {m['allocation/n_min']:>2.0f}..{m['allocation/n_max']:<3.0f}",
        f"{m['time/step']:>6.1f} s",
        f"length {m['rollout/response_length_mean']:>7.1f}",
        f"loss {m['policy/loss']:+.4f}",
        f"grad {m['policy/grad_norm']:>7.3f}",
        f"gap {m['rollout/logprob_gap_mean']:.1e}/{m['rollout/logprob_gap_max']:.1e}",
        f"generate {m['time/generate']:>6.1f} s  update {m['time/update']:>6.1f} s",
    ]
    return fit_fields(fields, width)
