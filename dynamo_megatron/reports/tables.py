"""The tables and findings of one or several runs: the sections of report.md, which report.html shows too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dynamo_megatron.config.files import identity
from dynamo_megatron.evaluation.estimates import Interval, paired_bootstrap
from dynamo_megatron.evaluation.results import align, in_percent, problem_pass_at_k, read_results, results_file
from dynamo_megatron.reports.figures import moving_average, rate_classes
from dynamo_megatron.reports.run_record import Revisits, RunRecord

WINDOW = 5  # steps whose mean is a run's beginning, and its end
METRICS = (  # name in the table, key of metrics.jsonl, format
    ("reward", "reward/mean", ".3f"),
    ("solved, share of rollouts", "reward/success", ".3f"),
    ("policy entropy, nats per token", "policy/entropy", ".3f"),
    ("response length, tokens", "rollout/response_length_mean", ".1f"),
    ("gradient norm", "policy/grad_norm", ".3f"),
    ("largest logprob gap to the server, nats", "rollout/logprob_gap_max", ".1e"),
    ("seconds per step", "time/step", ".2f"),
)
FEWEST, ENDS = 20, 10  # steps that a finding needs; the beginning and the end of a run are means over ENDS steps


class Section(NamedTuple):
    title: str
    text: str
    rows: Sequence[Sequence[str]] = ()  # the first is the head; empty: no table


def sections(runs: Mapping[str, RunRecord], revisits: Mapping[str, Revisits]) -> list[Section]:
    """`revisits`: of the runs whose rollouts are there."""
    found = [_runs(runs), _held_out(runs), _findings(runs), _training(runs)]
    found += [_rollouts(name, seen) for name, seen in revisits.items()]
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
    if len(runs) == 1:
        (run,) = runs.values()
        ends = run.evaluations[:1] + run.evaluations[1:][-1:]
        sides = {f"step {evaluation['step']}": (run, evaluation) for evaluation in ends}
    else:
        sides = {name: (run, run.evaluations[-1]) for name, run in runs.items() if run.evaluations}
    first, *others = sides
    head = ["%", first]
    for name in others:
        head += [name, f"{name} - {first}"]
    rows = [head]
    for each in k:
        cells = [_pass(sides[first][1], each)]
        for name in others:
            cells += [_pass(sides[name][1], each), _difference(sides[first], sides[name], each)]
        rows.append([f"pass@{each}", *cells])
    text = (
        "pass@k is the chance that at least one of k responses is right, with its 95 % interval over the problems; a "
        "difference is of the same problems, - where the two evaluations have other ones. An interval does not cover "
        "what another seed would change."
    )
    return Section(title, text, rows)


def _pass(evaluation: Mapping[str, Any], k: int) -> str:
    name = f"eval/pass@{k}"
    if name not in evaluation:
        return "-"
    return in_percent(Interval(evaluation[name], evaluation[f"{name}_low"], evaluation[f"{name}_high"]))


def _difference(first: tuple[RunRecord, Any], other: tuple[RunRecord, Any], k: int) -> str:
    if any(f"eval/pass@{k}" not in evaluation for _, evaluation in (first, other)):
        return "-"
    files = [results_file(run.folder, evaluation["step"]) for run, evaluation in (first, other)]
    if not all(file.is_file() for file in files):
        return "-"
    results = [read_results(file) for file in files]
    if {r.prompt_id for r in results[0]} != {r.prompt_id for r in results[1]}:
        return "-"
    passes = [problem_pass_at_k(each, k) for each in align(*results)]
    return in_percent(paired_bootstrap(*passes), sign="+")


def _training(runs: Mapping[str, RunRecord]) -> Section:
    """Means at the beginning and the end of each run."""
    head, columns = ["mean of steps"], []
    for name, run in runs.items():
        last = int(run.steps[-1])
        for end in dict.fromkeys((min(WINDOW, last), last)):
            window = (run.steps > end - WINDOW) & (run.steps <= end)
            head.append(f"{name}: {run.steps[window][0]} to {end}")
            columns.append((run, window))
    rows = [head]
    for name, key, form in METRICS:
        values = [run.series(key)[window] for run, window in columns]
        rows.append([name, *("-" if np.isnan(each).any() else f"{each.mean():{form}}" for each in values)])
    return Section("Training", "Each figure is a mean over steps; - where one of them has no value.", rows)


def _rollouts(name: str, seen: Revisits) -> Section:
    title, rates, given = f"Rollouts by difficulty: {name}", seen.success_rates, seen.rollouts
    if not len(given):
        return Section(title, "No prompt has been visited a second time yet.")
    rows = [["success rate over all earlier visits", "visits", "mean rollouts", "share of the rollouts", "even split"]]
    for label, members in rate_classes(rates).items():
        mean = f"{given[members].mean():.2f}" if members.any() else "-"
        share = f"{given[members].sum() / given.sum():.1%}"
        rows.append([label, str(members.sum()), mean, share, f"{members.mean():.1%}"])
    text = (
        f"A visit is a step that draws the prompt. The {seen.first_visits} visits to prompts without earlier rollouts "
        f"are left out. An even split gives {seen.uniform:.2f} rollouts to every prompt."
    )
    return Section(title, text, rows)


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
    rows = [["check", "run", "result", "numbers"]]
    for name, run in runs.items():
        for check in (_entropy, _length, _gap, _damped):
            title, warns, numbers = check(run)
            rows.append([title, name, "not measured" if warns is None else "WARNING" if warns else "fine", numbers])
    return Section("Findings", f"First and last are means over {ENDS} steps; a check needs {FEWEST} steps.", rows)


Found = tuple[str, bool | None, str]  # the check; does it warn (None: not measured); the numbers behind it


def _ends(run: RunRecord, key: str) -> tuple[float, float]:
    """The metric's mean over the first and over the last ENDS steps that have it; NaN where too few have it."""
    values = run.series(key)
    values = values[np.isfinite(values)]
    return (values[:ENDS].mean(), values[-ENDS:].mean()) if len(values) >= FEWEST else (np.nan, np.nan)


def _entropy(run: RunRecord) -> Found:
    first, last = _ends(run, "policy/entropy")
    said = f"policy/entropy {first:.3g} -> {last:.3g} nats per token; a warning below a quarter of the beginning"
    return "entropy collapse", None if np.isnan(first) else bool(last < 0.25 * first), said


def _length(run: RunRecord) -> Found:
    keys = ("reward/mean", "rollout/response_length_mean")
    reward, length = (_ends(run, key) for key in keys)
    smooth = np.array([moving_average(run.series(key), ENDS + 1) for key in keys])
    smooth = smooth[:, np.isfinite(smooth).all(axis=0)]
    if smooth.shape[1] < FEWEST:
        return "reward by length", None, ""
    together = float(np.corrcoef(smooth)[0, 1]) if (smooth.std(axis=1) > 0).all() else 0.0
    warns = length[1] > 1.2 * length[0] and reward[1] > reward[0] and together > 0.8
    said = (
        f"reward {reward[0]:.3g} -> {reward[1]:.3g}, length {length[0]:.4g} -> {length[1]:.4g} tokens, correlation "
        f"{together:.2f}; a warning where the length grows by a fifth with the reward and a correlation above 0.8"
    )
    return "reward by length", bool(warns), said


def _gap(run: RunRecord) -> Found:
    first, last = _ends(run, "rollout/logprob_gap_mean")
    said = f"{first:.2g} -> {last:.2g} nats on average; a warning above 3 times the beginning and 0.001 nats"
    return "gap between policy and engine", None if np.isnan(first) else bool(last > max(1e-3, 3 * first)), said


def _damped(run: RunRecord) -> Found:
    shares = run.series("policy/damped_share")
    shares = shares[np.isfinite(shares)]
    if run.config["algorithm"].get("modulation") is None or len(shares) < FEWEST:
        return "modulation that damps nothing", None, ""
    said = f"damped at {(shares > 0).sum()} of {len(shares)} steps; a warning at none"
    return "modulation that damps nothing", not shares.any(), said
