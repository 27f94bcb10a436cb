"""Rollouts on disk: one JSON line each, written as it finishes, so that a killed run keeps what it has generated."""

from __future__ import annotations

import dataclasses
import os
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path

from dynamo_megatron.records import Rollout
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.whole_files import replacing

BLOCK = 1 << 20  # bytes


def step_file(folder: str | os.PathLike, step: int) -> Path:
    """`folder`: a run's output folder."""
    return Path(folder) / "rollouts" / f"step-{step:06d}.jsonl"


def read_rollouts(path: Path) -> list[Rollout]:
    """The rollouts of a file in the order of their first line; of two lines with one rollout_id the later one counts.

    A last line without a newline was torn by a kill and is left out. Raises ValueError (path:line) for any other line
    that is not a rollout.
    """
    return list({rollout.rollout_id: rollout for rollout in read_lines(path)}.values())


def read_lines(path: Path) -> Iterator[Rollout]:
    """The rollout of each line, one in memory at a time. Raises ValueError as `read_rollouts`."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                rollout = Rollout.from_json(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
            yield rollout


def read_groups(path: Path) -> dict[str, list[list[Rollout]]]:
    """prompt_id -> its groups by group id, each by rollout index. Raises ValueError as `read_rollouts`."""
    by_group: dict[tuple[str, str], list[Rollout]] = defaultdict(list)
    for rollout in read_rollouts(path):
        by_group[rollout.group_id, rollout.prompt_id].append(rollout)
    groups: dict[str, list[list[Rollout]]] = defaultdict(list)
    for (_, prompt_id), rollouts in sorted(by_group.items()):
        groups[prompt_id].append(sorted(rollouts, key=lambda r: int(r.rollout_id.rsplit("-", 1)[1])))
    return groups


class RolloutStore:
    """Appends to and reads `output_dir/rollouts/step-NNNNNN.jsonl`. One process writes."""

    def __init__(self, output_dir: str | os.PathLike):
        self._folder = Path(output_dir)
        self._step: int | None = None
        self._descriptor = -1
        step_file(self._folder, 0).parent.mkdir(parents=True, exist_ok=True)

    def append(self, rollout: Rollout) -> None:
        """Raises RolloutError where the disk does not take the line."""
        path = step_file(self._folder, rollout.step)
        line = rollout.to_json().encode() + b"\n"
        try:
            if rollout.step != self._step:
                self._open(rollout.step, path)
            written = os.write(self._descriptor, line)
        except OSError as error:
            self.close()
            raise RolloutError(f"{path}: cannot write rollouts: {error.strerror}") from error
        if written < len(line):
            self.close()  # the next append cuts the torn line off
            raise RolloutError(f"{path}: cannot write rollouts: the disk is full; free some space and resume")

    def finished(self, step: int) -> list[Rollout]:
        """What the file of this step holds; empty without a file."""
        return list({rollout.rollout_id: rollout for rollout in self.lines(step)}.values())

    def lines(self, step: int) -> Iterator[Rollout]:
        """The same line by line: of two with one rollout_id the later one counts."""
        self.close()  # the next append looks at the file's end anew
        path = step_file(self._folder, step)
        return read_lines(path) if path.exists() else iter(())

    def reject(self, step: int, rollout_ids: Collection[str]) -> None:
        """Gives these rollouts of the file the status "rejected". No other line is parsed: a step may have GBs."""
        names, found = set(rollout_ids), {}
        self.close()
        with step_file(self._folder, step).open("rb") as file:
            for line in file:
                if (name := _id_of(line)) in names:
                    found[name] = line
        for line in found.values():
            self.append(dataclasses.replace(Rollout.from_json(line), status="rejected"))

    def discard(self, step: int, rollout_ids: Collection[str]) -> None:
        """Leaves these rollouts out of the file of this step."""
        names = set(rollout_ids)
        self.close()
        path = step_file(self._folder, step)
        try:
            with path.open("rb") as file, replacing(path) as kept:
                kept.writelines(line for line in file if line.endswith(b"\n") and _id_of(line) not in names)
        except OSError as error:
            raise RolloutError(f"{path}: cannot write rollouts: {error.strerror}") from error

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._step, self._descriptor = None, -1

    def _open(self, step: int, path: Path) -> None:
        self.close()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._descriptor, self._step = descriptor, step
        start, newline = os.fstat(descriptor).st_size, -1
        while start > 0 and newline < 0:
            start = max(0, start - BLOCK)
            newline = os.pread(descriptor, BLOCK, start).rfind(b"\n")
        os.ftruncate(descriptor, start + newline + 1)


def _id_of(line: bytes) -> str:
    """The rollout_id, which `Rollout.to_json` writes first; "" where the line is not one of its."""
    words = line[:100].split(b'"', 4)
    return words[3].decode() if words[1:2] == [b"rollout_id"] and len(words) == 5 else ""
