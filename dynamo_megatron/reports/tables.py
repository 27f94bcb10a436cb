"""The tables and findings of one or several runs: the sections of report.md, which report.html shows too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dynamo_megatron.config.files import identity
from dynamo_megatron.evaluation.results import (
    in_percent,
    paired_bootstrap,
    pass_text,
    problem_pass_at_k,
    read_results,
    results_file,
)
from dynamo_megatron.reports.figures import moving_average
from dynamo_megatron.reports.run_record import RunRecord

FEWEST, ENDS = 20, 10  # steps that a finding needs; the beginning and the end of a run are means over ENDS steps


class Section(NamedTuple):
    title: str
    text: str
    rows: Sequence[Sequence[str]] = ()  # the first is the head; empty: no table


def sections(runs: Mapping[str, RunRecord]) -> list[Section]:
    found = [_runs(runs), _held_out(runs), _findings(runs)]
    return [*found, *([_settings(runs)] if len(runs) > 1 else [])]


def _runs(runs: Mapping[str, RunRecord]) -> Section:
    rows = [["run", "folder", "model", "data", "allocator", "steps"]]
    for name, run in runs.items():
        config, last = run.config, run.metrics[-1]["step"]
        words = [config["model"]["path"], config["data"]["source"], config["algorithm"]["allocation"]["kind"]]
        rows.append([name, str(run.folder), *map(str, words), f"{last} of {config['trainer']['steps']}"])
    return Section("Runs", "", rows)


def _held_out(runs: Mapping[str, RunRecord]) -> Section:
    """Of one run its first and last evaluation, of several runs their last ones."""
    title = "Held-out problems"
    if not (k := sorted({k for run in runs.values() for k in run.k})):
        return Section(title, "There is no evaluation (`eval.data` and `eval.every` in the config ask for them).")
    steps = ""
    if len(runs) == 1:
        (run,) = runs.values()
        alike = [row for row in run.evaluations if row.get("eval/of") == run.evaluations[-1].get("eval/of")]
        ends = alike[:1] + alike[1:][-1:]  # before them, other problems or another sampling, up to a resume
        sides = {f"step {evaluation['step']}": (run, evaluation) for evaluation in ends}
    else:
        sides = {name: (run, run.evaluations[-1]) for name, run in runs.items() if run.evaluations}
        steps = ", ".join(f"{name} {evaluation['step']}" for name, (_, evaluation) in sides.items())
        steps = f"The evaluations are of these steps: {steps}."
    first, *others = sides
    rows = [["%", first, *(cell for name in others for cell in (name, f"{name} - {first}"))]]
    for each in k:
        cells = [pass_text(sides[first][1], each)]
        for name in others:
            cells += [pass_text(sides[name][1], each), _difference(sides[first], sides[name], each)]
        rows.append([f"pass@{each}", *cells])
    text = (
        "pass@k is the chance that at least one of k responses is right, with its 95 % interval over the problems; a "
        "difference is of the same problems, prompts, sampling and reward, - where the two evaluations have others. An "
        f"interval does not cover what another seed would change. {steps}"
    )
    return Section(title, text, rows)


def _difference(first: tuple[RunRecord, Any], other: tuple[RunRecord, Any], k: int) -> str:
    evaluations = first[1], other[1]
    if len({each.get("eval/of") for each in evaluations}) > 1 or any(f"eval/pass@{k}" not in e for e in evaluations):
        return "-"
    files = [results_file(run.folder, evaluation["step"]) for run, evaluation in (first, other)]
    if not all(file.is_file() for file in files):
        return "-"
    passes = [problem_pass_at_k(read_results(file), k) for file in files]
    return in_percent(paired_bootstrap(*passes), sign="+")


def _settings(runs: Mapping[str, RunRecord]) -> Section:
    flat = [identity(run.config, list(run.config)) for run in runs.values()]
    rows = [["key", *runs]]
    for key in sorted(set().union(*flat) - {"output_dir"}):
        values = [repr(each[key]) if key in each else "-" for each in flat]
        if len(set(values)) > 1:
            rows.append([key, *values])
    return Section("Settings that differ", "" if rows[1:] else "None but output_dir.", rows if rows[1:] else ())


def _findings(runs: Mapping[str, RunRecord]) -> Section:
    """Checks of the metrics with the numbers behind them; a warning asks a person to look."""
    checks = {
        "entropy collapse": _entropy,
        "reward by length": _length,
        "gap between policy and engine": _gap,
        "modulation that damps nothing": _damped,
    }
    rows = [["check", "run", "result", "numbers"]]
    for name, run in runs.items():
        for title, check in checks.items():
            if (found := check(run)) is None:
                rows.append([title, name, "not measured", ""])
            else:
                rows.append([title, name, "WARNING" if found[0] else "fine", found[1]])
    return Section("Findings", f"First and last are means over {ENDS} steps; a check needs {FEWEST} steps.", rows)


Found = tuple[bool, str] | None  # of a check: whether it warns, and the numbers behind it; None: not measured


def _known(run: RunRecord, *keys: str) -> np.ndarray:
    """float64 [keys, n]: the metrics at the n steps that have them all; n = 0 where these are fewer than FEWEST."""
    values = np.array([run.series(key) for key in keys])
    values = values[:, np.isfinite(values).all(axis=0)]
    return values if values.shape[1] >= FEWEST else values[:, :0]


def _entropy(run: RunRecord) -> Found:
    if not (values := _known(run, "policy/entropy")[0]).size:
        return None
    first, last = values[:ENDS].mean(), values[-ENDS:].mean()
    said = f"policy/entropy {first:.3g} -> {last:.3g} nats per token; a warning below a quarter of the beginning"
    return last < 0.25 * first, said


def _length(run: RunRecord) -> Found:
    if not (values := _known(run, "reward/mean", "rollout/response_length_mean")).size:
        return None
    (reward, length), (reward_last, length_last) = values[:, :ENDS].mean(axis=1), values[:, -ENDS:].mean(axis=1)
    smooth = np.array([moving_average(each, ENDS + 1) for each in values])
    together = float(np.corrcoef(smooth)[0, 1]) if (smooth.std(axis=1) > 0).all() else 0.0
    said = (
        f"reward {reward:.3g} -> {reward_last:.3g}, length {length:.4g} -> {length_last:.4g} tokens, correlation "
        f"{together:.2f}; a warning where the length grows by a fifth with the reward and a correlation above 0.8"
    )
    return length_last > 1.2 * length and reward_last > reward and together > 0.8, said


def _gap(run: RunRecord) -> Found:
    if not (values := _known(run, "rollout/logprob_gap_mean")[0]).size:
        return None
    first, last = values[:ENDS].mean(), values[-ENDS:].mean()
    said = f"{first:.2g} -> {last:.2g} nats on average; a warning above 3 times the beginning and 0.001 nats"
    return last > max(1e-3, 3 * first), said


def _damped(run: RunRecord) -> Found:
    shares = _known(run, "policy/damped_share")[0]
    modulation = run.config["algorithm"].get("modulation")
    if modulation is None or modulation["lambda_min"] >= 0.9 or not shares.size:  # a factor below 0.9 counts as damped
        return None
    return not shares.any(), f"damped at {(shares > 0).sum()} of {len(shares)} steps; a warning at none"
