"""Reads the files in a run's folder, whether the run has finished or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from dynamo_megatron.config.files import read_yaml
from dynamo_megatron.errors import InputError
from dynamo_megatron.evaluation.results import summary_k
from dynamo_megatron.rollout.store import read_rollouts, step_file
from dynamo_megatron.tracking.metrics import read_rows
from dynamo_megatron.types import NOT_TRAINED


@dataclass(frozen=True)
class RunRecord:
    folder: Path
    config: dict[str, Any]  # config.yaml
    metrics: list[dict[str, Any]]  # one entry per step, at least one
    evaluations: list[dict[str, Any]]  # `step` and the numbers of `summarise`, one entry per evaluation; may be empty

    @property
    def steps(self) -> np.ndarray:
        """The steps' numbers, int64 [steps]."""
        return np.array([m["step"] for m in self.metrics])

    def series(self, key: str) -> np.ndarray:
        """The metric at every step, float64 [steps]; NaN where a step lacks it, or has no finite number."""
        values = [m.get(key) for m in self.metrics]
        found = np.array([v if isinstance(v, int | float) else np.nan for v in values], np.float64)
        return np.where(np.isfinite(found), found, np.nan)

    def pass_at(self, k: int) -> np.ndarray:
        """float64 [evaluations, 4]: step, pass@k and the ends of its interval, for the evaluations that have pass@k
        and are of the last one's problems and sampling."""
        name = f"eval/pass@{k}"
        alike = [e for e in self.evaluations if e.get("eval/of") == self.evaluations[-1].get("eval/of") and name in e]
        rows = [[e["step"], e[name], e[f"{name}_low"], e[f"{name}_high"]] for e in alike]
        return np.array(rows, np.float64).reshape(-1, 4)

    @property
    def k(self) -> list[int]:
        """The k of every pass@k in any evaluation, ascending."""
        return sorted({k for e in self.evaluations for k in summary_k(e)})


@dataclass(frozen=True)
class Revisits:
    """The V visits of problems that already had rollouts. A problem's success rate is the mean over all its rollouts of
    earlier steps that were trained on."""

    success_rates: np.ndarray  # float64 [V]
    rollouts: np.ndarray  # int64 [V], the rollouts that the visit was given
    uniform: float  # rollouts per visit with an even split


def read_run(folder: Path) -> RunRecord:
    """The record of the run in `folder`. Raises ValueError where it is not a run's folder or has no step, and
    (path:line) for a broken line."""
    config = read_config(folder)
    metrics = list(read_rows(folder / "metrics.jsonl", "step"))
    if not metrics:
        raise InputError(f"{folder}: no step in metrics.jsonl; a report needs at least one finished step")
    if "reward/mean" not in metrics[-1]:
        raise InputError(
            f"{folder}: a run of sft or dpo; a report is about one of train (metrics.jsonl has the losses)"
        )
    return RunRecord(folder, config, metrics, list(read_rows(folder / "evaluations.jsonl", "step")))


def read_runs(folders: Sequence[Path]) -> dict[str, RunRecord]:
    """name -> record; a name is the folder's last part where these differ, else the path. Raises ValueError as
    `read_run`, and for a run that is named twice."""
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise InputError("report: a run is named twice; name each run once")
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    return dict(zip(names, map(read_run, folders), strict=True))


def read_config(folder: Path) -> dict[str, Any]:
    """A run's config.yaml. Raises ValueError where there is none."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise InputError(f"{folder}: no config.yaml, so no run's folder; name the output_dir of a run")
    return read_yaml(path, str(path))


def read_revisits(folder: Path) -> Revisits | None:
    """The revisits of the run in `folder`; None where the allocations or their rollouts are not in the folder, as after
    training on another run's recorded rollouts.

    Raises ValueError (path:line) for a broken line.
    """
    rows = read_rows(folder / "allocation.jsonl", "step", "prompt_id", "n")
    again = read_config(folder)["algorithm"].get("sequential") is not None  # rounds of the same prompts
    trials: Counter[str] = Counter()
    successes: Counter[str] = Counter()
    found: list[tuple[float, int]] = []
    visited = asked = 0
    for step, group in groupby(rows, key=lambda row: row["step"]):
        if not (path := step_file(folder, step)).is_file():
            return None
        groups = [(row["prompt_id"], row["n"]) for row in group]
        of_prompt: Counter[str] = Counter()
        for name, n in groups:
            of_prompt[name] += n
        visits = list(of_prompt.items()) if again else groups
        visited, asked = visited + len(visits), asked + sum(n for _, n in visits)
        for name, n in visits:
            if trials[name]:
                found.append((successes[name] / trials[name], n))
        for rollout in read_rollouts(path, routes=False):
            position = int(rollout.group_id.rpartition("-")[2])
            # other positions were left by a killed run with other allocations
            if rollout.status not in NOT_TRAINED and position < len(groups):
                trials[rollout.prompt_id] += 1
                successes[rollout.prompt_id] += rollout.success
    if not visited:
        return None
    rates, given = np.array(found, np.float64).reshape(-1, 2).T
    return Revisits(rates, given.astype(np.int64), asked / visited)
