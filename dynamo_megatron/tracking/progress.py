"""The live line of a terminal: where a run is, how fast, and how long it will still take."""

from __future__ import annotations

import os
import sys
import textwrap
import threading
import time
from collections import deque
from typing import TextIO

from tqdm import tqdm

from dynamo_megatron.runtime.plain_text import printable
from dynamo_megatron.tracking.metrics import fit_fields

BETWEEN_STEPS = ("evaluate", "save", "export")  # phases; all others belong to a step
REDRAW_EVERY = 1.0  # seconds between redraws by the timer
DRAW_EVERY = 0.05  # seconds between redraws by `count`, at least
RECENT_STEPS = 20  # the ETA is estimated from the durations of this many steps
PHASE_COLUMNS = 18  # "generate 1800/2560"; padded to this width, so that the other fields do not move
LEAST_BAR = 12  # columns; a shorter bar is not drawn


def terminal_width(stream: TextIO) -> int | None:
    """The columns of the terminal that `stream` writes to; None where `stream` is not a terminal."""
    if not stream.isatty():
        return None
    return os.get_terminal_size(stream.fileno()).columns or 80  # 0: a terminal that does not know its size


def wrapped(text: str, width: int | None) -> str:
    """Breaks each line that is longer than `width` columns between words, but not the rows of tables. None: returns
    `text` as it is."""
    if width is None:
        return text
    return "\n".join(
        line if line.startswith("|") else textwrap.fill(line, width, subsequent_indent="  ", break_on_hyphens=False)
        for line in text.split("\n")
    )


class Progress:
    """One line on stderr. Every call rewrites it in place, and so does a timer, so that a long phase shows its seconds.

    A run of `steps` steps calls `phase` while it starts, then `start`, and then for each step `phase` (with `count`)
    and `step_done`. ETA and bar are those of the run. Without `steps`, as in an evaluation, there are only phases and
    counts, and ETA and bar are those of the count. As long as no ETA is known, the seconds of the phase are shown.

    Where stderr is no terminal, each phase before `start` gets one line with its duration when it ends: with `steps` on
    stdout, without `steps` on stderr, so that stdout has only the command's result.
    """

    def __init__(self, steps: int | None = None):
        self._steps, self._done = steps, 0
        self._mark: float | None = None  # time.monotonic at which the step under way began; None: before `start`
        self._durations: deque[float] = deque(maxlen=RECENT_STEPS)
        self._reward: float | None = None
        self._phase, self._count, self._total, self._unit = "", 0, None, ""
        self._phase_began = time.monotonic()
        self._counted_from: tuple[float, int, int] | None = None  # time, count and tokens at the phase's first `count`
        self._speed: float | None = None  # tokens per second
        self._columns: int | None = None
        self._count_drawn = 0.0  # time.monotonic at which `count` last drew
        self._bar = tqdm(disable=None, file=sys.stderr, leave=False, bar_format="{desc}")
        self._lock = threading.RLock()  # protects all state above: the timer draws, too
        self._closed = threading.Event()
        self._timer = threading.Thread(target=self._redraw, name="progress", daemon=True)

    def start(self, step: int = 0) -> None:
        """The first step begins now; the run continues after step `step`."""
        with self._lock:
            self._log_phase()
            self._done, self._mark = step, time.monotonic()
            self._draw()

    def phase(self, name: str, total: int | None = None, unit: str = "") -> None:
        """Begins the phase `name`. `total`: the number that `count` will reach. `unit`: what `count` counts, shown
        where there is no `total`."""
        with self._lock:
            self._log_phase()
            if self._phase in BETWEEN_STEPS and not self._durations:
                self._mark = time.monotonic()  # an evaluation before the first step is not part of that step
            self._phase, self._count, self._total, self._unit = name, 0, total, unit
            self._phase_began = time.monotonic()
            self._counted_from = self._speed = None
            if not self._bar.disable and not self._timer.is_alive() and not self._closed.is_set():
                self._timer.start()
            self._draw()

    def count(self, done: int, tokens: int = 0) -> None:
        """`done` of the phase's `total` are finished, with `tokens` tokens. May be called often: few calls draw."""
        with self._lock:
            now = time.monotonic()
            if self._counted_from is None:
                # What is finished at the first call (rollouts of an interrupted run) is not part of this phase's speed.
                self._counted_from = (now, done, tokens)
            begun, _, tokens_before = self._counted_from
            self._speed = (tokens - tokens_before) / (now - begun) if tokens > tokens_before else None
            self._count = done
            if now - self._count_drawn > DRAW_EVERY:
                self._count_drawn = now
                self._draw()

    def step_done(self, step: int, reward: float | None = None) -> None:
        """Step `step` has ended, and the next one begins. `reward` is shown until the next reward comes."""
        with self._lock:
            now = time.monotonic()
            self._durations.append(now - self._mark)
            self._mark, self._done = now, step
            self._reward = self._reward if reward is None else reward
            self._draw()

    def say(self, line: str) -> None:
        """Prints a line to stdout, above the live line."""
        with self._lock:
            self._bar.clear()
            print(wrapped(printable(line), terminal_width(sys.stdout)), flush=True)
            self._bar.refresh()

    def close(self) -> None:
        """Removes the line from the terminal. May be called twice."""
        self._closed.set()
        if self._timer.is_alive():
            self._timer.join()
        self._bar.close()

    def _redraw(self) -> None:
        while not self._closed.wait(REDRAW_EVERY):
            with self._lock:
                self._draw()

    def _log_phase(self) -> None:
        if self._bar.disable and self._mark is None and self._phase:
            seconds = time.monotonic() - self._phase_began
            file = sys.stderr if self._steps is None else sys.stdout
            print(f"{self._phase_text()}: {seconds:.1f} s", file=file, flush=True)

    def _draw(self) -> None:
        if self._bar.disable:
            return
        columns = terminal_width(sys.stderr)
        if columns != self._columns:  # tqdm would blank as many columns as its last line had, and wrap
            self._bar.sp = tqdm.status_printer(sys.stderr)
            self._columns = columns
        room = columns - 1  # a line up to the last column wraps in some terminals
        line = fit_fields(self._fields(), room)
        done, total = (self._count, self._total) if self._steps is None else (self._done, self._steps)
        starts = self._steps is not None and self._mark is None
        has_bar = total is not None and not starts and room - len(line) >= LEAST_BAR
        self._bar.n, self._bar.total, self._bar.ncols = done, total, room
        self._bar.bar_format = "{desc}  |{bar}|" if has_bar else "{desc}"
        self._bar.set_description_str(line)

    def _phase_text(self) -> str:
        if self._total is not None:
            return f"{self._phase} {self._count:>{len(str(self._total))}}/{self._total}"
        return f"{self._phase} {self._count:,} {self._unit}" if self._unit else self._phase

    def _fields(self) -> list[str]:
        """The line's fields, the most important first. An unknown field is blank, so that the others do not move."""
        remaining = self._remaining()
        if remaining is None:
            remaining_or_elapsed = f"{time.monotonic() - self._phase_began:.0f} s"
        else:
            remaining_or_elapsed = f"ETA {tqdm.format_interval(remaining):>8}"
        fields = [
            f"{self._phase_text():<{PHASE_COLUMNS}}",
            f"{remaining_or_elapsed:>12}",
            f"{'' if self._speed is None else f'{self._speed:,.0f} tok/s':>13}",
            "" if self._reward is None else f"reward {self._reward:>6.3f}",
        ]
        if self._steps is None or self._mark is None:
            return fields
        step = self._done if self._phase in BETWEEN_STEPS else min(self._done + 1, self._steps)
        return [f"step {step:>{len(str(self._steps))}}/{self._steps}", *fields]

    def _remaining(self) -> float | None:
        """Estimated seconds to the end of the run, or without `steps` of the count; None as long as it is not known."""
        now = time.monotonic()
        of_count = None
        if self._total is not None and self._counted_from is not None:
            begun, count_before, _ = self._counted_from
            made = self._count - count_before
            of_count = (now - begun) / made * (self._total - self._count) if made else None
        if self._steps is None:
            return of_count
        if not self._durations:
            return None
        of_steps = sum(self._durations) / len(self._durations) * (self._steps - self._done)
        if self._phase in BETWEEN_STEPS:
            return of_steps + (of_count or 0.0)
        return max(0.0, of_steps - (now - self._mark))
