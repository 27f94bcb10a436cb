"""The responses of evaluations: their files, pass@k with intervals over the problems, and tables of several models on
several sets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from dynamo_megatron.errors import InputError
from dynamo_megatron.runtime.whole_files import replacing
from dynamo_megatron.types import ProblemResult

TABLE = ("aime24", "aime25", "amc23", "math500", "minerva", "olympiad")  # of the table in arXiv 2602.19208
AVERAGE = "average"  # the column with the mean of the sets' figures; each set has the same weight
RESAMPLES, LEVEL = 2000, 0.95  # of every interval
ENDS = ("", "_low", "_high")  # of the names of a figure and its interval's ends


def results_file(folder: Path, step: int) -> Path:
    """`folder`: a run's output folder; `step` 0 is before training."""
    return folder / "eval" / f"step-{step:06d}.jsonl"


def write_results(path: Path, results: Sequence[ProblemResult]) -> None:
    """Writes one line per problem. The file appears when complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.writelines(f"{result.to_json()}\n".encode() for result in results)


def read_results(path: Path) -> list[ProblemResult]:
    """The results in the file `path`. Raises ValueError where it does not exist, and (path:line) for a line that is not
    a result."""
    if not path.is_file():
        raise InputError(f"{path}: no such file; it holds the responses of an evaluation")
    results = []
    for number, line in enumerate(path.read_bytes().removesuffix(b"\n").split(b"\n"), 1):
        try:
            results.append(ProblemResult.from_json(line.decode()))
        except ValueError as error:
            raise InputError(f"{path}:{number}: {error}") from None
    return results


# pass@k and intervals over problems


class Interval(NamedTuple):
    mean: float
    low: float
    high: float


def pass_at_k(samples: ArrayLike, successes: ArrayLike, k: int) -> np.ndarray:
    """Unbiased estimate of the probability that at least one of `k` responses to a problem is right, float64 [N].

    The estimate is 1 - C(n - c, k) / C(n, k) for c `successes` among n `samples`, int [N] each (arXiv 2107.03374).
    Raises ValueError naming an entry that does not satisfy 0 <= c <= n and 1 <= k <= n.
    """
    n, c = np.asarray(samples), np.asarray(successes)
    if (bad := np.flatnonzero((c < 0) | (c > n))).size:
        raise ValueError(f"successes: entry {bad[0]} is {c[bad[0]]} of {n[bad[0]]} samples")
    if k < 1 or (n < k).any():
        few = f"entry {np.argmax(n < k)} has {n[n < k][0]} samples" if (n < k).any() else "k is at least 1"
        raise ValueError(f"k: pass@{k} cannot be had, {few}")
    drawn = np.arange(k)
    # A product of k ratios, since the binomials would overflow. It is 0 where fewer than k responses are wrong.
    all_wrong = np.prod(((n - c)[:, None] - drawn) / (n[:, None] - drawn), axis=1)
    return 1.0 - all_wrong


def average_bootstrap(sets: Sequence[ArrayLike], *, least: float = 0.0) -> Interval:
    """The mean of the means of `sets`, float [N_s] each, one value per problem, from `least` to 1. Each set has the
    same weight.

    The interval is a percentile bootstrap: a resample draws each set's problems from that set. It says nothing of a set
    whose values are all equal. Another problem has another value with a probability of up to Wilson's bound for 0 of
    N_s; that widens the interval. Of problems that are all wrong, or all right, it is Wilson's interval. The same
    values give the same interval. Raises ValueError where there are no sets, or a set has no values.
    """
    values = [np.asarray(x, np.float64) for x in sets]
    if not values or not all(x.size for x in values):
        raise ValueError("values: no problems, so no mean and no interval")
    generator = np.random.default_rng(0)
    # One resample at a time: all indices at once would take RESAMPLES * N * 8 bytes.
    means = [np.mean([x[generator.integers(x.size, size=x.size)].mean() for x in values]) for _ in range(RESAMPLES)]
    mean = float(np.mean([x.mean() for x in values]))
    ends = mean - np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    for x in values:
        if np.ptp(x) < 1e-9:
            other = z**2 / (x.size + z**2)
            ends = np.copysign(np.hypot(ends, other * (x[0] - [least, 1.0]) / len(values)), [1.0, -1.0])
    return Interval(mean, *(mean - ends).tolist())


def paired_bootstrap(before: ArrayLike, after: ArrayLike) -> Interval:
    """`average_bootstrap` of after - before, float [N] each, where entry i of both belongs to the same problem.

    Raises ValueError where the two differ in length or are empty.
    """
    x, y = np.asarray(before, np.float64), np.asarray(after, np.float64)
    if x.shape != y.shape:
        raise ValueError(f"after: {y.size} entries, before has {x.size}; give one of each a problem")
    return average_bootstrap([y - x], least=-1.0)


def problem_pass_at_k(results: Sequence[ProblemResult], k: int) -> np.ndarray:
    """pass@k of every problem, float64 [N]. Raises ValueError as `pass_at_k`."""
    return pass_at_k([len(r.successes) for r in results], [r.right for r in results], k)


def summarise(results: Sequence[ProblemResult], k: Sequence[int]) -> dict[str, float]:
    """The metrics of one evaluation, as plain data. Intervals are 95 %, over problems.

    `eval/samples` counts all responses. `eval/length_mean` is in tokens. pass@k, truncated and failed are fractions.
    Raises ValueError where there are no problems, or a problem has fewer than k samples.
    """
    if not results:
        raise InputError("results: no problems were evaluated")
    return {
        "eval/problems": len(results),
        "eval/samples": sum(len(r.successes) for r in results),
        **_figures({each: [problem_pass_at_k(results, each)] for each in k}),
        "eval/reward": float(np.mean([reward for r in results for reward in r.rewards])),
        "eval/length_mean": float(np.mean([length for r in results for length in r.lengths])),
        "eval/truncated": float(np.mean([reason == "length" for r in results for reason in r.finish_reasons])),
        "eval/failed": float(np.mean([status != "ok" for r in results for status in r.statuses])),
    }


def summary_k(summary: Mapping[str, float]) -> list[int]:
    """The k of every pass@k in a summary, ascending."""
    return sorted(int(found[1]) for key in summary if (found := re.fullmatch(r"eval/pass@(\d+)", key)))


def in_percent(interval: Interval, sign: str = "") -> str:
    """The text of `interval`, whose numbers are fractions, in percent; with `sign` "+" all numbers have a sign."""
    mean, low, high = (f"{100 * x:{sign}.1f}" for x in interval)
    return f"{mean} ({low} to {high})"


def pass_text(figures: Mapping[str, float], k: int, sign: str = "") -> str:
    """pass@k of an evaluation's `figures` as `in_percent`; "-" if they have none."""
    names = [f"eval/pass@{k}{end}" for end in ENDS]
    return in_percent(Interval(*(figures[name] for name in names)), sign) if names[0] in figures else "-"


def markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """The table of `rows`, of which the first is the head."""
    head, *others = rows
    return "\n".join(map(markdown_row, [head, ["---"] + ["---:"] * (len(head) - 1), *others]))


# Several models on several sets


class SetScores(NamedTuple):
    """A model's scores on one set, without its responses; problems are in the set's order."""

    passes: dict[int, np.ndarray]  # k -> pass@k of every problem, float64 [N]
    summary: dict[str, float]  # from `summarise`

    @classmethod
    def of(cls, results: Sequence[ProblemResult], k: Sequence[int]) -> SetScores:
        """Raises ValueError as `summarise`."""
        return cls({each: problem_pass_at_k(results, each) for each in k}, summarise(results, k))


Scores = Mapping[str, Mapping[str, SetScores]]  # model -> set -> scores; the same sets for every model


def suite_sets(suite: str, folder: str) -> dict[str, str]:
    """Name -> source of each set of `suite`: "table", or names separated by commas. The source is FOLDER/NAME.jsonl.

    Raises ValueError naming a set that does not exist.
    """
    names = TABLE if suite == "table" else tuple(dict.fromkeys(suite.split(",")))
    for name in names:
        if not name or "/" in name:
            raise InputError(
                f"--suite: {name!r} is no name of a set; give table, or names of files with commas between"
            )
        if not (Path(folder) / f"{name}.jsonl").is_file():
            raise InputError(f"--suite: there is no file {Path(folder) / name}.jsonl; eval.data names the sets' folder")
    return {name: str(Path(folder) / f"{name}.jsonl") for name in names}


def suite_summary(scores: Scores, k: Sequence[int]) -> dict[str, Any]:
    """Plain data with two keys. `models`: for each model the figures of its `sets` (`summarise`), and the `average` of
    pass@k over the sets. `differences`: pass@k of each other model less that of the first, in the same form, paired by
    problem. Intervals are 95 %, over the problems of each set."""
    first, *others = scores
    names = list(scores[first])

    def differences(model: str, sets: Sequence[str]) -> dict[str, float]:
        pairs = [(scores[model][name].passes, scores[first][name].passes) for name in sets]
        return _figures({each: [ours[each] - base[each] for ours, base in pairs] for each in k}, least=-1.0)

    return {
        "models": {
            model: {
                "sets": {name: s.summary for name, s in sets.items()},
                AVERAGE: _figures({each: [s.passes[each] for s in sets.values()] for each in k}),
            }
            for model, sets in scores.items()
        },
        "differences": {
            model: {"sets": {name: differences(model, [name]) for name in names}, AVERAGE: differences(model, names)}
            for model in others
        },
    }


def _figures(passes: Mapping[int, Sequence[np.ndarray]], least: float = 0.0) -> dict[str, float]:
    """The metrics of k -> pass@k of every problem, a set each: the average over the sets and its interval's ends."""
    intervals = {k: average_bootstrap(sets, least=least) for k, sets in passes.items()}
    return {
        f"eval/pass@{k}{end}": x for k, interval in intervals.items() for end, x in zip(ENDS, interval, strict=True)
    }


def suite_table(summary: Mapping[str, Any], k: Sequence[int]) -> str:
    """`suite_summary` in Markdown: for each k a table of models by sets, with the differences from the first model;
    then a table of the responses' lengths, and of the shares that were truncated and that failed."""
    models, differences = summary["models"], summary["differences"]
    first = next(iter(models))
    sets = models[first]["sets"]
    tables = []
    for each in k:
        head = [f"pass@{each}, % (95 %)", *(f"{name} ({figures['eval/problems']})" for name, figures in sets.items())]
        rows = [head + ([AVERAGE] if len(sets) > 1 else [])]
        rows += [[model, *(pass_text(x, each) for x in _columns(found))] for model, found in models.items()]
        for model, found in differences.items():
            rows.append([f"{model} - {first}, points", *(pass_text(x, each, sign="+") for x in _columns(found))])
        tables.append(markdown(rows))
    details = [["", "problems", "samples a problem", "reward", "length, tokens", "truncated, %", "failed, %"]]
    for model, found in models.items():
        for name, s in found["sets"].items():
            shown = [
                f"{s['eval/problems']:.0f}",
                f"{s['eval/samples'] / s['eval/problems']:.3g}",
                f"{s['eval/reward']:.3f}",
                f"{s['eval/length_mean']:.1f}",
                f"{100 * s['eval/truncated']:.1f}",
                f"{100 * s['eval/failed']:.1f}",
            ]
            details.append([f"{model}, {name}", *shown])
    return "\n\n".join([*tables, markdown(details)])


def _columns(found: Mapping[str, Any]) -> list[Mapping[str, float]]:
    """The figures of each set, and of the average where there are several sets."""
    sets = list(found["sets"].values())
    return [*sets, found[AVERAGE]] if len(sets) > 1 else sets
