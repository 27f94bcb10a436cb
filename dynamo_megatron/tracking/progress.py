"""What a terminal shows of a run: the phase under way, and the line of each step with its legend."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from tqdm import tqdm

from dynamo_megatron.runtime.plain_text import printable


class Progress:
    """The phase under way as one line on stderr, which every call rewrites, with tqdm's bar of what a phase counts.

    A run of `steps` steps calls `phase` while it starts, then `start`, and then for each step `phase` and `step_done`.
    Where stderr is no terminal, each phase before `start` gets one line with its duration when it ends: of a run on
    stdout, else on stderr, so that stdout has only the command's result.
    """

    def __init__(self, steps: int | None = None):
        self._steps, self._place = steps, ""  # which step has ended; "" before `start`
        self._phase, self._counted, self._began = "", "", time.monotonic()
        looks = {"leave": False, "dynamic_ncols": True, "miniters": 1, "bar_format": "{desc}"}
        self._bar = tqdm(disable=None, file=sys.stderr, **looks)

    def start(self, step: int = 0) -> None:
        """The first step begins now; the run continues after step `step`."""
        self._end_phase()
        self.step_done(step)

    def phase(self, name: str, total: int | None = None, unit: str = "") -> None:
        """Begins the phase `name`. `total`: the number that `count` will reach. `unit`: what `count` counts, shown
        where there is no `total`."""
        self._end_phase()
        self._phase, self._counted, self._began = name, "", time.monotonic()
        counted = "{desc} {n:,} {unit}" if unit else "{desc}"
        known = "{desc} {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}] |{bar}|"
        self._bar.bar_format = counted if total is None else known
        self._bar.desc, self._bar.postfix = f"{self._place}{name}", None
        self._bar.total, self._bar.unit = total, unit or "it"
        self._bar.reset()

    def count(self, done: int, tokens: int = 0) -> None:
        """`done` of the phase's `total` are finished, with `tokens` tokens. May be called often: few calls draw."""
        bar = self._bar
        self._counted = f" {done:,} {bar.unit}" if bar.total is None else f" {done}/{bar.total}"
        if tokens:
            bar.set_postfix_str(f"{tokens:,} tokens", refresh=False)
        bar.update(done - bar.n)

    def step_done(self, step: int) -> None:
        """Step `step` has ended, and the next one begins."""
        self._place = f"after step {step} of {self._steps}: "

    def say(self, line: str) -> None:
        """Prints a line to stdout, above the live line."""
        self._bar.clear()
        print(printable(line), flush=True)
        self._bar.refresh()

    def close(self) -> None:
        """Removes the line from the terminal. May be called twice."""
        self._bar.close()

    def _end_phase(self) -> None:
        if self._bar.disable and self._phase and not self._place:
            file = sys.stderr if self._steps is None else sys.stdout
            print(f"{self._phase}{self._counted}: {time.monotonic() - self._began:.1f} s", file=file, flush=True)


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
    "unique": ("share of distinct answers in a group", "{reward/unique_answers:.3f}"),
    "4grams": ("share of distinct 4-grams in a group", "{rollout/distinct_4grams:.3f}"),
    "n": ("rollouts per prompt", "{allocation/n_min:>2.0f}..{allocation/n_max:<3.0f}"),
    "gen": ("parts of time, s: generate", "{time/generate:>6.2f}"),
    "upd": ("update", "{time/update:>6.2f}"),
    "values": ("of the critic", "{time/values:>6.2f}"),
    "critic": ("its updates", "{time/critic:>6.2f}"),
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
