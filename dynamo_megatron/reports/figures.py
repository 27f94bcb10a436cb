"""The figures of one or several runs, in plotly's format; report.html shows all of them, report.png some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dynamo_megatron.reports.run_record import Revisits, RunRecord

Figure = dict[str, Any]  # `data` (plotly's traces), `layout`, and `note`: a text below the title
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#882255", "#999933", "#000000")
DASHES = ("solid", "dash", "dot", "dashdot")
MATPLOTLIB_DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
TIMES = ("generate", "logprobs", "update", "weight_sync", "other", "evaluate", "save", "values", "critic")
# title, unit, metrics and what the legend calls them; a unit that ends in "log" has a logarithmic axis
CHARTS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("Success", "share of rollouts", {"reward/success": "solved"}),
    ("Policy entropy", "nats per token", {"policy/entropy": "entropy"}),
    ("Response length", "tokens, mean", {"rollout/response_length_mean": "length"}),
    ("KL", "nats per token", {"policy/kl": "to the reference", "rollout_correction/kl": "to the engine"}),
    ("Logprobs, policy - engine", "nats, log", {"rollout/logprob_gap_mean": "mean", "rollout/logprob_gap_max": "max"}),
    ("Incomplete responses", "share", {f"rollout/{s}": s for s in ("truncated", "aborted", "failed", "rejected")}),
    ("Gradient norm", "norm, before clipping", {"policy/grad_norm": "gradient"}),
    ("Clipped tokens", "share", {"policy/clip_share": "clipped", "policy/clip_c_share": "by the dual clip"}),
    ("Load of experts", "tokens of the busiest / mean", {"moe/load_mean": "mean of layers", "moe/load_max": "worst"}),
    ("Routes that differ", "share of tokens and layers", {"moe/route_mismatch": "own choice, rollout"}),
    ("Modulated tokens", "share", {"policy/boosted_share": "above 1.1", "policy/damped_share": "below 0.9"}),
    ("Throughput", "tokens per second", {"throughput/tokens_per_second": "all tokens"}),
    ("Utilisation", "share of all time", {"fleet/idle_share": "servers idle", "resources/cpu": "cores busy"}),
    ("Age of the weights", "steps", {"rollout/staleness_mean": "mean", "rollout/staleness_max": "oldest token"}),
    ("Groups of equal rewards", "share of the groups", {"rollout/zero_variance_groups": "all rewards equal"}),
    ("Distinct answers", "share, mean of the groups", {"reward/unique_answers": "of rollouts"}),
    ("Distinct 4-grams", "share, mean of the groups", {"rollout/distinct_4grams": "of all 4-grams"}),
    ("Rollouts of a prompt", "rollouts", {"allocation/n_max": "most", "allocation/n_min": "fewest"}),
)


def moving_average(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of each value and its neighbours, (window - 1) / 2 on either side as far as there are any, float64 [N];
    NaN for a value that is not finite, which counts nowhere."""
    known, near = np.isfinite(values), np.ones(window)
    middle = slice(window // 2, window // 2 + len(values))
    sums = np.convolve(np.where(known, values, 0.0), near)[middle]
    counts = np.convolve(known, near)[middle]
    return np.where(known, sums / np.maximum(counts, 1.0), np.nan)


def rate_classes(rate: np.ndarray) -> dict[str, np.ndarray]:
    """The rows of a table by success rate, float [V]: name -> its members, bool [V]."""
    return {
        "never solved (0)": rate == 0,
        "rarely (below .2)": (rate > 0) & (rate < 0.2),
        "sometimes (.2 to .8)": (rate >= 0.2) & (rate <= 0.8),
        "mostly (above .8)": (rate > 0.8) & (rate < 1),
        "always solved (1)": rate == 1,
    }


def plain(values: Sequence[float] | np.ndarray, digits: int = 5) -> list[float | None]:
    """`values` for JSON: rounded to `digits` significant digits, None for NaN and infinity."""
    return [float(f"{v:.{digits}g}") if np.isfinite(v) else None for v in values]


def metric_figures(runs: Mapping[str, RunRecord]) -> list[Figure]:
    """Reward with evaluations, the CHARTS, and the time of a step; a figure whose values are all 0 or missing is left
    out."""
    reward = [*_lines({"reward/mean": "training reward"}, runs), *_passes(runs)]
    note = "Points: share of held-out problems solved, with the 95 % interval over problems." if _passes(runs) else ""
    figures = [figure("Reward", "reward, mean of a step", reward, note)]
    for title, unit, series in CHARTS:
        traces = _lines(series, runs)
        if any(any(trace["y"]) for trace in traces):
            figures.append(figure(title, unit, traces))
            figures[-1]["layout"]["yaxis"] |= {"type": "log"} if unit.endswith("log") else {"rangemode": "tozero"}
    return figures + [_times(name, run) for name, run in runs.items() if "time/step" in run.metrics[-1]]


def figure(title: str, unit: str, traces: list[dict[str, Any]], note: str = "", x: str = "training step") -> Figure:
    axes = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": unit}}}
    return {"title": title, "note": note, "data": traces, "layout": axes}


def _lines(series: Mapping[str, str], runs: Mapping[str, RunRecord]) -> list[dict[str, Any]]:
    """A colour a run, or with one run a colour a metric; each step as a thin line below its moving average."""
    traces = []
    for r, (name, run) in enumerate(runs.items()):
        for s, (key, label) in enumerate(series.items()):
            values, x = run.series(key), run.steps.tolist()
            if not np.isfinite(values).any():
                continue
            if len(runs) > 1:
                label = name if len(series) == 1 else f"{name}: {label}"
            line = {"color": COLOURS[(r if len(runs) > 1 else s) % len(COLOURS)], "dash": DASHES[s % len(DASHES)]}
            trace = {"x": x, "mode": "lines" if len(x) > 1 else "markers", "name": label}
            window = 1 if key.endswith("_max") else 2 * min(5, len(x) // 8) + 1
            if window > 1:
                thin = {"y": plain(values), "opacity": 0.4, "line": {**line, "width": 1}, "showlegend": False}
                traces.append({**trace, **thin})
            traces.append({**trace, "y": plain(moving_average(values, window)), "line": {**line, "width": 2}})
    return traces


def _passes(runs: Mapping[str, RunRecord]) -> list[dict[str, Any]]:
    """Points with intervals, for every k of the evaluations."""
    traces = []
    for r, (name, run) in enumerate(runs.items()):
        for i, k in enumerate(run.k):
            steps, mean, low, high = run.pass_at(k).T
            spread = {"array": plain(high - mean), "arrayminus": plain(mean - low), "symmetric": False, "type": "data"}
            colour = COLOURS[(r if len(runs) > 1 else i + 1) % len(COLOURS)]
            symbol = ("circle", "square", "diamond", "cross")[i % 4]
            trace = {"x": steps.astype(int).tolist(), "y": plain(mean), "mode": "markers", "error_y": spread}
            trace["name"] = f"{name}: pass@{k}" if len(runs) > 1 else f"pass@{k}"
            traces.append({**trace, "marker": {"color": colour, "size": 8, "symbol": symbol}})
    return traces


def _times(name: str, run: RunRecord) -> Figure:
    traces = []
    for phase, colour in zip(TIMES, COLOURS, strict=False):
        seconds = run.series(f"time/{phase}")
        if not np.isfinite(seconds).any():  # without a critic
            continue
        x, y = run.steps.tolist(), plain(np.nan_to_num(seconds))
        shown = {"name": phase.replace("_", " "), "stackgroup": "time", "fillcolor": colour}
        traces.append({"x": x, "y": y, "line": {"width": 0.5, "color": colour}, **shown})
    made = figure(f"Time of a step by phase: {name}", "seconds", traces, "The phases add up to the step.")
    seconds = run.series("time/step")
    highest = float(min(np.nanmax(seconds), 2 * np.nanquantile(seconds, 0.95)))
    made["layout"]["yaxis"]["range"] = [0, 1.1 * highest]  # one long step does not flatten all others
    return made


def allocation_figures(revisits: Mapping[str, Revisits]) -> list[Figure]:
    """Rollouts by the success rate that a prompt had before, of all runs that have visited a prompt again."""
    traces = []
    for (name, seen), colour in zip(revisits.items(), COLOURS * len(revisits), strict=False):
        members = [its for its in rate_classes(seen.success_rates).values() if its.any()]
        x, y = ([values[its].mean() for its in members] for values in (seen.success_rates, seen.rollouts))
        text = [f"{its.sum()} visits" for its in members]
        line = {"color": colour, "width": 2}
        even = {"color": colour, "width": 1, "dash": "dot"}
        traces += [
            {"x": plain(x), "y": plain(y), "text": text, "mode": "lines+markers", "name": name, "line": line},
            {"x": [0, 1], "y": [seen.uniform] * 2, "mode": "lines", "name": f"{name}: an even split", "line": even},
        ]
    note = "A visit is a step that draws the prompt; first visits, of which nothing is known before, are left out."
    axis = "earlier success rate of the prompt"
    made = figure("Rollouts by earlier success rate", "rollouts of a visit, mean", traces, note, axis)
    made["layout"]["yaxis"]["rangemode"] = "tozero"
    return [made] if any(len(seen.rollouts) for seen in revisits.values()) else []


def draw(figures: Sequence[Figure], title: str, path: Path) -> None:
    """Writes a PNG of figures with lines and points, two in a row, readable at a width of 1000 pixels."""
    from matplotlib.figure import Figure as Picture  # takes a second; without pyplot it needs no screen

    rows = -(-len(figures) // 2)
    picture = Picture(figsize=(10, 4 * rows), dpi=150, layout="constrained")
    picture.suptitle(title, weight="bold")
    panels = picture.subplots(rows, 2, squeeze=False).ravel()
    for axes, shown in zip(panels, figures, strict=False):
        for trace in shown["data"]:
            line = trace.get("line", {})
            style = {
                **{"color": line.get("color") or trace["marker"]["color"], "alpha": trace.get("opacity")},
                "label": trace["name"] if trace.get("showlegend", True) else None,
            }
            x, y = (np.array(trace[name], np.float64) for name in ("x", "y"))
            if "error_y" in trace:
                spread = [np.maximum(trace["error_y"][name], 0) for name in ("arrayminus", "array")]
                axes.errorbar(x, y, spread, fmt="o", capsize=3, **style)
            else:
                mark = "o" if "markers" in trace["mode"] else None
                axes.plot(x, y, MATPLOTLIB_DASHES[line.get("dash", "solid")], marker=mark, lw=line["width"], **style)
        layout = shown["layout"]
        labels = {f"{axis}label": layout[f"{axis}axis"]["title"]["text"] for axis in "xy"}
        axes.set(title=shown["title"], **labels)
        if layout["yaxis"].get("rangemode") == "tozero":
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    for axes in panels[len(figures) :]:
        axes.set_axis_off()
    picture.savefig(path)
