"""What a terminal shows of a run: the live line (where it is, how fast, how long it will still take), and the line of
each step with its legend."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from tqdm import tqdm

from dynamo_megatron.runtime.plain_text import printable

DRAW_EVERY = 0.1  # seconds between two drawings by `count`, at least


class Progress:
    """One line on stderr, which every call rewrites.

    A run of `steps` steps calls `phase` while it starts, then `start`, and then for each step `phase` (with `count`)
    and `step_done`; bar and remaining time are those of the run. Without `steps`, as in an evaluation, they are those
    of the count.

    Where stderr is no terminal, each phase before `start` gets one line with its duration when it ends: of a run on
    stdout, else on stderr, so that stdout has only the command's result.
    """

    def __init__(self, steps: int | None = None):
        self._steps, self._starts = steps, True
        self._phase, self._counted, self._began, self._drawn = "", "", time.monotonic(), 0.0
        self._first: tuple[float, int] | None = None  # time and tokens at the phase's first `count`
        self._total: int | None = None
        self._unit = self._reward = ""
        self._bar = tqdm(disable=None, file=sys.stderr, leave=False, dynamic_ncols=True, bar_format="{desc}")

    def start(self, step: int = 0) -> None:
        """The first step begins now; the run continues after step `step`."""
        self._end_phase()
        self._starts, self._phase = False, ""
        self._new_bar(self._steps, step)

    def phase(self, name: str, total: int | None = None, unit: str = "") -> None:
        """Begins the phase `name`. `total`: the number that `count` will reach. `unit`: what `count` counts, shown
        where there is no `total`."""
        self._end_phase()
        self._phase, self._total, self._unit, self._first = name, total, unit, None
        self._counted = f" 0/{total}" if total is not None else ""
        self._began = time.monotonic()
        if self._starts:
            self._new_bar(total if self._steps is None else None, 0)
        self._draw()

    def count(self, done: int, tokens: int = 0) -> None:
        """`done` of the phase's `total` are finished, with `tokens` tokens. May be called often: few calls draw."""
        now = time.monotonic()
        # What is finished at the first call (rollouts of an interrupted run) is not part of this phase's speed.
        began, before = self._first = self._first or (now, tokens)
        self._counted = f" {done}/{self._total}" if self._total is not None else f" {done:,} {self._unit}"
        if tokens > before:
            self._counted += f", {(tokens - before) / max(now - began, 1e-9):,.0f} tok/s"
        if self._steps is None:
            self._bar.n = done
        if now - self._drawn > DRAW_EVERY or done == self._total:
            self._draw()

    def step_done(self, step: int, reward: float | None = None) -> None:
        """Step `step` has ended, and the next one begins. `reward` is shown until the next reward comes."""
        self._bar.n = step
        if reward is not None:
            self._reward = f", reward {reward:.3f}"
        self._draw()

    def say(self, line: str) -> None:
        """Prints a line to stdout, above the live line."""
        self._bar.clear()
        print(printable(line), flush=True)
        self._bar.refresh()

    def close(self) -> None:
        """Removes the line from the terminal. May be called twice."""
        self._bar.close()

    def _new_bar(self, total: int | None, done: int) -> None:
        """The remaining time is estimated from here on."""
        self._bar.initial = done
        self._bar.reset(total=total)
        self._bar.n = done
        known = "{desc}  {n_fmt}/{total_fmt} [{elapsed}<{remaining}] |{bar}|"
        self._bar.bar_format = "{desc}" if total is None else known

    def _end_phase(self) -> None:
        if self._bar.disable and self._starts and self._phase:
            file = sys.stderr if self._steps is None else sys.stdout
            print(f"{self._phase}{self._counted}: {time.monotonic() - self._began:.1f} s", file=file, flush=True)

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        self._bar.set_description_str(f"{self._phase}{self._counted}{self._reward}")


# Label -> meaning, and the text of a step's metrics. The most important first: a narrow terminal shows only these.
FIELDS = {
    "reward": ("mean of rollouts", "{reward/mean:>6.3f}"),
    "loss": ("policy", "{policy/loss:+.4f}"),
    "grad": ("norm before clipping", "{policy/grad_norm:>6.3f}"),
    "time": ("s per step", "{time/step:>6.2f}"),
    "gap": ("mean |policy - server| logprob, nats", "{rollout/logprob_gap_mean:.0e}"),
    "stale": ("mean steps from sampling a token to training on it", "{rollout/staleness_mean:.2f}"),
    "entropy": ("nats per token", "{policy/entropy:.3f}"),
    "len": ("mean response tokens", "{rollout/response_length_mean:>7.1f}"),
    "solved": ("share of rollouts", "{reward/success:.3f}"),
    "n": ("rollouts per prompt", "{allocation/n_min:>2.0f}..{allocation/n_max:<3.0f}"),
    "gen": ("parts of time, s: generate", "{time/generate:>6.2f}"),
    "upd": ("update", "{time/update:>6.2f}"),
    "sync": ("weights to servers", "{time/weight_sync:>6.2f}"),
    "logp": ("logprobs", "{time/logprobs:>6.2f}"),
    "eval": ("evaluation", "{time/evaluate:>6.2f}"),
    "save": ("checkpoint", "{time/save:>6.2f}"),
    "other": ("the rest", "{time/other:>6.2f}"),
}
LEGEND = f"legend: {'; '.join(f'{label}: {meaning}' for label, (meaning, _) in FIELDS.items())}"


def step_line(metrics: Mapping[str, float], steps: int, width: int | None = None) -> str:
    """The line of a step: of the fields whose metrics it has as many as fit into `width` columns (None: all)."""
    line = f"step {metrics['step']:>{len(str(steps))}}/{steps}"
    for label, (_, text) in FIELDS.items():
        try:
            field = f"  {label} {text.format_map(metrics)}"
        except KeyError:  # a metric of an option that is off
            continue
        if width is not None and len(f"{line}{field}".rstrip()) > width:
            break
        line += field
    return line.rstrip()
