"""The line that is printed for each step, and the legend that explains it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from dynamo_megatron.tracking.progress import fit_fields

Metrics = Mapping[str, float]
STALENESS = "rollout/staleness_mean"


def _gap(metrics: Metrics) -> str:
    gap = metrics.get("rollout/logprob_gap_mean")
    return f"{'-':>5}" if gap is None else f"{gap:.0e}"


# Label -> meaning, and the text of a step's metrics, of the same width for usual values. The most important first: a
# narrow terminal shows only the first ones.
FIELDS: dict[str, tuple[str, Callable[[Metrics], str]]] = {
    "reward": ("mean of rollouts", lambda m: f"{m['reward/mean']:>6.3f}"),
    "loss": ("policy", lambda m: f"{m['policy/loss']:+.4f}"),
    "grad": ("norm before clipping", lambda m: f"{m['policy/grad_norm']:>6.3f}"),
    "time": ("s per step", lambda m: f"{m['time/step']:>6.2f}"),
    "gap": ("mean |policy - server| logprob, nats", _gap),
    "stale": ("mean steps from sampling a token to training on it", lambda m: f"{m[STALENESS]:.2f}"),
    "entropy": ("nats per token", lambda m: f"{m['policy/entropy']:.3f}"),
    "len": ("mean response tokens", lambda m: f"{m['rollout/response_length_mean']:>7.1f}"),
    "solved": ("share of rollouts", lambda m: f"{m['reward/success']:.3f}"),
    "n": ("rollouts per prompt", lambda m: f"{m['allocation/n_min']:>2.0f}..{m['allocation/n_max']:<3.0f}"),
}
PARTS = {  # label -> meaning and metric; they add up to `time`
    "gen": ("generate", "time/generate"),
    "upd": ("update", "time/update"),
    "sync": ("weights to servers", "time/weight_sync"),
    "logp": ("logprobs", "time/logprobs"),
    "eval": ("evaluation", "time/evaluate"),
    "save": ("checkpoint", "time/save"),
    "other": ("the rest", "time/other"),
}


def step_line(metrics: Metrics, steps: int, width: int | None = None) -> str:
    """The line of a step, in columns. `width`: the terminal's columns; None (no terminal): all fields are shown. The
    field `stale` is shown only where the run has `rollout.max_staleness`."""
    shown = {label: text for label, (_, text) in FIELDS.items() if label != "stale" or STALENESS in metrics}
    fields = [f"{label} {text(metrics)}" for label, text in shown.items()]
    parts = [f"{label} {metrics[key]:>6.2f}" for label, (_, key) in PARTS.items()]
    return fit_fields([f"step {metrics['step']:>{len(str(steps))}}/{steps}", *fields, *parts], width)


def legend(steps: int, width: int | None = None, *, ahead: bool = False) -> str:
    """The meanings and units of the labels in a step line of that width. `ahead`: of a run with
    `rollout.max_staleness`."""
    metrics = defaultdict(float, {"step": steps, **({STALENESS: 0.0} if ahead else {})})
    shown = step_line(metrics, steps, width).split()
    text = "; ".join(f"{label}: {meaning}" for label, (meaning, _) in FIELDS.items() if label in shown)
    parts = ", ".join(f"{label} ({meaning})" for label, (meaning, _) in PARTS.items() if label in shown)
    return f"legend: {text}" + (f"; parts of time, s: {parts}" if parts else "")
