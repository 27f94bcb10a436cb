"""The metrics of a run as curves with a limited number of points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dynamo_megatron.reports.picture import moving_average, window_of
from dynamo_megatron.reports.run_record import RunRecord, gaps

POINTS = 500  # at most, per curve
KEYS = (
    *("reward/mean", "reward/success", "policy/entropy", "policy/kl", "rollout_correction/kl"),
    *("rollout/response_length_mean", "rollout/truncated", "rollout/rejected", "rollout/failed", "rollout/aborted"),
    *("policy/grad_norm", "policy/clip_share", "policy/clip_c_share", "policy/damped_share", "policy/boosted_share"),
    *("rollout/logprob_gap_mean", "rollout/logprob_gap_max", "rollout/staleness_mean", "rollout/staleness_max"),
    *("time/generate", "time/logprobs", "time/update", "time/reshard", "time/evaluate", "time/save", "time/other"),
    *("time/step", "time/generate_tail", "throughput/tokens_per_second", "fleet/idle_share", "resources/cpu"),
    *("rollout/zero_variance_groups", "allocation/n_min", "allocation/n_max", "allocation/history_share"),
    *("variance_proxy/proxy1_signal_strength", "variance_proxy/proxy2_total_power", "variance_proxy/proxy3_pure_noise"),
)
SMOOTHED = (
    *("reward/mean", "reward/success", "policy/entropy", "rollout/response_length_mean", "policy/grad_norm"),
    *("throughput/tokens_per_second", "rollout/zero_variance_groups"),
)
BUSY_MEAN, BUSY_MIN = "fleet/busy_share_mean", "fleet/busy_share_min"  # over the servers, computed here


def number(value: Any) -> float:
    """`value` as a float; NaN where it is not a number: a run's files may contain any JSON."""
    return float(value) if isinstance(value, int | float) else float("nan")


def series(run: RunRecord, key: str) -> np.ndarray:
    """A metric at every step, float64 [steps]; NaN where it is missing or not a finite number."""
    if key in (BUSY_MEAN, BUSY_MIN):
        pick = np.mean if key == BUSY_MEAN else np.min
        found = [[number(v) for k, v in row.items() if _is_busy_share(k)] for row in run.metrics]
        values = np.array([pick(each) if each else np.nan for each in found], np.float64)
    else:
        values = np.array([number(row.get(key)) for row in run.metrics], np.float64)
    values[~np.isfinite(values)] = np.nan
    return values


def _is_busy_share(key: str) -> bool:
    return key.startswith("fleet/") and key.endswith("/busy_share")


def bins(count: int, most: int = POINTS) -> np.ndarray:
    """int64 [count]: the bin of each of `count` entries in order. There are at most `most` bins, of equal width."""
    width = max(1, -(-count // most))
    return np.arange(count) // width


def binned(values: np.ndarray, bin_of: np.ndarray, *, largest: bool = False) -> np.ndarray:
    """The mean (or maximum) of the finite values in each bin, float64 [bins]; NaN for a bin without any."""
    there = np.isfinite(values)
    count = int(bin_of[-1]) + 1
    if largest:
        result = np.full(count, -np.inf)
        np.maximum.at(result, bin_of[there], values[there])
        return np.where(np.isfinite(result), result, np.nan)
    entries = np.bincount(bin_of[there], minlength=count)
    sums = np.bincount(bin_of[there], values[there], minlength=count)
    return np.divide(sums, entries, out=np.full(count, np.nan), where=entries > 0)


def plain(values: Sequence[float] | np.ndarray, digits: int = 5) -> list[float | None]:
    """`values` for JSON: rounded to `digits` significant digits, None for NaN and infinity."""
    return [float(f"{v:.{digits}g}") if np.isfinite(v) else None for v in values]


def curves(run: RunRecord) -> dict[str, Any]:
    """`steps`: the last step of each point. `width`: the number of steps in a point. `values`: metric -> one value per
    point. `smooth`: the same of moving averages over `window` steps, for metrics of SMOOTHED. `evaluations`: k -> rows
    of `RunRecord.pass_at`.

    A point is the mean over its steps, or the maximum for metrics whose names end in _max. Where steps are lost there
    is a point without values. Metrics that no step has are left out."""
    bin_of, window = bins(len(run.metrics)), window_of(len(run.metrics))
    steps, width = run.steps[np.flatnonzero(np.append(np.diff(bin_of) > 0, True))], int(np.bincount(bin_of)[0])
    lost, found, smooth = gaps(steps, width), {}, {}
    for key in (*KEYS, BUSY_MEAN, BUSY_MIN):
        values = series(run, key)
        if np.isfinite(values).any():
            found[key] = plain(np.insert(binned(values, bin_of, largest=key.endswith("_max")), lost, np.nan))
            if key in SMOOTHED and window > 1:
                smooth[key] = plain(np.insert(binned(moving_average(values, window), bin_of), lost, np.nan))
    return {
        "steps": [int(s) for s in np.insert(steps, lost, steps[lost - 1] + 1)],
        "width": width,
        "values": found,
        "smooth": smooth,
        "window": window,
        "evaluations": {str(k): [plain(row, 6) for row in run.pass_at(k)] for k in run.k},
    }
