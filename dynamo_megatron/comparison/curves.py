"""Reads a comparison's runs from disk: how each ended, and its curve with one row per evaluation."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dynamo_megatron.comparison.spec import Run, Spec
from dynamo_megatron.comparison.statistics import UNITS, Arm
from dynamo_megatron.errors import InputError
from dynamo_megatron.runtime.whole_files import replacing
from dynamo_megatron.tracking.metrics import read_rows

NOT_FINITE = "NonFiniteError"  # in the last line of a run that failed with NaN or infinity
BETWEEN = ("time/evaluate", "time/save")  # seconds of a step that are not training


@dataclass(frozen=True)
class Outcome:
    """How a run's process ended: its exit code, and `said`, the last line of its output."""

    code: int
    said: str

    @property
    def finished(self) -> bool:
        return self.code == 0

    @property
    def diverged(self) -> bool:
        """True where the run failed with NaN or infinity, which would happen again."""
        return not self.finished and NOT_FINITE in self.said


def finished(outcome: Outcome | None) -> bool:
    return outcome is not None and outcome.finished


def outcome_file(run: Run) -> Path:
    return run.folder.with_name(f"{run.folder.name}.json")


def console_file(run: Run) -> Path:
    return run.folder.with_name(f"{run.folder.name}.log")


def write_outcome(run: Run, outcome: Outcome) -> None:
    with replacing(outcome_file(run)) as file:
        file.write(json.dumps({"exit code": outcome.code, "said": outcome.said}).encode())


def read_outcome(run: Run) -> Outcome | None:
    """The run's outcome; None where it has not ended, or its folder is gone. Raises ValueError for a broken file."""
    file = outcome_file(run)
    if not (file.is_file() and run.folder.is_dir()):
        return None
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
        return Outcome(read["exit code"], read["said"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file}: not the outcome of a run ({error!r}); remove it, and the run goes on") from None


def to_do(runs: Sequence[Run]) -> list[Run]:
    """The runs that have not ended, or that failed but did not diverge. Raises ValueError as `read_outcome`."""
    outcomes = [(run, read_outcome(run)) for run in runs]
    return [run for run, o in outcomes if o is None or not (o.finished or o.diverged)]


def read_curve(run: Run) -> list[dict[str, Any]]:
    """One row for each evaluation so far: the run's cost until then, and the evaluation's metrics.

    `rollouts` counts every rollout that was requested, including those of dropped groups and those that were aborted,
    failed or rejected. `tokens` counts the tokens of all responses that arrived. `seconds` is the time of the steps
    without evaluations and saves. Steps that were repeated after a kill count once. Raises ValueError (path:line) for a
    broken line.
    """
    total = np.zeros(len(UNITS))
    costs = {0: total}
    for row in read_rows(run.folder / "metrics.jsonl", "step"):
        try:
            seconds = row["time/step"] - sum(row[key] for key in BETWEEN)
            total = total + np.array([row["rollout/requested"], row["rollout/response_tokens"], seconds])
        except KeyError as error:
            raise InputError(f"{run.folder / 'metrics.jsonl'}: step {row['step']} has no {error}") from None
        costs[row["step"]] = total
    rows = []
    for evaluation in read_rows(run.folder / "evaluations.jsonl", "step"):
        if (step := evaluation["step"]) in costs:  # else the run was killed before it wrote the step's metrics
            rollouts, tokens, seconds = costs[step].tolist()
            cost = {"rollouts": int(rollouts), "tokens": int(tokens), "seconds": seconds}
            rows.append({"arm": run.arm, "seed": run.seed, "lr": run.rate, "step": step, **cost, **evaluation})
    return rows


def write_curves(path: Path, curves: Iterable[Sequence[dict[str, Any]]]) -> None:
    """Writes one JSON object per line. Several processes may write the file at once: each writes a whole file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, shared=True) as file:
        file.writelines(f"{json.dumps(row)}\n".encode() for rows in curves for row in rows)


def whole_seeds(spec: Spec, outcomes: dict[Run, Outcome | None]) -> list[int]:
    """The seeds whose runs have all ended, in the spec's order."""
    missing = {run.seed for run, outcome in outcomes.items() if outcome is None}
    return [seed for seed in spec.seeds if seed not in missing]


def arrays(
    spec: Spec, seeds: Sequence[int], outcomes: dict[Run, Outcome | None], curves: dict[Run, list[dict[str, Any]]]
) -> dict[str, Arm]:
    """The scores and costs of the arms' runs of `seeds`. Raises ValueError where a finished run lacks evaluations of
    the metric."""
    by_place = {(run.arm, run.rate, run.seed): run for run in outcomes}
    longest = max(2, *(len(rows) for rows in curves.values()))
    arms = {}
    for name in spec.arms:
        runs = [[by_place[name, rate, seed] for seed in seeds] for rate in spec.rates(name)]
        scores = np.full((len(runs), len(seeds), longest), np.nan)
        costs = np.zeros((*scores.shape, len(UNITS)))
        for r, of_rate in enumerate(runs):
            for s, run in enumerate(of_rate):
                rows = curves[run]
                if finished(outcomes[run]) and (len(rows) < 2 or not all(spec.metric in row for row in rows)):
                    raise InputError(
                        f"{run.folder}: finished without evaluations of {spec.metric} before and after; remove that "
                        f"folder and {outcome_file(run)}, and start again"
                    )
                scores[r, s, : len(rows)] = [row.get(spec.metric, np.nan) for row in rows]
                costs[r, s, : len(rows)] = np.reshape([[row[unit] for unit in UNITS] for row in rows], (-1, len(UNITS)))
        failed = np.array([[not finished(outcomes[run]) for run in of_rate] for of_rate in runs])
        arms[name] = Arm(scores, costs, failed)
    return arms
