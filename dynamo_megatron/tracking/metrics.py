"""The step logs of a run: metrics.jsonl (one JSON object per step), allocation.jsonl (one per prompt of a step) and
evaluations.jsonl."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamo_megatron.errors import InputError
from dynamo_megatron.runtime.plain_text import on_one_line
from dynamo_megatron.runtime.whole_files import naming

STEP_LOGS = ("metrics.jsonl", "allocation.jsonl", "evaluations.jsonl")


class StepLog:
    """An append-only file of JSON lines, each with a `step`, in the order of the steps. Opening it removes the lines of
    steps after `keep_to`, and an incomplete last line. Raises ValueError as `kept_bytes`, and OSError with the path."""

    def __init__(self, path: Path, keep_to: int):
        self._path, kept = path, kept_bytes(path, keep_to)
        self._file = path.open("a", encoding="utf-8")  # open for the life of the run
        self._file.truncate(kept)

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        with naming(self._path):
            self._file.write("".join(json.dumps(row) + "\n" for row in rows))
            self._file.flush()


def kept_bytes(path: Path, keep_to: int) -> int:
    """The offset in bytes where the lines of `keep_to` and earlier steps end in a file of JSON lines in order of steps;
    0 where there is no file. Raises ValueError (path:line) for a broken line."""
    return sum(len(line) for line, row in _lines(path, ("step",)) if row["step"] <= keep_to)


def read_rows(path: Path, *keys: str) -> Iterator[dict[str, Any]]:
    """Yields the objects of a file of JSON lines; none where there is no file. A last line without a newline, which a
    kill has left, is ignored.

    Raises ValueError (path:line) for any other line that is not an object with these `keys`. If `step` is one of the
    keys, its value must be a whole number."""
    return (row for _, row in _lines(path, keys))


def _lines(path: Path, keys: Sequence[str]) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yields each line and its object."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line)
                why = "not an object" if not isinstance(row, dict) else None
            except (ValueError, RecursionError) as error:
                why = f"not JSON ({on_one_line(str(error), 200)})"
            why = why or next((f"no {key!r}" for key in keys if key not in row), None)
            if why is None and "step" in keys and type(row["step"]) is not int:
                why = "'step' is not a whole number"
            if why is not None:
                raise InputError(f"{path}:{number}: {why}; restore the file from a copy, or delete this line of it")
            yield line, row
