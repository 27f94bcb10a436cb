"""The line that is printed for each step, and the legend that explains it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dynamo_megatron.tracking.progress import fit_fields


@dataclass(frozen=True)
class Field:
    label: str
    meaning: str
    text: Callable[[Mapping[str, float]], str]  # from a step's metrics; usual values have the same width


def _seconds(key: str) -> Callable[[Mapping[str, float]], str]:
    return lambda m: f"{m[key]:>6.2f}" if m[key] < 100 else f"{m[key]:>6.1f}"


def _gap(metrics: Mapping[str, float]) -> str:
    gap = metrics.get("rollout/logprob_gap_mean")
    return f"{'-':>5}" if gap is None else f"{gap:.0e}"


# The most important first: a narrow terminal shows only the first ones.
FIELDS = (
    Field("reward", "mean of rollouts", lambda m: f"{m['reward/mean']:>6.3f}"),
    Field("loss", "policy", lambda m: f"{m['policy/loss']:+.4f}"),
    Field("grad", "norm before clipping", lambda m: f"{m['policy/grad_norm']:>6.3f}"),
    Field("time", "s per step", _seconds("time/step")),
    Field("gap", "mean |policy - server| logprob, nats", _gap),
    Field("entropy", "nats per token", lambda m: f"{m['policy/entropy']:.3f}"),
    Field("len", "mean response tokens", lambda m: f"{m['rollout/response_length_mean']:>7.1f}"),
    Field("solved", "share of rollouts", lambda m: f"{m['reward/success']:.3f}"),
    Field(
        "n",
        "rollouts per prompt",
        lambda m: f"{m['allocation/n_min']:>2.0f}..{m['allocation/n_max']:<3.0f}",
    ),
)
STALENESS = "rollout/staleness_mean"
STALE = Field("stale", "mean steps from sampling a token to training on it", lambda m: f"{m[STALENESS]:.2f}")
AHEAD = (*FIELDS[:5], STALE, *FIELDS[5:])  # with rollout.max_staleness
PARTS = (  # they add up to `time`
    Field("gen", "generate", _seconds("time/generate")),
    Field("upd", "update", _seconds("time/update")),
    Field("sync", "weights to servers", _seconds("time/weight_sync")),
    Field("logp", "logprobs", _seconds("time/logprobs")),
    Field("eval", "evaluation", _seconds("time/evaluate")),
    Field("save", "checkpoint", _seconds("time/save")),
    Field("other", "the rest", _seconds("time/other")),
)


def _fields(metrics: Mapping[str, float]) -> tuple[Field, ...]:
    return AHEAD if STALENESS in metrics else FIELDS


def step_line(metrics: Mapping[str, float], steps: int, width: int | None = None) -> str:
    """The line of a step, in columns. `width`: the terminal's columns; None (no terminal): all fields are shown."""
    fields = [f"{field.label} {field.text(metrics)}" for field in (*_fields(metrics), *PARTS)]
    return fit_fields([f"step {metrics['step']:>{len(str(steps))}}/{steps}", *fields], width)


def legend(steps: int, width: int | None = None, *, ahead: bool = False) -> str:
    """The meanings and units of the labels in a step line of that width. `ahead`: of a run with
    `rollout.max_staleness`."""
    metrics = defaultdict(float, {"step": steps, **({STALENESS: 0.0} if ahead else {})})
    shown = step_line(metrics, steps, width).split()
    text = "; ".join(f"{field.label}: {field.meaning}" for field in _fields(metrics) if field.label in shown)
    parts = ", ".join(f"{field.label} ({field.meaning})" for field in PARTS if field.label in shown)
    return f"legend: {text}" + (f"; parts of time, s: {parts}" if parts else "")
