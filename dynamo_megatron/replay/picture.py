"""The picture of a replay: variance by step, degenerate groups, and rollouts by success rate."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # without pyplot a figure is drawn by Agg, with no screen

from dynamo_megatron.replay.outcomes import Outcomes
from dynamo_megatron.reports.figures import COLOURS, GREY, moving_average, rate_bins, window_of

ORACLE = "#000000"


def draw_replay(result: Outcomes, path: Path) -> None:
    """Writes a PNG, readable at a width of 1000 pixels."""
    figure = Figure(figsize=(10, 8.6), dpi=150, layout="constrained")
    variance, degenerate, rollouts = figure.subplot_mosaic("VVVDD;RRRRR", height_ratios=(1, 1)).values()
    colours = dict(zip(result.counts, (COLOURS * len(result.counts))[: len(result.counts)], strict=True))
    colours |= {"oracle": ORACLE, "uniform": GREY}
    _variance(variance, result, colours)
    _degenerate(degenerate, result, colours)
    _rollouts(rollouts, result, colours)
    figure.legend(
        *rollouts.get_legend_handles_labels(),
        loc="outside upper center",
        ncols=3,
        fontsize=9,
        frameon=False,
        title=f"What each allocator would have given ({result.recording.folder})",
        title_fontproperties={"weight": "bold", "size": 12},
    )
    figure.supxlabel(
        "p is a problem's success rate over the whole record, known only afterwards; the oracle knows it in advance.\n"
        "sum p(1-p)/n is not the gradient's variance. An allocator saw the rollouts that were sampled, not those that "
        "it would have asked for.",
        fontsize=9,
    )
    figure.savefig(path)


def _variance(axes: Axes, result: Outcomes, colours: dict[str, str]) -> None:
    steps = result.recording.step_numbers
    window = window_of(len(steps))
    even = moving_average(result.variance(result.uniform), window)
    for name, counts in result.counts.items():
        ratio = np.divide(moving_average(result.variance(counts), window), even, out=np.ones(len(even)), where=even > 0)
        axes.plot(steps, ratio, _style(name), color=colours[name], markersize=3)
    known = [i for i, visits in enumerate(_later_visits(result)) if visits]
    if not known or known[0] > 0:
        last = steps[known[0]] if known else steps[-1]
        axes.axvspan(steps[0], last, color=GREY, alpha=0.12, linewidth=0, label="first visits only: nothing is known")
        axes.legend(fontsize=8)
    smooth = f", average of {window} steps" if window > 1 else ""
    axes.set(title="Expected variance from the same budget: lower is better")
    axes.set(xlabel="training step", ylabel=f"sum p(1-p)/n, uniform = 1{smooth}")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)


def _later_visits(result: Outcomes) -> np.ndarray:
    """The number of visits in every step to prompts that were visited before, int64 [steps]."""
    seen: set[str] = set()
    later = []
    for step in result.recording.steps:
        later.extend(prompt_id in seen for prompt_id in step.prompt_ids)
        seen.update(step.prompt_ids)
    return np.bincount(result.recording.step_index, later)


def _degenerate(axes: Axes, result: Outcomes, colours: dict[str, str]) -> None:
    names = list(result.counts)
    shares = [100 * result.measures[name]["degenerate_expected"] for name in names]
    bars = axes.barh(names, shares, color=[colours[name] for name in names], alpha=0.8)
    axes.bar_label(bars, fmt="%.1f", fontsize=8, padding=2)
    observed = 100 * result.degenerate_share
    axes.axvline(observed, color=ORACLE, linestyle=":", label=f"of the sampled groups: {observed:.1f} %")
    axes.set(title="Groups that teach nothing", xlabel="all right or all wrong, % expected", yticks=[])
    axes.set_xlim(0, 1.25 * max(*shares, observed, 1))
    axes.set_ylim(len(names) - 0.5, -1.1)  # the first bar on top, with room for the legend above it
    axes.legend(fontsize=8, loc="upper right")


def _rollouts(axes: Axes, result: Outcomes, colours: dict[str, str]) -> None:
    bins = rate_bins(result.rates)
    members = [bins == b for b in np.unique(bins)]
    middle = [result.rates[its].mean() for its in members]
    highest = 0.0
    for name, counts in result.counts.items():
        means = [counts[its].mean() for its in members]
        highest = max(highest, *means)
        axes.plot(middle, means, _style(name), color=colours[name], label=name)
    for x, its in zip(middle, members, strict=True):
        axes.annotate(f"{its.sum()}", (x, 0), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=8)
    axes.set(title="Rollouts: who would have got them?")
    axes.set(xlabel="a problem's success rate p (numbers: visits)", ylabel="rollouts of a visit, mean")
    axes.set_xlim(-0.05, 1.05)
    axes.set_ylim(0, 1.15 * highest)
    axes.grid(alpha=0.3)


def _style(name: str) -> str:
    return "--" if name in ("oracle", "uniform") else "o-"
