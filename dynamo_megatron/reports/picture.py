"""The pictures of a run (reward, entropy, rollouts by success rate) and of several runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # without pyplot a figure is drawn by Agg, with no screen
from matplotlib.layout_engine import ConstrainedLayoutEngine

from dynamo_megatron.reports.run_record import Revisits, RunRecord, gaps

# Distinguishable for the colour-blind, too.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
BLUE, ORANGE, GREY = COLOURS[0], COLOURS[1], "#666666"
RATE_BINS = 10


def draw_run(run: RunRecord, revisits: Revisits | None, path: Path) -> None:
    """Writes a PNG, readable at a width of 1000 pixels."""
    figure = Figure(figsize=(10, 8.6), dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
    figure.suptitle(title(run), weight="bold")
    reward, entropy, allocation = figure.subplot_mosaic("RRREE;AAAAA", height_ratios=(1, 1)).values()
    _reward(reward, run)
    _entropy(entropy, {"": run}, [BLUE])
    _allocation(allocation, revisits)
    figure.supxlabel("A rollout is one sampled response to a problem, scored by the reward functions.", fontsize=9)
    figure.savefig(path)


def title(run: RunRecord) -> str:
    """The picture's title: folder, steps and allocator."""
    kind = run.config["algorithm"]["allocation"]["kind"]
    return f"{run.folder}: {run.metrics[-1]['step']} of {run.config['trainer']['steps']} steps, {kind} allocation"


def draw_runs(runs: Mapping[str, RunRecord], path: Path) -> None:
    """Writes a PNG of several runs, one colour each: reward, pass@k, entropy, response length."""
    figure = Figure(figsize=(10, 8.6), dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(runs))]
    (reward, passes), (entropy, length) = figure.subplots(2, 2)
    _lines(reward, runs, colours, "reward/mean")
    reward.set(title="Training reward", ylabel="mean reward of a step")
    _passes(passes, runs, colours)
    _entropy(entropy, runs, colours)
    _lines(length, runs, colours, "rollout/response_length_mean")
    length.set(title="Response length", ylabel="mean length, tokens")
    figure.legend(*reward.get_legend_handles_labels(), loc="outside upper center", ncols=min(4, len(runs)))
    figure.supxlabel(
        "Thin lines and dots: each step; thick lines: average of up to 11 steps around a step.", fontsize=9
    )
    figure.savefig(path)


def moving_average(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of each value and its neighbours, (window - 1) / 2 on either side as far as there are any, float64 [N];
    NaN for a value that is not finite, which counts nowhere."""
    known, near = np.isfinite(values), np.ones(window)
    middle = slice(window // 2, window // 2 + len(values))
    sums = np.convolve(np.where(known, values, 0.0), near)[middle]
    counts = np.convolve(known, near)[middle]
    return np.where(known, sums / np.maximum(counts, 1.0), np.nan)


def window_of(steps: int) -> int:
    """Steps of a curve's moving average, an odd number; 1: too few steps for one."""
    return 2 * min(5, steps // 8) + 1


def rate_bins(rate: np.ndarray) -> np.ndarray:
    """The bin of each success rate, [V]. Rates of exactly 0 and exactly 1 have bins of their own."""
    return np.where(rate == 0, -1, np.where(rate == 1, RATE_BINS, np.floor(rate * RATE_BINS)))


def _with_room(axes: Axes) -> None:
    """Whole steps on the x axis, and a margin so that no point lies on an edge."""
    axes.margins(x=0.03, y=0.08)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.set_xlabel("training step")


def _line(axes: Axes, run: RunRecord, values: np.ndarray, *style: str, **options: Any) -> None:
    """Plots a value per step, with a gap where steps are lost."""
    lost = gaps(run.steps)
    axes.plot(*(np.insert(each.astype(float), lost, np.nan) for each in (run.steps, values)), *style, **options)


def _lines(axes: Axes, runs: Mapping[str, RunRecord], colours: Sequence[str], key: str) -> None:
    """Each run's metric and its moving average; a run whose metrics lack it is left out."""
    for (name, run), colour in zip(runs.items(), colours, strict=True):
        if all(key in row for row in run.metrics):
            values = run.metric(key)
            _line(axes, run, values, ".-", color=colour, alpha=0.3, linewidth=1)
            _line(axes, run, moving_average(values, window_of(len(values))), color=colour, linewidth=2, label=name)
    _with_room(axes)


def _points(axes: Axes, run: RunRecord, k: int, colour: str, label: str) -> None:
    step, mean, low, high = run.pass_at(k).T
    spread = [np.maximum(mean - low, 0), np.maximum(high - mean, 0)]
    axes.errorbar(step, mean, spread, fmt="o", color=colour, capsize=3, label=label)


def _passes(axes: Axes, runs: Mapping[str, RunRecord], colours: Sequence[str]) -> None:
    axes.set(title="Held-out problems", ylabel="share solved, 95 % interval")
    k = min((k for run in runs.values() for k in run.k), default=None)
    if k is None:
        axes.text(0.5, 0.5, "no evaluations", ha="center", va="center", transform=axes.transAxes)
    else:
        axes.set_title(f"Held-out problems: pass@{k}")
        for (name, run), colour in zip(runs.items(), colours, strict=True):
            _points(axes, run, k, colour, name)
    _with_room(axes)


def _reward(axes: Axes, run: RunRecord) -> None:
    values, window = run.metric("reward/mean"), window_of(len(run.steps))
    _line(axes, run, values, ".-", color=BLUE, alpha=0.3, linewidth=1, label="training reward, mean of a step")
    label = f"the same, average of {window} steps" if window > 1 else None
    _line(axes, run, moving_average(values, window), color=BLUE, linewidth=2, label=label)
    if run.k:
        _points(axes, run, run.k[0], ORANGE, f"held-out problems: pass@{run.k[0]}, 95 % interval")
    axes.set(title="Reward", ylabel="reward (line), share solved (points)")
    _with_room(axes)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)


def _entropy(axes: Axes, runs: Mapping[str, RunRecord], colours: Sequence[str]) -> None:
    _lines(axes, runs, colours, "policy/entropy")
    axes.set(title="Policy entropy", ylabel="nats per token")
    highest = axes.dataLim.ymax
    axes.set_ylim(0, 1.15 * highest if highest > 0 else None)


def _allocation(axes: Axes, revisits: Revisits | None) -> None:
    axes.set_title("Rollouts by a problem's earlier success rate, from its second visit on")
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
    axes.legend(
        title="numbers: visits", title_fontsize=8, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3
    )
