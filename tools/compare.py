"""Compares arms of training by their final evaluations of the same held-out problems.

    python -P tools/compare.py OUT grpo=runs/grpo-1,runs/grpo-2 dynamo=runs/dynamo-1,runs/dynamo-2

An arm is NAME=RUN[,RUN...]: finished runs, one a seed, the seeds in the same order in every arm. Every arm is compared
with the first one. Prints the comparison and writes it to OUT/compare.md and OUT/compare.png.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dynamo_megatron.evaluation.estimates import Interval, paired_bootstrap, t_interval
from dynamo_megatron.evaluation.results import (
    align,
    in_percent,
    markdown_row,
    problem_pass_at_k,
    read_results,
    results_file,
    summary_k,
)
from dynamo_megatron.reports.picture import moving_average
from dynamo_megatron.reports.run_record import RunRecord, read_run

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # told apart by the colour-blind, too
WINDOW = 10  # steps of the moving average
# What arms must share to be compared at the same budget: keys of config.yaml.
SHARED = ("model.path", "data.source", "data.batch_prompts", "algorithm.allocation.budget", "trainer.steps")


@dataclass(frozen=True)
class Arm:
    name: str
    runs: list[RunRecord]  # one a seed
    passes: dict[int, np.ndarray]  # k -> final pass@k, float64 [seeds, problems]


def read_arms(arguments: Sequence[str]) -> list[Arm]:
    """Raises ValueError: arms that do not pair up, or runs that are not finished or have no evaluation in common."""
    named = _named_folders(arguments)
    runs = {name: [read_run(folder) for folder in folders] for name, folders in named.items()}
    every = [run for arm in runs.values() for run in arm]
    for key in SHARED:
        first, *others = (_value(run.config, key) for run in every)
        if (different := next((i for i, value in enumerate(others, 1) if value != first), None)) is not None:
            raise ValueError(
                f"{every[different].folder}: {key} is {others[different - 1]}, in {every[0].folder} {first}; compare "
                "runs of the same task and budget"
            )
    results = align(*(read_results(results_file(run.folder, _final(run)["step"])) for run in every))
    common = set.intersection(*(set(summary_k(_final(run))) for run in every))
    if not common:
        raise ValueError("eval.k: the runs have no pass@k in common; evaluate all of them with the same k")
    passes = {k: np.array([problem_pass_at_k(r, k) for r in results]) for k in sorted({min(common), max(common)})}
    seeds = len(every) // len(runs)
    return [
        Arm(name, arm, {k: values[i * seeds : (i + 1) * seeds] for k, values in passes.items()})
        for i, (name, arm) in enumerate(runs.items())
    ]


def _named_folders(arguments: Sequence[str]) -> dict[str, list[Path]]:
    named: dict[str, list[Path]] = {}
    for argument in arguments:
        name, _, runs = argument.partition("=")
        if not name or not all(runs.split(",")):
            raise ValueError(f"{argument!r}: give an arm as NAME=RUN[,RUN...]")
        if name in named:
            raise ValueError(f"{argument!r}: there is an arm {name} already; give every arm a name of its own")
        named[name] = [Path(run) for run in runs.split(",")]
    if not 2 <= len(named) <= len(COLOURS):
        raise ValueError(f"arms: {len(named)} given; 2 to {len(COLOURS)} can be compared")
    if len({len(folders) for folders in named.values()}) > 1:
        counts = ", ".join(f"{name} {len(folders)}" for name, folders in named.items())
        raise ValueError(f"arms: every arm needs the same number of seeds, these have {counts}")
    every = [folder.resolve() for folders in named.values() for folder in folders]
    if len(set(every)) < len(every):
        raise ValueError("arms: a run is named twice; every seed of every arm is a run of its own")
    return named


def _value(config: dict, key: str) -> object:
    for part in key.split("."):
        config = config[part]
    return config


def _final(run: RunRecord) -> dict:
    last, trainer = run.metrics[-1]["step"], run.config["trainer"]
    if last < trainer["steps"] and not trainer["stop_when"]:
        raise ValueError(f"{run.folder}: at step {last} of {trainer['steps']}; finish the run first")
    if not run.evaluations or run.evaluations[-1]["step"] != last:
        raise ValueError(f"{run.folder}: no evaluation at its last step, {last}; finish the run with eval.every set")
    return run.evaluations[-1]


def comparison(arms: Sequence[Arm]) -> str:
    """Tables and sentences, in Markdown."""
    first, k = arms[0], list(arms[0].passes)
    seeds, problems = first.passes[k[0]].shape
    over_seeds = f"n = {seeds} seeds, Student's t" if seeds > 1 else "n = 1 seed, no interval"
    lines = [
        f"# {', '.join(arm.name for arm in arms)} on {problems} held-out problems",
        "",
        f"Final pass@k in percent: the mean over seeds with its 95 % interval ({over_seeds}).",
        "",
        markdown_row(["arm", "steps", *(f"pass@{each}, % (95 %)" for each in k)]),
        markdown_row(["---"] + ["---:"] * (1 + len(k))),
    ]
    for arm in arms:
        ends = sorted({run.metrics[-1]["step"] for run in arm.runs})
        cells = [_over_seeds(arm.passes[each].mean(axis=1)) for each in k]
        lines.append(
            markdown_row([arm.name, " to ".join(str(end) for end in dict.fromkeys((ends[0], ends[-1]))), *cells])
        )
    lines += [
        "",
        f"Difference to {first.name} in points, seed by seed. The interval over seeds says what training again might "
        "give; the one over problems (bootstrap, seeds averaged) what other problems might say of these runs.",
        "",
        markdown_row(["arm", "difference", "95 % over seeds", "95 % over problems"]),
        markdown_row(["---"] + ["---:"] * 3),
    ]
    sentences = []
    for arm in arms[1:]:
        for each in k:
            before, after = first.passes[each], arm.passes[each]
            by_seed = t_interval((after - before).mean(axis=1))
            by_problem = paired_bootstrap(before.mean(axis=0), after.mean(axis=0))
            cells = [f"{100 * by_problem.mean:+.1f}", _ends(by_seed) if by_seed else "one seed", _ends(by_problem)]
            lines.append(markdown_row([f"{arm.name}, pass@{each}", *cells]))
            sentences.append(_verdict(arm.name, first.name, each, by_seed, by_problem))
    return "\n".join([*lines, "", *sentences])


def _over_seeds(values: np.ndarray) -> str:
    interval = t_interval(values)
    return in_percent(interval) if interval else f"{100 * values.mean():.1f}"


def _ends(interval: Interval) -> str:
    return f"{100 * interval.low:+.1f} to {100 * interval.high:+.1f}"


def _verdict(arm: str, first: str, k: int, by_seed: Interval | None, by_problem: Interval) -> str:
    difference = 100 * by_problem.mean
    seeds = f"the interval over seeds {_about_zero(by_seed)}" if by_seed else "one seed says nothing of other seeds"
    return (
        f"- pass@{k}: {arm} is {abs(difference):.1f} points {'above' if difference >= 0 else 'below'} {first}; "
        f"{seeds}, the interval over problems {_about_zero(by_problem)}."
    )


def _about_zero(interval: Interval) -> str:
    return "contains 0" if interval.low <= 0 <= interval.high else "does not contain 0"


def draw(arms: Sequence[Arm], path: Path) -> None:
    """Writes a PNG, readable at a width of 1000 pixels."""
    figure = Figure(figsize=(10, 5.4), dpi=150, layout="constrained")
    figure.suptitle(f"{', '.join(arm.name for arm in arms)} over training", weight="bold")
    reward, held_out = figure.subplots(1, 2)
    k = min(arms[0].passes)
    for arm, colour in zip(arms, COLOURS, strict=False):
        rewards = [(run.steps, moving_average(run.metric("reward/mean"), WINDOW)) for run in arm.runs]
        _band(reward, rewards, arm.name, colour, "-")
        _band(held_out, [tuple(run.pass_at(k).T[:2]) for run in arm.runs], arm.name, colour, "o-")
    reward.set(title="Training problems", ylabel=f"reward, mean of the last {WINDOW} steps")
    held_out.set(title="Held-out problems", ylabel=f"pass@{k}, fraction")
    for axes in (reward, held_out):
        axes.set_xlabel("training step")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend()
    seeds = len(arms[0].runs)
    figure.supxlabel(
        f"{f'Line: mean of {seeds} seeds; band: lowest to highest seed' if seeds > 1 else 'One seed each'}. "
        "An arm's reward weighs a problem by the rollouts it gave it: compare arms on the right.",
        fontsize=9,
    )
    figure.savefig(path)


def _band(axes: Axes, curves: Sequence[tuple[np.ndarray, np.ndarray]], name: str, colour: str, style: str) -> None:
    """Mean and range over curves of (steps, values), at the steps that all of them have."""
    steps = sorted(set.intersection(*(set(steps.tolist()) for steps, _ in curves)))
    values = np.array([own[np.isin(own_steps, steps)] for own_steps, own in curves])
    axes.plot(steps, values.mean(axis=0), style, color=colour, label=name)
    axes.fill_between(steps, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.2, linewidth=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder for compare.md and compare.png")
    parser.add_argument("arms", nargs="+", metavar="NAME=RUN[,RUN...]", help="the first one is what the others go by")
    options = parser.parse_args()
    try:
        arms = read_arms(options.arms)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    text = comparison(arms)
    options.out.mkdir(parents=True, exist_ok=True)
    draw(arms, options.out / "compare.png")
    (options.out / "compare.md").write_text(f"{text}\n\n![the arms over training](compare.png)\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
