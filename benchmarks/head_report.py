"""benchmarks/head.py's table and picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from dynamo_megatron.evaluation.results import markdown_row

SHOWN = ("14B/8192/tp1", "14B/8192/tp1/peaked", "14B/8192/tp8", "7B/8192/tp1")  # in the picture
COLUMNS = ("ms", "p10", "p90", "of floor", "GB", "logprob", "entropy", "dX", "dW")


def markdown(result: Mapping[str, Any]) -> str:
    lines = ["# The policy head", ""]
    if result["tiny"]:
        lines += ["Tiny shapes: this shows that the benchmark runs. Its times and bytes say nothing.", ""]
    lines += [
        "Milliseconds (median, p10, p90); the floor's share of them; peak gigabytes (10^9) beyond the inputs; largest "
        "error of log-probabilities and entropy in nats, relative errors of the gradients, against float64.",
    ]
    for case in result["cases"]:
        lines += [
            "",
            f"## {case['case']}",
            "",
            f"{case['tokens']} tokens ({case['trained']:.0%} trained), hidden size {case['hidden']}, "
            f"{case['columns']} columns, temperature {case['temperature']:g}, mean entropy {case['entropy']:.2f} nats.",
            "",
            markdown_row(["contender", "GEMMs", "computes", *COLUMNS]),
            markdown_row(["---", "---:", "---", *["---:"] * len(COLUMNS)]),
        ]
        lines += [markdown_row(_row(name, figures)) for name, figures in case["contenders"].items()]
    if "kernels" in result:
        lines += _kernels(result["kernels"])
    machine = ", ".join(f"{key} {value}" for key, value in result["machine"].items() if value is not None)
    return "\n".join([*lines, "", f"Measured on: {machine}.", "", "![time and memory](head.png)"])


def _row(name: str, figures: Mapping[str, Any]) -> list[str]:
    start = [name, str(figures["gemms"]), figures["target"] or ""]
    if "skipped" in figures:
        return [*start, figures["skipped"], *[""] * (len(COLUMNS) - 1)]
    seconds, errors = figures["seconds"], figures.get("errors", {})
    accuracy = [errors.get(key) for key in ("logprobs", "entropy", "hidden_grad", "weight_grad")]
    return [
        *start,
        *(f"{1000 * seconds[key]:.2f}" for key in ("median", "p10", "p90")),
        f"{figures['of floor']:.2f}" if "of floor" in figures else "",
        f"{figures['peak bytes'] / 1e9:.2f}",
        *("" if value is None else f"{value:.1e}" for value in accuracy),
    ]


def _kernels(kernels: Mapping[str, Any]) -> list[str]:
    head = ["kernel", "tokens", "columns", "microseconds", "GB/s", "of copy"]
    lines = ["", "## Single kernels", "", markdown_row(head), markdown_row(["---", *["---:"] * 5])]
    for row in kernels["speed"]:
        rate, share = row["GB/s"], row["of copy"]
        cells = ["", ""] if rate is None else [f"{rate:.0f}", f"{share:.2f}"]
        size = [str(row["tokens"]), str(row["columns"])]
        lines.append(markdown_row([row["kernel"], *size, f"{1e6 * row['seconds']['median']:.0f}", *cells]))
    repeated = kernels["in place"]
    found = ", ".join(f"{name} {count} times" for name, count in repeated["different"].items())
    return [*lines, "", f"Other bits in place than out of place, of {repeated['repeats']} times: {found}."]


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Time and memory of loss and gradients for the cases of `SHOWN`, or the first ones. Writes a PNG."""
    by_name = {case["case"]: case for case in result["cases"]}
    cases = [by_name[name] for name in SHOWN if name in by_name] or result["cases"][:4]
    figure = Figure(figsize=(12, 2.2 + 3.0 * len(cases)), dpi=110, layout="constrained")
    title = "The policy head: loss and gradients" + (" (tiny shapes: no figures)" if result["tiny"] else "")
    figure.suptitle(title, weight="bold")
    panels = figure.subplots(len(cases), 2, squeeze=False)
    for (times, memory), case in zip(panels, cases, strict=True):
        shown = {n: f for n, f in case["contenders"].items() if "seconds" in f and f["gemms"] > 1}
        names, places = list(shown), range(len(shown))
        seconds = [f["seconds"] for f in shown.values()]
        median = [1000 * s["median"] for s in seconds]
        spread = [
            [m - 1000 * s["p10"] for m, s in zip(median, seconds, strict=True)],
            [1000 * s["p90"] - m for m, s in zip(median, seconds, strict=True)],
        ]
        colours = ["#0072b2" if n.startswith(("eager", "recompute")) else "#999999" for n in names]
        times.barh(places, median, xerr=spread, color=colours)
        if "3 GEMMs" in names:
            times.axvline(median[names.index("3 GEMMs")], color="black", linewidth=1, linestyle="--")
        times.set_yticks(places, names)
        times.set(title=f"{case['case']}: milliseconds, p10 to p90", xlim=(0, None))
        memory.barh(places, [f["peak bytes"] / 1e9 for f in shown.values()], color=colours)
        memory.set_yticks(places, [""] * len(names))
        memory.set(title="peak GB beyond the inputs", xlim=(0, None))
        for axes in (times, memory):
            axes.invert_yaxis()
            axes.grid(alpha=0.3, axis="x")
    figure.savefig(path)
