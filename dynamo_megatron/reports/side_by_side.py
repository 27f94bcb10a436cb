"""`dynamo-megatron report RUN RUN ...`: several runs side by side, in tables and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dynamo_megatron.errors import InputError
from dynamo_megatron.evaluation.estimates import Interval, paired_bootstrap
from dynamo_megatron.evaluation.results import (
    align,
    in_percent,
    markdown_row,
    problem_pass_at_k,
    read_results,
    results_file,
    summary_k,
)
from dynamo_megatron.reports.run_record import RunRecord, read_run

WINDOW = 5  # a run's figure is the mean over this many last steps
ABSENT = "-"
# name in the table, key of metrics.jsonl, format
FIGURES = (
    ("reward", "reward/mean", ".3f"),
    ("solved, share of rollouts", "reward/success", ".3f"),
    ("policy entropy, nats per token", "policy/entropy", ".3f"),
    ("response length, tokens", "rollout/response_length_mean", ".1f"),
    ("gradient norm", "policy/grad_norm", ".3f"),
    ("largest logprob gap to the server, nats", "rollout/logprob_gap_max", ".1e"),
)


def write_side_by_side(folders: Sequence[Path], out: Path) -> str:
    """Writes OUT/comparison.md and OUT/comparison.png; returns the text and its place. Differences are to the first
    run.

    Runs may differ in anything, also in their numbers of steps and evaluations. Raises ValueError for a folder that is
    not a run's, has no step or is named twice, and for a broken line in a run's files.
    """
    from dynamo_megatron.reports.picture import draw_runs  # matplotlib takes a second to import

    if len({folder.resolve() for folder in folders}) < len(folders):
        raise InputError("report: a run is named twice; name each run once")
    runs = dict(zip(run_names(folders), map(read_run, folders), strict=True))
    text = "\n\n".join([_heading(runs), _figures(runs), _passes(runs), _settings(runs)])
    picture = out / "comparison.png"
    out.mkdir(parents=True, exist_ok=True)
    draw_runs(runs, picture)
    (out / "comparison.md").write_text(f"{text}\n\n![the runs in four panels]({picture.name})\n", encoding="utf-8")
    return f"{text}\n\nThis text is in {out / 'comparison.md'}, the picture in {picture}."


def run_names(folders: Sequence[Path]) -> list[str]:
    """The folders' last parts where these differ, else the paths."""
    short = [folder.resolve().name for folder in folders]
    return short if len(set(short)) == len(short) else [str(folder) for folder in folders]


def _heading(runs: dict[str, RunRecord]) -> str:
    lines = [
        f"- {name}: {run.folder}, {run.metrics[-1]['step']} of {run.config['trainer']['steps']} steps, "
        f"{len(run.evaluations)} evaluation{'' if len(run.evaluations) == 1 else 's'}"
        for name, run in runs.items()
    ]
    return f"# Comparison of {', '.join(runs)}\n\n" + "\n".join(lines)


def _table(runs: dict[str, RunRecord], title: str, rows: Sequence[tuple[str, list[str], list[str]]]) -> str:
    """The table of rows of (name, one cell per run, one difference per run except the first)."""
    first, *others = runs
    head = [title, first]
    for name in others:
        head += [name, f"{name} - {first}"]
    lines = [markdown_row(head), markdown_row(["---"] + ["---:"] * (len(head) - 1))]
    for name, cells, differences in rows:
        pairs = [cell for pair in zip(cells[1:], differences, strict=True) for cell in pair]
        lines.append(markdown_row([name, cells[0], *pairs]))
    return "\n".join(lines)


def _mean(run: RunRecord, key: str, last_step: int) -> float | None:
    """The metric's mean over the last WINDOW steps up to `last_step`; None where one of them lacks the metric."""
    values = [m.get(key) for m in run.metrics if m["step"] <= last_step][-WINDOW:]
    return None if not values or None in values else float(np.mean(values))


def _number_row(name: str, values: Sequence[float | None], form: str) -> tuple[str, list[str], list[str]]:
    cells = [ABSENT if value is None else f"{value:{form}}" for value in values]
    differences = [
        ABSENT if value is None or values[0] is None else f"{value - values[0]:+{form}}" for value in values[1:]
    ]
    return name, cells, differences


def _figures(runs: dict[str, RunRecord]) -> str:
    last = [run.metrics[-1]["step"] for run in runs.values()]
    rows = [
        _number_row(name, [_mean(run, key, step) for run, step in zip(runs.values(), last, strict=True)], form)
        for name, key, form in FIGURES
    ]
    common = min(last)
    if common < max(last):
        at_common = [_mean(run, "reward/mean", common) for run in runs.values()]
        rows.insert(1, _number_row(f"reward at step {common}", at_common, ".3f"))
    medians = [
        float(np.median(run.metric("time/step"))) if "time/step" in run.metrics[-1] else None for run in runs.values()
    ]
    rows.append(_number_row("seconds per step, median", medians, ".2f"))
    note = f"Each figure is the mean of the last {WINDOW} steps of its run, but for the median."
    if common < max(last):
        note += f" The runs have different numbers of steps: compare them at step {common}, the last that all have."
    return f"## Training\n\n{note}\n\n{_table(runs, 'figure', rows)}"


def _passes(runs: dict[str, RunRecord]) -> str:
    title = "## Held-out problems"
    ks = sorted({k for run in runs.values() for k in run.k})
    if not ks:
        return f"{title}\n\nNone of the runs has an evaluation (`eval.data` and `eval.every` in the config)."
    last = [run.evaluations[-1] if run.evaluations else None for run in runs.values()]
    steps = [ABSENT if each is None else str(each["step"]) for each in last]
    rows = [("at step", steps, [""] * (len(runs) - 1))]
    paired = True
    for k in ks:
        cells = [
            in_percent(Interval(*(each[f"eval/pass@{k}{end}"] for end in ("", "_low", "_high"))))
            if each is not None and k in summary_k(each)
            else ABSENT
            for each in last
        ]
        differences = []
        for run, cell in list(zip(runs.values(), cells, strict=True))[1:]:
            known = ABSENT not in (cells[0], cell)
            difference = _paired(next(iter(runs.values())), run, k) if known else None
            paired &= difference is not None or not known
            differences.append(ABSENT if difference is None else in_percent(difference, sign="+"))
        rows.append((f"pass@{k}, %", cells, differences))
    note = (
        "The last evaluation of each run, with its 95 % interval over problems; a difference has the interval of the "
        "paired problems. An interval does not cover what another seed would change."
    )
    if not paired:
        note += " No difference is given for evaluations of other problems, or without their file in eval/."
    return f"{title}\n\n{note}\n\n{_table(runs, 'figure', rows)}"


def _paired(first: RunRecord, other: RunRecord, k: int) -> Interval | None:
    """pass@k of `other` minus that of `first`, with its interval; None where their last evaluations have different
    problems, or no file in eval/."""
    files = [results_file(run.folder, run.evaluations[-1]["step"]) for run in (first, other)]
    if not all(file.is_file() for file in files):
        return None
    results = [read_results(file) for file in files]
    if {r.prompt_id for r in results[0]} != {r.prompt_id for r in results[1]}:
        return None
    return paired_bootstrap(*(problem_pass_at_k(each, k) for each in align(*results)))


def _settings(runs: dict[str, RunRecord]) -> str:
    flat = [_flat(run.config) for run in runs.values()]
    keys = sorted(set().union(*flat) - {"output_dir"})
    lines = [markdown_row(["key", *runs]), markdown_row(["---"] * (len(runs) + 1))]
    for key in keys:
        values = [repr(each[key]) if key in each else ABSENT for each in flat]
        if len(set(values)) > 1:
            lines.append(markdown_row([key, *values]))
    if len(lines) == 2:
        return "## Settings that differ\n\nNone but output_dir."
    return "## Settings that differ\n\n" + "\n".join(lines)


def _flat(section: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(section, dict) or not section:
        return {prefix: section}
    return {
        key: value
        for name, part in section.items()
        for key, value in _flat(part, f"{prefix}.{name}" if prefix else name).items()
    }
