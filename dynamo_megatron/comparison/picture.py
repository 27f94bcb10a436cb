"""The picture of a comparison: scores over rollouts; ratios of the costs, or with few seeds the final scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dynamo_megatron.comparison.curves import finished
from dynamo_megatron.comparison.table import SHARE_NAMES, Measured
from dynamo_megatron.reports.figures import COLOURS, GREY

WIDEST = 4.0  # the largest ratio on the axis; a longer interval ends in an arrow
TICKS = (0.25, 0.33, 0.5, 0.67, 0.8, 1, 1.25, 1.5, 2, 3, 4)
MARKERS = dict(zip(SHARE_NAMES.values(), ("o", "s"), strict=True))


def draw(measured: Measured, found: dict[str, Any], path: Path) -> None:
    """Writes a PNG, readable at a width of 1000 pixels."""
    names = list(found["arms"])
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    figure = Figure(figsize=(10, 5.4), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    _curves(left, measured, found, colours)
    if found["ratios"] and found["targets"]["half"] is not None:
        _ratios(right, found, colours)
    else:
        _finals(right, measured, found, colours)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(4, len(names)), fontsize=9)
    figure.supxlabel(
        "Left: mean over the seeds at the learning rate of the best final score; band: lowest to highest seed.",
        fontsize=9,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.tmp.png")
    figure.savefig(aside)
    aside.rename(path)


def _curves(axes: Axes, measured: Measured, found: dict[str, Any], colours: dict[str, str]) -> None:
    for name, colour in colours.items():
        curves = [measured.curves[run] for run in measured.runs(name, measured.final_rate(name))]
        shared = min(map(len, curves))  # 0: the arm is only in the legend
        rollouts = np.mean([[row["rollouts"] for row in rows[:shared]] for rows in curves], axis=0)
        scores = 100 * np.array([[row[found["metric"]] for row in rows[:shared]] for rows in curves])
        failed = found["arms"][name]["failed"]
        label = f"{name} ({failed} of {found['arms'][name]['ended']} runs failed)" if failed else name
        axes.plot(rollouts, scores.mean(axis=0), "o-", color=colour, label=label, markersize=4)
        axes.fill_between(rollouts, scores.min(axis=0), scores.max(axis=0), color=colour, alpha=0.15, linewidth=0)
    for share, target in found["targets"].items():
        if target is not None:
            axes.axhline(100 * target, color=GREY, linestyle=":", linewidth=1)
            where: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "xytext": (-4, 3), "ha": "right"}
            text = f"{share} of {found['control']}'s gain"
            axes.annotate(text, (1, 100 * target), **where, textcoords="offset points", fontsize=8)
    count = len(measured.seeds)
    axes.set(
        title=f"Evaluation problems, {count} seed{'s' * (count > 1)}", xlabel="rollouts", ylabel=f"{found['metric']}, %"
    )
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.tick_params(axis="x", labelrotation=20)
    axes.grid(alpha=0.3)


def _ratios(axes: Axes, found: dict[str, Any], colours: dict[str, str]) -> None:
    """One row for each arm except the control, with one interval for each target."""
    others = [name for name in found["arms"] if name != found["control"]]
    shown = [0.5, 2.0]
    for row, name in enumerate(others):
        for q, share in enumerate(MARKERS):
            ratio, y = found["arms"][name]["cost"][share]["rollouts"]["ratio"], row + 0.24 * (q - 0.5)
            if ratio["value"] is None:
                beside: dict[str, Any] = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
                axes.annotate(f"to {share}: never", (1, y), **beside, fontsize=8)
                continue
            ends = (ratio[end] if ratio[end] is not None else np.inf for end in ("low", "value", "high"))
            low, value, high = np.clip([*ends], 1 / WIDEST, WIDEST)
            axes.plot([low, high], [y, y], color=colours[name], linewidth=2)
            axes.plot(value, y, MARKERS[share], color=colours[name], markersize=6)
            for end, arrow in ((low, "<"), (high, ">")):
                if end in (1 / WIDEST, WIDEST):
                    axes.plot(end, y, arrow, color=colours[name], markersize=8, clip_on=False)
            shown += [low, high]
    axes.axvline(1, color=GREY, linewidth=1)
    axes.set_xscale("log")
    axes.set_xlim(max(min(shown) / 1.05, 1 / WIDEST), min(max(shown) * 1.05, WIDEST))
    ticks = [tick for tick in TICKS if axes.get_xlim()[0] <= tick <= axes.get_xlim()[1]]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(others)), others)
    axes.set_ylim(len(others) - 0.5, -0.5)
    for share, marker in MARKERS.items():
        axes.plot([], [], marker, color=GREY, label=f"to {share} of the gain")
    axes.set(title=f"Rollouts, as a multiple of {found['control']}'s")
    axes.set_xlabel("ratio of the medians, 95 % interval (log scale)")
    axes.grid(alpha=0.3, axis="x")
    axes.legend(fontsize=8, loc="best")


def _finals(axes: Axes, measured: Measured, found: dict[str, Any], colours: dict[str, str]) -> None:
    """One point per seed."""
    for row, (name, colour) in enumerate(colours.items()):
        runs = measured.runs(name, measured.final_rate(name))
        done = [measured.curves[run][-1][found["metric"]] for run in runs if finished(measured.outcomes[run])]
        axes.plot([100 * score for score in done], [row] * len(done), "o", color=colour)
        if len(done) < len(runs):
            axes.annotate(f"{len(runs) - len(done)} failed", (0.5, row), xycoords=("axes fraction", "data"), fontsize=8)
    axes.set_yticks(range(len(colours)), list(colours))
    axes.set_ylim(len(colours) - 0.5, -0.5)
    axes.set(title="Final score of each seed", xlabel=f"{found['metric']}, %")
    axes.margins(x=0.1)
    axes.grid(alpha=0.3, axis="x")
