"""metrics.jsonl and allocation.jsonl, one JSON object a step (a prompt), cut back on resume; and fields in a line."""

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
