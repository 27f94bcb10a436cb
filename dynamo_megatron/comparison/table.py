"""A comparison's runs on disk as curves, arrays and Markdown tables."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import add
from pathlib import Path
from typing import Any

import numpy as np

from dynamo_megatron.comparison.spec import PlannedRun, RunOutcome, Spec, read_outcome
from dynamo_megatron.comparison.statistics import SHARES, UNITS, Arm, Findings, cost_to, find
from dynamo_megatron.errors import InputError
from dynamo_megatron.evaluation.results import markdown
from dynamo_megatron.runtime.plain_text import printable, show
from dynamo_megatron.runtime.whole_files import replacing
from dynamo_megatron.tracking.metrics import read_rows

LEAST_SEEDS = 5  # for a ratio and its interval
SHARE_NAMES = {0.5: "half", 0.9: "90 %"}

Outcomes = Mapping[PlannedRun, RunOutcome | None]
Curves = Mapping[PlannedRun, Sequence[Mapping[str, Any]]]


def write_comparison(spec: Spec, runs: Sequence[PlannedRun]) -> int:
    """Writes curves.jsonl of all runs that have ended, and comparison.md of the seeds whose runs all have; prints the
    tables. Where the runs' folders are gone, the tables are those of curves.jsonl.

    Returns 0, or 1 where a run has failed that might not fail again. Raises InputError where files are broken, or no
    seed is complete.
    """
    output = Path(spec.output_dir)
    file = output / "curves.jsonl"
    if file.is_file() and not (output / "runs").is_dir():
        outcomes, curves = _recorded(file, runs)
    else:
        outcomes, curves = {run: read_outcome(run) for run in runs}, {run: read_curve(run) for run in runs}
        output.mkdir(parents=True, exist_ok=True)
        ended = (rows for run, rows in curves.items() if outcomes[run] is not None)
        _write(file, "".join(f"{json.dumps(row)}\n" for rows in ended for row in rows))
    missing = {run.seed for run, outcome in outcomes.items() if outcome is None}
    if not (seeds := [seed for seed in spec.seeds if seed not in missing]):
        raise InputError(f"{output}: no seed has runs that have all ended; start it without --table")
    arms = arrays(spec, seeds, outcomes, curves)
    text = as_markdown(spec, seeds, arms, find(arms, spec.control), outcomes)
    _write(output / "comparison.md", f"{text}\n")
    print(printable(f"{text}\n\nThese tables are in {output / 'comparison.md'}."))
    if again := [run.name for run, outcome in outcomes.items() if outcome is not None and not outcome.final]:
        show(f"{len(again)} runs failed, the first {again[0]}; the same command tries them again")
    return 1 if again else 0


def _write(path: Path, text: str) -> None:
    with replacing(path, shared=True) as file:
        file.write(text.encode())


def _recorded(path: Path, runs: Sequence[PlannedRun]) -> tuple[Outcomes, Curves]:
    """From a curves.jsonl alone. A run whose last evaluation is not of its last step has failed."""
    rows = list(read_rows(path, "arm", "seed", "lr", *UNITS))
    of = {run: [row for row in rows if (row["arm"], row["seed"], row["lr"]) == run.key] for run in runs}
    ended = {True: RunOutcome(0, "finished"), False: RunOutcome(1, "ended early")}
    return {run: ended[its[-1]["step"] == run.config.trainer.steps] if its else None for run, its in of.items()}, of


def read_curve(run: PlannedRun) -> list[dict[str, Any]]:
    """One row for each evaluation so far: the run's cost until then, and the evaluation's metrics.

    `rollouts` counts every rollout that was requested, including those of dropped groups and those that were aborted,
    failed or rejected. `tokens` counts the tokens of all responses that arrived. `seconds` is the time of the steps
    without evaluations and saves. Raises ValueError (path:line) for a broken line.
    """
    total: Sequence[float] = (0, 0, 0.0)
    costs = {0: total}
    keys = ("rollout/requested", "rollout/response_tokens", "time/step", "time/evaluate", "time/save")
    for row in read_rows(run.folder / "metrics.jsonl", "step", *keys):
        rollouts, tokens, seconds, *between = (row[key] for key in keys)
        costs[row["step"]] = total = tuple(map(add, total, (rollouts, tokens, seconds - sum(between))))
    named = dict(zip(("arm", "seed", "lr"), run.key, strict=True))
    return [
        {**named, "step": each["step"], **dict(zip(UNITS, costs[each["step"]], strict=True)), **each}
        for each in read_rows(run.folder / "evaluations.jsonl", "step")
        if each["step"] in costs  # else the run was killed before it wrote the step's metrics
    ]


def arrays(spec: Spec, seeds: Sequence[int], outcomes: Outcomes, curves: Curves) -> dict[str, Arm]:
    """The scores and costs of the arms' runs of `seeds`. Raises ValueError where a finished run lacks evaluations of
    the metric, or where not all evaluations had the same problems."""
    longest = max(2, *(len(rows) for rows in curves.values()))
    arms = {}
    for name in spec.arms:
        scores = np.full((len(spec.rates(name)), len(seeds), longest), np.nan)
        arms[name] = Arm(scores, np.zeros((*scores.shape, len(UNITS))), np.zeros(scores.shape[:2], bool))
    scored: dict[str | None, PlannedRun] = {}  # a run by each `eval/of`
    for run, outcome in outcomes.items():
        if outcome is None or run.seed not in seeds:
            continue
        for row in curves[run]:
            scored.setdefault(row.get("eval/of"), run)
        if len(scored) > 1:
            one, other, *_ = scored.values()
            where = one.folder if one is other else f"{one.folder} and {other.folder}"
            raise InputError(
                f"{where}: scores of different problems (eval.data, the tokenizer or the chat template changed in "
                "between); remove the folder and the .json file of each run with outdated scores, and start again"
            )
        arm, rows = arms[run.arm], curves[run]
        place = spec.rates(run.arm).index(run.rate), seeds.index(run.seed)
        arm.failed[place] = not outcome.finished
        if outcome.finished and (len(rows) < 2 or not all(spec.metric in row for row in rows)):
            raise InputError(
                f"{run.folder}: finished without evaluations of {spec.metric} before and after; remove that folder "
                f"and {run.outcome_file}, and start again"
            )
        for e, row in enumerate(rows):
            arm.scores[place][e] = row.get(spec.metric, np.nan)
            arm.costs[place][e] = [row[unit] for unit in UNITS]
    return arms


def as_markdown(spec: Spec, seeds: Sequence[int], arms: Mapping[str, Arm], found: Findings, outcomes: Outcomes) -> str:
    """The text of comparison.md."""
    control, many = spec.control, f"{len(seeds)} seed{'s' * (len(seeds) != 1)}"
    compared = {name for name in arms if name != control and len(seeds) >= LEAST_SEEDS}
    parts = [f"# Comparison of {', '.join(arms)}: {spec.metric}, {many}", _finals(spec, arms, found, compared)]
    if np.isnan(found.summary.targets).any():
        ended = np.isfinite(found.summary.final[list(arms).index(control)])
        why = "it has gained nothing over its start" if ended else "at every learning rate one of its runs failed"
        parts.append(f"There is no target of {control}'s, and no cost to reach it: {why}.")
    else:
        parts += [_costs(spec, arms, found, compared, share) for share in range(len(SHARES))]
    if not compared:
        parts.append(
            f"No differences and no ratios: {many} of the {LEAST_SEEDS} that an interval over seeds needs at least. "
            "The medians above are of these runs alone."
        )
    lines = "\n".join(f"- {note}" for note in _notes(spec, seeds, arms, outcomes))
    return "\n\n".join([*parts, *([lines] if lines else [])])


def _finals(spec: Spec, arms: Mapping[str, Arm], found: Findings, compared: set[str]) -> str:
    control, summary, printed = spec.control, found.summary, _printed(spec.metric)
    factor, form, unit = printed
    score = f"{spec.metric}{unit and ', %'}{' (95 %)' if compared else ''}"
    rows = [["arm", "runs failed", "learning rate", score, f"minus {control}{unit and ', points'} (95 %)"]]
    for a, (name, arm) in enumerate(arms.items()):
        difference = _interval(factor * found.difference[name], f"+{form}", "-") if name in compared else "-"
        failed, rate = f"{arm.failed.sum()} of {arm.failed.size}", spec.rates(name)[summary.final_rate[a]]
        known = compared and np.isfinite(summary.final[a])
        final = _interval(factor * found.final[name], form) if known else _score(summary.final[a], factor, form)
        rows.append([name, failed, f"{rate:g}", final, difference])
    note = f"Mean over the seeds, each arm at its best learning rate (highest {spec.metric}). Score before training: "
    return f"## Final scores\n\n{note}{_score(summary.start, *printed)}.\n\n{markdown(rows)}"


def _costs(spec: Spec, arms: Mapping[str, Arm], found: Findings, compared: set[str], q: int) -> str:
    control, target = spec.control, found.summary.targets[q]
    score = _score(target, *_printed(spec.metric))
    rows = [["arm", "never reached it", *(c for unit in UNITS for c in (unit, f"to {control}'s (95 %)"))]]
    for a, (name, arm) in enumerate(arms.items()):
        costs, best = found.summary.cost[a, q], found.summary.cost_rate[a, q]
        never = np.isinf(cost_to(arm, target)[best[0], :, 0]).sum()
        cells = [name, f"{never} of {arm.failed.shape[1]}"]
        for u, cost in enumerate(costs):
            amount = f"{cost:,.0f}" if cost >= 100 else f"{cost:.3g}"
            cells.append(f"{amount} at {spec.rates(name)[best[u]]:g}" if np.isfinite(cost) else "never")
            cells.append(_interval(found.ratio[name][q, u], ".2f") if name in compared else "-")
        rows.append(cells)
    return (
        f"## Cost of {SHARE_NAMES[SHARES[q]]} of {control}'s gain\n\nTo a score of {score}: the median "
        "over the seeds, at the learning rate where it is least; infinite at one where the run of a seed failed.\n\n"
        f"{markdown(rows)}"
    )


def _printed(metric: str) -> tuple[float, str, str]:
    """(factor, format, unit): a share is printed in percent."""
    return (100, ".1f", " %") if metric.startswith("eval/pass@") else (1, ".3g", "")


def _score(value: float, factor: float, form: str, unit: str = "") -> str:
    return f"{factor * value:{form}}{unit}" if np.isfinite(value) else "-"


def _interval(estimate: np.ndarray, form: str, infinite: str = "never") -> str:
    """The text "value (low to high)", also with infinite ends."""
    value, low, high = estimate
    if not np.isfinite(value):
        return "-" if np.isnan(value) else infinite
    return f"{value:{form}} ({low:{form}} to {high:{form}})"


def _notes(spec: Spec, seeds: Sequence[int], arms: Mapping[str, Arm], outcomes: Outcomes) -> list[str]:
    """Remarks on the runs: missing seeds and failures."""
    lines = []
    if left := [seed for seed in spec.seeds if seed not in seeds]:
        ended = sum(outcome is not None for outcome in outcomes.values())
        lines.append(f"{ended} of {len(outcomes)} runs have ended; left out: seeds {', '.join(map(str, left))}")
    for name, arm in arms.items():
        failed = zip(spec.rates(name), arm.failed.sum(axis=1), strict=True)
        if by_rate := ", ".join(f"{count} at {rate:g}" for rate, count in failed if count):
            failures = f"{arm.failed.sum()} of {arm.failed.size} runs failed"
            lines.append(f"**{name}: {failures}** (by learning rate: {by_rate})")
    why = Counter(o.said for o in outcomes.values() if o is not None and not o.finished)
    return lines + [f"{count} run{'s' * (count > 1)} ended with: {line}" for line, count in why.most_common(5)]
