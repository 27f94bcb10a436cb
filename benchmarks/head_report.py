"""benchmarks/head.py's table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamo_megatron.evaluation.results import markdown_row

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
    return "\n".join([*lines, "", f"Measured on: {machine}."])


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
