"""What a check finds, and running a list of checks so that one that fails does not hide the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from dynamo_megatron.runtime.plain_text import error_line, on_one_line

Level = Literal["ok", "note", "FAILED", "skipped"]


@dataclass(frozen=True)
class Finding:
    """One line. A failure says what, where and how to mend it."""

    level: Level
    text: str


def ok(text: str) -> Finding:
    return Finding("ok", text)


def note(text: str) -> Finding:
    """Worth knowing, and no reason not to start."""
    return Finding("note", text)


def failed(text: str) -> Finding:
    return Finding("FAILED", text)


def skipped(text: str) -> Finding:
    return Finding("skipped", text)


Check = Callable[[], Iterator[Finding]]


def run_checks(checks: Sequence[tuple[str, Check]], say: Callable[[str, Finding, float], None]) -> int:
    """Runs all (name, check); returns how many failed.

    `say` hears the check's name, each finding and the check's seconds so far. A check fails with each `failed` finding,
    or by raising. One that raises what an earlier one did, of something that both need, is skipped.
    """
    failures: set[str] = set()
    count = 0
    for name, check in checks:
        start = time.monotonic()
        bad = False
        try:
            for finding in check():
                say(name, finding, time.monotonic() - start)
                bad |= finding.level == "FAILED"
        except Exception as error:  # also the user's own data source and reward: the other checks must still run
            text = on_one_line(str(error)) if isinstance(error, ValueError) else error_line(error)
            if text in failures:
                finding = skipped("not checked: it needs what failed above")
            else:
                failures.add(text)
                finding, bad = failed(text), True
            say(name, finding, time.monotonic() - start)
        count += bad
    return count
