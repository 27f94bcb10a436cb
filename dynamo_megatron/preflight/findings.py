"""The findings of checks, and `run_checks`, which continues after a failed check."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from dynamo_megatron.runtime.plain_text import error_line, on_one_line


@dataclass(frozen=True)
class Finding:
    """One line of output. The text of a failure says what is wrong, where, and how to correct it; a note is worth
    knowing but does not keep the run from starting."""

    level: Literal["ok", "note", "FAILED", "skipped"]
    text: str


ok, note, failed, skipped = (partial(Finding, level) for level in ("ok", "note", "FAILED", "skipped"))

Check = Callable[[], Iterator[Finding]]


def run_checks(checks: Sequence[tuple[str, Check]], say: Callable[[str, Finding, float], None]) -> int:
    """Runs all (name, check). Returns the number of checks that failed.

    `say` is called with the check's name, each finding and the check's seconds so far. A check fails if it yields a
    `failed` finding or raises an exception. If it raises the same error as an earlier check, since both need the same
    thing, it counts as skipped.
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
