"""Rollouts on disk: one compressed line for each, written when it finishes, so that a killed run keeps what it
generated."""

from __future__ import annotations

import dataclasses
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path

from dynamo_megatron.errors import ConfigError
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.runtime.line_files import compressed, read_raw_lines, whole_frames
from dynamo_megatron.runtime.whole_files import replacing
from dynamo_megatron.types import Rollout

STEP_FILE = re.compile(r"step-(\d{6,})\.jsonl\.zst")
# Files of steps under way. Opening one reads all of it, to find a torn end; an open one keeps its space when removed.
MOST_OPEN = 8
ROLLOUT_ID = re.compile(r"[0-9]{6,}-[0-9]{4,}-[0-9]{3,}")
FIRST_ID = re.compile(rb'\{"rollout_id": ?"([^"]*)"')  # of a line that `Rollout.to_json` has written


def step_file(folder: str | os.PathLike, step: int) -> Path:
    """`folder`: a run's output folder."""
    return Path(folder) / "rollouts" / f"step-{step:06d}.jsonl.zst"


def tokens_file(folder: str | os.PathLike, step: int) -> Path:
    """The file of the statistics of the step's tokens (tracking/token_rows.py)."""
    return Path(folder) / "tokens" / f"step-{step:06d}.jsonl.zst"


def step_files(folder: str | os.PathLike, of: str = "rollouts") -> dict[int, Path]:
    """Returns step -> its file, in the order of steps; `of`: "rollouts" or "tokens". No file is opened."""
    files = Path(folder) / of
    names = os.listdir(files) if files.is_dir() else []
    return dict(sorted((int(match[1]), files / name) for name in names if (match := STEP_FILE.fullmatch(name))))


def read_rollouts(path: Path, routes: bool = True) -> list[Rollout]:
    """Returns the rollouts of a file in the order of their first line; of two lines with one rollout_id the later one
    counts.

    `routes`: as in `Rollout.from_json`. Raises ValueError as `read_lines`.
    """
    return list({r.rollout_id: r for r in read_lines(path, routes)}.values())


def read_lines(path: Path, routes: bool = True, groups: Collection[str] | None = None) -> Iterator[Rollout]:
    """Yields the rollout of each line, one in memory at a time, without a last line that a kill has torn. `groups`:
    their rollouts alone; no other line is parsed. Raises ConfigError (path:line) for any other line that is not a
    rollout of a step, and where bytes are damaged."""
    for number, line in enumerate(read_raw_lines(path), 1):
        if groups is not None and (name := _id_of(line)) and name.rpartition("-")[0] not in groups:
            continue
        try:
            rollout = Rollout.from_json(line, routes)
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: {error}") from None
        name, group, response = rollout.rollout_id, rollout.group_id, rollout.response_mask.count(1)
        if not ROLLOUT_ID.fullmatch(name) or name.rpartition("-")[0] != group:
            raise ConfigError(f"{path}:{number}: rollout_id {name!r:.40} in group {group!r:.40}")
        masked, starts = response + rollout.response_mask.count(0), [start for _, start, _ in rollout.weight_versions]
        if (
            not masked == len(rollout.response_mask) == len(rollout.tokens)
            or len(rollout.engine_logprobs) != response
            or [*starts, response] != [0, *(end for _, _, end in rollout.weight_versions)]
        ):
            raise ConfigError(f"{path}:{number}: mask, tokens, logprobs and weight_versions disagree in length")
        yield rollout


def read_groups(path: Path) -> defaultdict[str, list[list[Rollout]]]:
    """Returns prompt_id -> its groups, sorted by group id, each sorted by rollout index. Raises ValueError as
    `read_rollouts`."""
    by_group: dict[tuple[str, str], list[Rollout]] = defaultdict(list)
    for rollout in read_rollouts(path):
        by_group[rollout.group_id, rollout.prompt_id].append(rollout)
    groups = defaultdict[str, list[list[Rollout]]](list)
    for (_, prompt_id), rollouts in sorted(by_group.items()):
        groups[prompt_id].append(sorted(rollouts, key=lambda r: int(r.rollout_id.rsplit("-", 1)[1])))
    return groups


class RolloutStore:
    """Appends to and reads `output_dir/rollouts/step-NNNNNN.jsonl.zst`. One process writes, one thread at a time."""

    def __init__(self, output_dir: str | os.PathLike):
        self._folder = Path(output_dir)
        self._descriptors: dict[int, int] = {}  # of the files that are open, by step
        step_file(self._folder, 0).parent.mkdir(parents=True, exist_ok=True)

    def append(self, rollout: Rollout) -> None:
        """Raises RolloutError where the disk does not take the whole line."""
        step, frame = rollout.step, compressed(rollout.to_json().encode() + b"\n")
        try:
            written = os.write(self._open(step), frame)
        except OSError as error:
            self.close()
            raise self._cannot_write(step, error.strerror) from error
        if written < len(frame):
            self.close()  # the next append cuts the torn frame off
            raise self._cannot_write(step, "the disk is full; free some space and resume")

    def lines(self, step: int, groups: Collection[str] | None = None) -> Iterator[Rollout]:
        """Yields the rollouts in the file of this step, of `groups` if given, as `read_lines` does; none without a
        file."""
        path = step_file(self._folder, step)
        return read_lines(path, groups=groups) if path.exists() else iter(())

    def reject(self, step: int, rollout_ids: Collection[str]) -> None:
        """Gives those of these rollouts that are in the file the status "rejected". No other line is parsed: a step may
        have GBs."""
        found, path = {}, step_file(self._folder, step)
        for line in read_raw_lines(path) if rollout_ids and path.exists() else ():
            if (name := _id_of(line)) in rollout_ids:
                found[name] = line
        for line in found.values():
            self.append(dataclasses.replace(Rollout.from_json(line), status="rejected"))

    def discard(self, step: int, rollout_ids: Collection[str]) -> None:
        """Removes these rollouts from the file of this step, in one atomic rewrite."""
        path = step_file(self._folder, step)
        self.close()
        try:
            with replacing(path) as kept:
                lines = (line for line in read_raw_lines(path) if _id_of(line) not in rollout_ids)
                kept.writelines(map(compressed, lines))
        except OSError as error:
            raise self._cannot_write(step, error.strerror) from error

    def remove_after(self, step: int) -> int:
        """Removes the files of later steps; returns how many there were."""
        self.close()
        later = {of: path for of, path in step_files(self._folder).items() if of > step}
        for of, path in later.items():
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise self._cannot_write(of, error.strerror) from error
        return len(later)

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _open(self, step: int) -> int:
        if step in self._descriptors:
            return self._descriptors[step]
        if len(self._descriptors) == MOST_OPEN:
            os.close(self._descriptors.pop(min(self._descriptors)))
        path = step_file(self._folder, step)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
        self._descriptors[step] = descriptor
        os.ftruncate(descriptor, max((end for end, _ in whole_frames(descriptor, path)), default=0))
        return descriptor

    def _cannot_write(self, step: int, why: str) -> RolloutError:
        return RolloutError(f"{step_file(self._folder, step)}: cannot write rollouts: {why}")


def _id_of(line: bytes) -> str:
    """Returns the rollout_id; "" where the line does not begin with one."""
    return found[1].decode() if (found := FIRST_ID.match(line)) else ""
