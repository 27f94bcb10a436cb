"""Checks of a run's metrics, each with the numbers behind it; a person should look at those that warn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dynamo_megatron.reports.page.curves import series
from dynamo_megatron.reports.picture import moving_average
from dynamo_megatron.reports.run_record import RunRecord

WARNING, FINE, UNKNOWN = "warning", "fine", "not measured"
WINDOW = 10  # the beginning and the end of a run are means over this many steps
FEWEST = 20  # steps that a comparison of beginning and end needs
# Thresholds of the warnings:
COLLAPSED = 0.25  # below this ratio of the entropy at the end to that at the beginning
LONGER, TOGETHER = 1.2, 0.8  # above this ratio of the lengths, and this correlation of length and reward
WIDER, GAP = 3.0, 1e-3  # above this ratio of the gaps, and above this gap in nats: smaller ones are rounding
STARVED, FEWEST_VISITS = 0.5, 20  # below this ratio of a source's rollouts per visit to all sources'; visits needed


def findings(run: RunRecord, sources: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """One entry per check: `name`, `state` (warning, fine, not measured) and `text`.

    `sources`: as returned by `allocation.by_source`."""
    return [_entropy(run), _length(run), _gap(run), _damped(run), _starving(run, sources)]


def _entry(name: str, state: str, text: str) -> dict[str, str]:
    return {"name": name, "state": state, "text": text}


def _ends(run: RunRecord, key: str) -> tuple[float, float] | None:
    """The metric's mean over the first and over the last WINDOW steps that have it; None where fewer than FEWEST steps
    have it."""
    values = series(run, key)
    values = values[np.isfinite(values)]
    return (float(values[:WINDOW].mean()), float(values[-WINDOW:].mean())) if len(values) >= FEWEST else None


def _entropy(run: RunRecord) -> dict[str, str]:
    name, key = "entropy", "policy/entropy"
    if (ends := _ends(run, key)) is None:
        return _entry(name, UNKNOWN, f"fewer than {FEWEST} steps with {key}")
    first, last = ends
    state = WARNING if last < COLLAPSED * first else FINE
    return _entry(
        name,
        state,
        f"policy/entropy: {first:.3g} nats per token in the first {WINDOW} steps, {last:.3g} in the last {WINDOW}; "
        f"a warning below {COLLAPSED:g} of the beginning",
    )


def _length(run: RunRecord) -> dict[str, str]:
    name, keys = "reward and length", ("reward/mean", "rollout/response_length_mean")
    reward, length = _ends(run, keys[0]), _ends(run, keys[1])
    values = np.array([series(run, key) for key in keys])
    values = values[:, np.isfinite(values).all(0)]
    if reward is None or length is None or values.shape[1] < FEWEST:
        return _entry(name, UNKNOWN, f"fewer than {FEWEST} steps with {' and '.join(keys)}")
    smooth = np.array([moving_average(each, WINDOW + 1) for each in values])
    varies = (smooth.std(1) > 0).all()
    together = float(np.corrcoef(smooth)[0, 1]) if varies else 0.0
    longer = length[1] > LONGER * length[0] and reward[1] > reward[0]
    return _entry(
        name,
        WARNING if longer and together > TOGETHER else FINE,
        f"reward {reward[0]:.3g} -> {reward[1]:.3g}, length {length[0]:.4g} -> {length[1]:.4g} tokens, correlation of "
        f"their averages over {WINDOW + 1} steps {together:.2f}; a warning if the length grows by more than "
        f"{LONGER - 1:.0%} with a rising reward and a correlation above {TOGETHER:g}",
    )


def _gap(run: RunRecord) -> dict[str, str]:
    name, key = "gap between policy and engine", "rollout/logprob_gap_mean"
    if (ends := _ends(run, key)) is None:
        return _entry(name, UNKNOWN, f"fewer than {FEWEST} steps with {key}")
    first, last = ends
    state = WARNING if last > max(GAP, WIDER * first) else FINE
    return _entry(
        name,
        state,
        f"mean absolute difference of the logprobs: {first:.2g} nats in the first {WINDOW} steps, {last:.2g} in the "
        f"last {WINDOW}; a warning above {WIDER:g} times the beginning and {GAP:g} nats",
    )


def _damped(run: RunRecord) -> dict[str, str]:
    name, key = "damped tokens", "policy/damped_share"
    if run.config["algorithm"].get("modulation") is None:
        return _entry(name, UNKNOWN, "the method has no modulation (algorithm.modulation is null)")
    values = series(run, key)
    values = values[np.isfinite(values)]
    if not len(values):
        return _entry(name, UNKNOWN, f"no step has {key}")
    steps = int((values > 0).sum())
    return _entry(
        name,
        FINE if steps else WARNING,
        f"tokens with a factor below 0.9: {values.mean():.2%} on average, some at {steps} of {len(values)} steps; a "
        "warning at none. With tau close to 1 and the stabiliser max hardly any is; the stabiliser quantile damps more",
    )


def _starving(run: RunRecord, sources: Sequence[dict[str, Any]]) -> dict[str, str]:
    name = "prompt sources"
    if not sources:
        why = "allocation.jsonl does not name the prompts' sources; algorithm.allocation.prior_by: source writes them"
        return _entry(name, UNKNOWN, why)
    visits, given = (np.array([each[key] for each in sources], float) for key in ("visits", "rollouts"))
    whole = given.sum() / visits.sum()
    poor = [
        each
        for each in sources
        if each["visits"] >= FEWEST_VISITS and each["rollouts"] < STARVED * whole * each["visits"]
    ]
    shown = poor or sorted(sources, key=lambda each: each["rollouts"] / each["visits"])[:3]
    numbers = ", ".join(f"{s['source']}: {s['rollouts'] / s['visits']:.2f} in {s['visits']} visits" for s in shown)
    text = f"rollouts a visit in the last quarter of the run: {numbers}; all sources {whole:.2f}"
    return _entry(name, WARNING if poor else FINE, f"{text}; a warning below {STARVED:g} of all sources'")
