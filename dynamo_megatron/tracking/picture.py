"""The picture of a run: reward, entropy, and who got the rollouts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # without pyplot a figure is drawn by Agg, with no screen

from dynamo_megatron.tracking.run_record import Revisits, RunRecord

BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#666666"  # told apart by the colour-blind, too
WINDOW = 10  # steps of the moving average
RATE_BINS = 10


def draw_run(run: RunRecord, revisits: Revisits | None, path: Path) -> None:
    """Writes a PNG, readable at a width of 1000 pixels."""
    figure = Figure(figsize=(10, 8.6), dpi=150, layout="constrained")
    config = run.config
    figure.suptitle(f"A language model learns from verifiable rewards ({run.folder})", weight="bold")
    reward, entropy, allocation = figure.subplot_mosaic("RRREE;AAAAA", height_ratios=(1, 1)).values()
    _reward(reward, run)
    _entropy(entropy, run)
    _allocation(allocation, revisits, config["algorithm"]["allocation"]["kind"])
    figure.supxlabel(
        "A rollout is one sampled response to a problem, scored by a verifier; "
        "each step moves the policy towards the better ones.",
        fontsize=9,
    )
    figure.savefig(path)


def moving_average(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of each value and up to window - 1 before it, float64 [N]."""
    sums = np.cumsum(values, dtype=np.float64)
    sums[window:] -= sums[:-window].copy()
    return sums / np.minimum(np.arange(1, len(values) + 1), window)


def rate_bins(rate: np.ndarray) -> np.ndarray:
    """The bin of each success rate, [V]. Never and always differ in kind from all else: they are bins of their own."""
    return np.where(rate == 0, -1, np.where(rate == 1, RATE_BINS, np.floor(rate * RATE_BINS)))


def _reward(axes: Axes, run: RunRecord) -> None:
    values, window = run.metric("reward/mean"), max(1, min(WINDOW, len(run.steps) // 4))
    axes.plot(run.steps, values, ".-", color=BLUE, alpha=0.3, linewidth=1, label="training reward, mean of a step")
    label = f"the same, average of {window} steps" if window > 1 else None
    axes.plot(run.steps, moving_average(values, window), color=BLUE, linewidth=2, label=label)
    if run.k:
        step, mean, low, high = run.pass_at(run.k[0]).T
        spread = [np.maximum(mean - low, 0), np.maximum(high - mean, 0)]
        label = f"held-out problems: pass@{run.k[0]} with 95 % interval"
        axes.errorbar(step, mean, spread, fmt="o", color=ORANGE, capsize=3, label=label)
    axes.set(
        title="Reward: does the policy get better?",
        xlabel="training step",
        ylabel="reward (line), share solved (points)",
    )
    axes.set_ylim(min(0.0, values.min()) - 0.02, max(1.0, values.max()) + 0.02)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _entropy(axes: Axes, run: RunRecord) -> None:
    axes.plot(run.steps, run.metric("policy/entropy"), ".-", color=BLUE)
    axes.set(title="Entropy: does it still explore?", xlabel="training step", ylabel="policy entropy, nats a token")
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)


def _allocation(axes: Axes, revisits: Revisits | None, kind: str) -> None:
    axes.set(title=f"Rollouts: who gets them? ({kind} allocation, from a problem's second visit on)")
    axes.set(xlabel="share of a problem's earlier rollouts that solved it", ylabel="rollouts given at a visit")
    axes.set_xlim(-0.05, 1.05)
    if revisits is None or not len(revisits.rollouts):
        why = "no recorded rollouts" if revisits is None else "no problem was visited twice so far"
        axes.text(0.5, 0.5, why, ha="center", va="center")
        return
    rate, given = revisits.success_rates, revisits.rollouts
    bins = rate_bins(rate)
    middle, mean, low, high, visits = np.array(
        [
            (rate[its].mean(), given[its].mean(), *np.quantile(given[its], (0.25, 0.75)), its.sum())
            for its in (bins == b for b in np.unique(bins))
        ]
    ).T
    axes.axhline(revisits.uniform, color=GREY, linestyle="--", label=f"an even split: {revisits.uniform:g} each")
    axes.vlines(middle, low, high, color=BLUE, alpha=0.3, linewidth=8, label="middle half of the visits")
    axes.plot(middle, mean, "o-", color=BLUE, label="mean of the visits")
    for x, y, n in zip(middle, np.maximum(high, mean), visits, strict=True):
        axes.annotate(f"{n:.0f}", (x, y), xytext=(0, 5), textcoords="offset points", ha="center", fontsize=8)
    axes.set_ylim(0, 1.15 * max(high.max(), mean.max(), revisits.uniform))
    axes.grid(alpha=0.3)
    axes.legend(title="numbers: visits", title_fontsize=8, fontsize=8, loc="lower center", ncols=3)
