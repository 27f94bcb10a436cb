"""A comparison's runs on disk as curves, arrays, plain data and Markdown tables."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dynamo_megatron.comparison.spec import PlannedRun, RunOutcome, Spec, read_outcome
from dynamo_megatron.comparison.statistics import SHARES, UNITS, Arm, Estimate, Findings, cost_to, find
from dynamo_megatron.config.files import ConfigError
from dynamo_megatron.errors import InputError
from dynamo_megatron.evaluation.results import markdown
from dynamo_megatron.reports.figures import COLOURS, draw, figure, plain
from dynamo_megatron.runtime.plain_text import printable, show
from dynamo_megatron.runtime.whole_files import replacing
from dynamo_megatron.tracking.metrics import read_rows
from dynamo_megatron.tracking.progress import terminal_width, wrapped

BETWEEN = ("time/evaluate", "time/save")  # seconds of a step that are not training
LEAST_SEEDS = 5  # for a ratio and its interval
SHARE_NAMES = {0.5: "half", 0.9: "90 %"}

Curves = Mapping[PlannedRun, Sequence[Mapping[str, Any]]]


def write_comparison(spec: Spec, runs: Sequence[PlannedRun]) -> int:
    """Writes curves.jsonl of all runs, and comparison.md, .json and .png of the seeds whose runs have all ended; prints
    the tables.

    Returns 0, or 1 where a run has failed that might not fail again. Raises ConfigError where files are broken, or no
    seed is complete.
    """
    output = Path(spec.output_dir)
    try:
        outcomes = {run: read_outcome(run) for run in runs}
        curves = {run: read_curve(run) for run in runs}
        output.mkdir(parents=True, exist_ok=True)
        _write(output / "curves.jsonl", "".join(f"{json.dumps(row)}\n" for rows in curves.values() for row in rows))
        missing = {run.seed for run, outcome in outcomes.items() if outcome is None}
        if not (seeds := [seed for seed in spec.seeds if seed not in missing]):
            ended = sum(outcome is not None for outcome in outcomes.values())
            raise InputError(
                f"{output}: {ended} of {len(runs)} runs have ended, and all of no seed; start it without --table"
            )
        arms = arrays(spec, seeds, outcomes, curves)
    except InputError as error:
        raise ConfigError(str(error)) from None
    found = as_plain(spec, seeds, arms, find(arms, spec.control))
    text = as_markdown(found, notes(spec, outcomes, found))
    _write(output / "comparison.json", f"{json.dumps(found, indent=1)}\n")
    _write(output / "comparison.md", f"{text}\n\n![scores over rollouts](comparison.png)\n")
    _draw(spec, seeds, found, curves, output / "comparison.png")
    print(wrapped(printable(f"{text}\n\nThese tables are in {output / 'comparison.md'}."), terminal_width(sys.stdout)))
    again = [run.name for run, outcome in outcomes.items() if outcome is not None and not outcome.final]
    if again:
        show(f"{len(again)} runs failed, the first {again[0]}; the same command tries them again")
    return 1 if again else 0


def _write(path: Path, text: str) -> None:
    with replacing(path, shared=True) as file:
        file.write(text.encode())


def read_curve(run: PlannedRun) -> list[dict[str, Any]]:
    """One row for each evaluation so far: the run's cost until then, and the evaluation's metrics.

    `rollouts` counts every rollout that was requested, including those of dropped groups and those that were aborted,
    failed or rejected. `tokens` counts the tokens of all responses that arrived. `seconds` is the time of the steps
    without evaluations and saves. Steps that were repeated after a kill count once. Raises ValueError (path:line) for a
    broken line.
    """
    total = np.zeros(len(UNITS))
    costs = {0: total}
    keys = ("step", "rollout/requested", "rollout/response_tokens", "time/step", *BETWEEN)
    for row in read_rows(run.folder / "metrics.jsonl", *keys):
        seconds = row["time/step"] - sum(row[key] for key in BETWEEN)
        total = total + np.array([row["rollout/requested"], row["rollout/response_tokens"], seconds])
        costs[row["step"]] = total
    rows = []
    for evaluation in read_rows(run.folder / "evaluations.jsonl", "step"):
        if (step := evaluation["step"]) in costs:  # else the run was killed before it wrote the step's metrics
            rollouts, tokens, seconds = costs[step].tolist()
            cost = {"rollouts": int(rollouts), "tokens": int(tokens), "seconds": seconds}
            rows.append({"arm": run.arm, "seed": run.seed, "lr": run.rate, "step": step, **cost, **evaluation})
    return rows


def arrays(
    spec: Spec, seeds: Sequence[int], outcomes: Mapping[PlannedRun, RunOutcome | None], curves: Curves
) -> dict[str, Arm]:
    """The scores and costs of the arms' runs of `seeds`. Raises ValueError where a finished run lacks evaluations of
    the metric."""
    longest = max(2, *(len(rows) for rows in curves.values()))
    arms = {}
    for name in spec.arms:
        rates = spec.rates(name)
        scores = np.full((len(rates), len(seeds), longest), np.nan)
        costs, failed = np.zeros((*scores.shape, len(UNITS))), np.zeros(scores.shape[:2], bool)
        for run, outcome in outcomes.items():
            if run.arm != name or run.seed not in seeds:
                continue
            place, rows = (rates.index(run.rate), seeds.index(run.seed)), curves[run]
            failed[place] = outcome is None or not outcome.finished
            if not failed[place] and (len(rows) < 2 or not all(spec.metric in row for row in rows)):
                raise InputError(
                    f"{run.folder}: finished without evaluations of {spec.metric} before and after; remove that "
                    f"folder and {run.outcome_file}, and start again"
                )
            for e, row in enumerate(rows):
                scores[place][e] = row.get(spec.metric, np.nan)
                costs[place][e] = [row[unit] for unit in UNITS]
        arms[name] = Arm(scores, costs, failed)
    return arms


def finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def as_plain(spec: Spec, seeds: Sequence[int], arms: Mapping[str, Arm], findings: Findings) -> dict[str, Any]:
    """All content of the tables as plain data that survives JSON. None stands for infinity or a missing value."""
    summary, enough = findings.summary, len(seeds) >= LEAST_SEEDS
    found: dict[str, Any] = {}
    for a, (name, arm) in enumerate(arms.items()):
        rates, compared = spec.rates(name), enough and name != spec.control
        final = {"learning_rate": rates[summary.final_rate[a]], "score": finite(summary.final[a])}
        if compared:
            final["difference"] = _estimate(findings.difference[name])
        costs: dict[str, Any] = {}
        for q, (share, target) in enumerate(zip(SHARES, summary.targets, strict=True)):
            costs[SHARE_NAMES[share]], reached = {}, cost_to(arm, target)
            for u, unit in enumerate(UNITS):
                rate = summary.cost_rate[a, q, u]
                never = int(np.isinf(reached[rate, :, u]).sum())
                cost = {"learning_rate": rates[rate], "median": finite(summary.cost[a, q, u]), "never reached": never}
                if compared:
                    cost["ratio"] = _estimate(findings.ratio[name][q][u])
                costs[SHARE_NAMES[share]][unit] = cost
        by_rate = {f"{rate:g}": int(count) for rate, count in zip(rates, arm.failed.sum(axis=1), strict=True) if count}
        failures = {"ended": int(arm.failed.size), "failed": int(arm.failed.sum()), "failed by rate": by_rate}
        found[name] = {**failures, "final": final, "cost": costs}
    reference = list(arms).index(spec.control)
    return {
        **{"metric": spec.metric, "control": spec.control, "seeds": list(seeds)},
        "seeds left out": [seed for seed in spec.seeds if seed not in seeds],
        "start": finite(summary.start),
        "gain": finite(summary.final[reference] - summary.start),
        "targets": {SHARE_NAMES[s]: finite(t) for s, t in zip(SHARES, summary.targets, strict=True)},
        "ratios": enough,
        "arms": found,
    }


def _estimate(estimate: Estimate) -> dict[str, float | None]:
    return {name: finite(value) for name, value in estimate._asdict().items()}


def as_markdown(found: dict[str, Any], notes: Sequence[str]) -> str:
    """The text of comparison.md without its picture."""
    control, many = found["control"], f"{len(found['seeds'])} seed{'s' * (len(found['seeds']) != 1)}"
    parts = [f"# Comparison of {', '.join(found['arms'])}: {found['metric']}, {many}", _finals(found)]
    if found["targets"]["half"] is None:
        parts.append(f"{control} has gained nothing over its start: there is no target, and no cost to reach it.")
    else:
        parts += [_costs(found, share) for share in found["targets"]]
    if not found["ratios"]:
        parts.append(
            f"No differences and no ratios: {many} of the {LEAST_SEEDS} that an interval over seeds needs at least. "
            "The medians above are of these runs alone."
        )
    return "\n\n".join([*parts, *(["\n".join(f"- {note}" for note in notes)] if notes else [])])


def _finals(found: dict[str, Any]) -> str:
    control = found["control"]
    rows = [["arm", "runs failed", "learning rate", f"{found['metric']}, %", f"minus {control}, points (95 %)"]]
    for name, arm in found["arms"].items():
        final = arm["final"]
        failed, difference = f"{arm['failed']} of {arm['ended']}", _interval(final.get("difference"), "+.1f", 100)
        rows.append([name, failed, f"{final['learning_rate']:g}", _percent(final["score"]), difference])
    note = f"Mean over the seeds at the learning rate of the highest {found['metric']}. {control} starts at "
    return f"## Final scores\n\n{note}{_percent(found['start'])} %.\n\n{markdown(rows)}"


def _costs(found: dict[str, Any], share: str) -> str:
    control, runs = found["control"], len(found["seeds"])
    rows = [["arm", "never reached it", *(c for unit in UNITS for c in (unit, f"to {control}'s (95 %)"))]]
    for name, arm in found["arms"].items():
        costs = arm["cost"][share]
        cells = [name, f"{costs['rollouts']['never reached']} of {runs}"]
        for cost in costs.values():
            median = "never" if cost["median"] is None else f"{_amount(cost['median'])} at {cost['learning_rate']:g}"
            cells += [median, _interval(cost.get("ratio"), ".2f")]
        rows.append(cells)
    note = (
        f"To a score of {_percent(found['targets'][share])} %: the median over the seeds, at the learning rate where "
    )
    return f"## Cost of {share} of {control}'s gain\n\n{note}it is least.\n\n{markdown(rows)}"


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _interval(estimate: dict[str, float | None] | None, form: str, factor: float = 1.0) -> str:
    """The text "value (low to high)", also with infinite ends."""
    if estimate is None:
        return "-"
    if estimate["value"] is None:
        return "never"
    value, low, high = (None if x is None else f"{factor * x:{form}}" for x in estimate.values())
    return f"{value} ({low or '-inf'} to {high or 'inf'})"


def notes(spec: Spec, outcomes: Mapping[PlannedRun, RunOutcome | None], found: dict[str, Any]) -> list[str]:
    """Remarks on the runs: missing seeds, failures, best rates at an end."""
    lines = []
    if left := found["seeds left out"]:
        ended = sum(outcome is not None for outcome in outcomes.values())
        lines.append(f"{ended} of {len(outcomes)} runs have ended; left out: seeds {', '.join(map(str, left))}")
    for name, arm in found["arms"].items():
        rates, best = spec.rates(name), arm["final"]["learning_rate"]
        if arm["failed"]:
            by_rate = ", ".join(f"{count} at {rate}" for rate, count in arm["failed by rate"].items())
            lines.append(f"**{name}: {arm['failed']} of {arm['ended']} runs failed** (by learning rate: {by_rate})")
        if len(rates) > 1 and best in (rates[0], rates[-1]) and arm["final"]["score"] is not None:
            end = "smallest" if best == rates[0] else "largest"
            lines.append(f"{name}: its best final score is at the {end} learning rate, {best:g}; try one beyond it")
    why = Counter(o.said for o in outcomes.values() if o is not None and not o.finished)
    return lines + [f"{count} run{'s' * (count > 1)} ended with: {line}" for line, count in why.most_common(5)]


def _draw(spec: Spec, seeds: Sequence[int], found: dict[str, Any], curves: Curves, path: Path) -> None:
    """Scores over rollouts: the mean over the seeds at the learning rate of the best final score."""
    traces = []
    for a, (name, arm) in enumerate(found["arms"].items()):
        own = [c for run, c in curves.items() if run.arm == name and run.seed in seeds]
        best = [rows for rows in own if rows and rows[0]["lr"] == arm["final"]["learning_rate"]]
        shared = min(map(len, best), default=0)
        x, y = (np.mean([[row[key] for row in c[:shared]] for c in best], axis=0) for key in ("rollouts", spec.metric))
        line = {"color": COLOURS[a % len(COLOURS)], "width": 2}
        traces.append({"x": plain(x), "y": plain(y), "name": name, "mode": "lines+markers", "line": line})
    draw([figure("Evaluation problems, mean over the seeds", spec.metric, traces, x="rollouts")], spec.metric, path)
