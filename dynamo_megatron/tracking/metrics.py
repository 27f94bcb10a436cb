"""The step logs of a run (metrics.jsonl: one JSON object per step; allocation.jsonl: one per prompt), and `fit_fields`.

A resume removes the lines of later steps. A run of 10,000 steps may have logs of half a gigabyte, so a resume reads
only a few of their lines.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from dynamo_megatron.errors import InputError
from dynamo_megatron.runtime.plain_text import on_one_line
from dynamo_megatron.runtime.whole_files import naming

STEP_LOGS = ("metrics.jsonl", "allocation.jsonl", "evaluations.jsonl")
CHECKED_BYTES = 4 << 20  # at the end of a file, where a kill, a full disk or a power cut does its damage
BLOCK = 1 << 16  # bytes
STEP = re.compile(rb'"step": (\d+)[,}]')
LISTED = 5  # ranges of lost steps
PROBE = 512  # bytes read at a time while these are searched


class StepLog:
    """An append-only file of JSON lines, each with a `step`, in the order of the steps. Opening it removes the lines of
    steps after `keep_to`, and an incomplete last line. Raises ValueError as `kept_bytes`, and OSError with the path."""

    def __init__(self, path: Path, keep_to: int):
        self._path, kept = path, kept_bytes(path, keep_to)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        os.ftruncate(descriptor, kept)
        self._file = open(descriptor, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        with naming(self._path):
            self._file.write("".join(json.dumps(row) + "\n" for row in rows))
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def kept_bytes(path: Path, keep_to: int) -> int:
    """The offset in bytes where the lines of `keep_to` and earlier steps end in a file of JSON lines in order of steps.

    Returns 0 where there is no file. The offset is found by bisection. Raises ValueError (path:line) for a broken line
    among those that the bisection reads and all in the last CHECKED_BYTES."""
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        low, high = 0, _last_newline(file) + 1
        start = _next_line(file, max(0, high - CHECKED_BYTES))
        while start < high:
            start += _read_step(path, file, start)[1]
        while low < high:
            start = _next_line(file, (low + high) // 2)
            if start >= high:
                start = low
            step, length = _read_step(path, file, start)
            if step <= keep_to:
                low = start + length
            else:
                high = start
    return low


def lost_steps(path: Path, last: int) -> str:
    """Names the steps from 1 to `last` of which a file of JSON lines in order of steps, none of them later, has no
    line, as in "3 to 7, 9"; "" if it has them all. Reads few lines of each step."""
    if not path.is_file():
        lost = [(1, last)] if last else []
    else:
        with path.open("rb", buffering=PROBE) as file:
            lost = list(_lost_between(file, 0, path.stat().st_size, 0, last + 1))
    names = [f"{first} to {end}" if first < end else f"{first}" for first, end in lost]
    return ", ".join(names[:LISTED] + ["..."] * (len(names) > LISTED))


def _lost_between(file: BinaryIO, start: int, end: int, before: int, after: int) -> Iterator[tuple[int, int]]:
    """Yields the first and the last step of each range between `before` and `after` of which no line begins at offsets
    from `start` to `end`, which are beginnings of lines. Bisects until it has found all steps; passes broken lines."""
    if after - before < 2:
        return
    if start >= end:
        yield before + 1, after - 1
        return
    at = _next_line(file, (start + end) // 2)
    middle = at = at if at < end else start
    file.seek(at)
    while not (found := STEP.search(line := file.readline())) and at + len(line) < end:
        at += len(line)
    if found is None:
        yield from _lost_between(file, start, middle, before, after)
        return
    yield from _lost_between(file, start, at, before, int(found[1]))
    yield from _lost_between(file, at + len(line), end, int(found[1]), after)


def _last_newline(file: BinaryIO) -> int:
    """The offset of the file's last newline; -1: there is none."""
    start = file.seek(0, os.SEEK_END)
    newline = -1
    while start > 0 and newline < 0:
        end, start = start, max(0, start - BLOCK)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
    return start + newline if newline >= 0 else -1


def _next_line(file: BinaryIO, offset: int) -> int:
    """The offset of the first line that begins at `offset` or later."""
    if offset == 0:
        return 0
    file.seek(offset - 1)
    file.readline()
    return file.tell()


def _read_step(path: Path, file: BinaryIO, start: int) -> tuple[int, int]:
    """(step, bytes) of the line that begins at `start`. Raises ValueError (path:line)."""
    file.seek(start)
    line = file.readline()
    try:
        return _object(line, ("step",))["step"], len(line)
    except ValueError as error:
        file.seek(0)
        before = sum(file.read(min(BLOCK, start - at)).count(b"\n") for at in range(0, start, BLOCK))
        raise _broken(path, 1 + before, error) from None


def read_rows(path: Path, *keys: str) -> Iterator[dict[str, Any]]:
    """Yields the objects of a file of JSON lines; none where there is no file. A last line without a newline, which a
    kill has left, is ignored.

    Raises ValueError (path:line) for any other line that is not an object with these `keys`. If `step` is one of the
    keys, its value must be a whole number."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                row = _object(line, keys)
            except ValueError as error:
                raise _broken(path, number, error) from None
            yield row


def _object(line: bytes, keys: Sequence[str]) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"not JSON ({on_one_line(str(error), 200)})") from None
    if not isinstance(row, dict):
        raise InputError(f"a {type(row).__name__}, not an object")
    if missing := [key for key in keys if key not in row]:
        raise InputError(f"no {missing[0]!r}")
    if "step" in keys and type(row["step"]) is not int:
        raise InputError("'step' is not a whole number")
    return row


def _broken(path: Path, number: int, why: ValueError) -> InputError:
    return InputError(f"{path}:{number}: {why}; restore the file from a copy, or delete this line of it")


def fit_fields(fields: Sequence[str], width: int | None) -> str:
    """One line of as many of `fields`, from the first on, as fit into `width` columns; None: of all fields."""
    line = fields[0]
    for field in fields[1:]:
        longer = f"{line}  {field}"
        if width is not None and len(longer.rstrip()) > width:
            break
        line = longer
    return line.rstrip()
