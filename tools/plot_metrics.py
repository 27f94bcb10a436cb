"""Draws metrics of runs over their steps: a panel for each metric, a line for each run.

    python -P tools/plot_metrics.py OUT.png policy/damped_share policy/boosted_share max=runs/a quantile=runs/b

A run is NAME=RUN, its output_dir; what has no "=" is a metric, a key of metrics.jsonl.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from dynamo_megatron.reports.run_record import RunRecord, read_run


def draw(metrics: Sequence[str], runs: Mapping[str, RunRecord], path: Path) -> None:
    """Writes a PNG. Raises ValueError naming the run that lacks a metric."""
    figure = Figure(figsize=(5 * len(metrics), 4), dpi=150, layout="constrained")
    for axes, metric in zip(figure.subplots(1, len(metrics), squeeze=False)[0], metrics, strict=True):
        for name, run in runs.items():
            if metric not in run.metrics[0]:
                raise ValueError(f"{run.folder}: no metric {metric}; it has {', '.join(run.metrics[0])}")
            axes.plot(run.steps, run.metric(metric), ".-", label=name)
        axes.set(title=metric, xlabel="training step")
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.png")
    parser.add_argument("words", nargs="+", metavar="METRIC | NAME=RUN")
    options = parser.parse_args()
    metrics = [word for word in options.words if "=" not in word]
    named = dict(word.split("=", 1) for word in options.words if "=" in word)
    try:
        if not metrics or not named:
            raise ValueError("give at least one METRIC and one NAME=RUN")
        draw(metrics, {name: read_run(Path(run)) for name, run in named.items()}, options.out)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
