"""Scores of several models on several evaluation sets, as plain data and in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dynamo_megatron.errors import InputError
from dynamo_megatron.evaluation.estimates import Interval, average_bootstrap
from dynamo_megatron.evaluation.results import in_percent, markdown, problem_pass_at_k, summarise
from dynamo_megatron.types import ProblemResult

TABLE = ("aime24", "aime25", "amc23", "math500", "minerva", "olympiad")  # of the table in arXiv 2602.19208
AVERAGE = "average"  # the column with the mean of the sets' figures; each set has the same weight


class SetScores(NamedTuple):
    """A model's scores on one set, without its responses; problems are in the set's order."""

    passes: dict[int, np.ndarray]  # k -> pass@k of every problem, float64 [N]
    summary: dict[str, float]  # from `summarise`


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


def set_scores(results: Sequence[ProblemResult], k: Sequence[int]) -> SetScores:
    """The scores of one model on one set. Raises ValueError as `summarise`."""
    return SetScores({each: problem_pass_at_k(results, each) for each in k}, summarise(results, k))


def suite_summary(scores: Scores, k: Sequence[int]) -> dict[str, Any]:
    """Plain data with two keys. `models`: for each model the figures of its `sets` (`summarise`), and the `average` of
    pass@k over the sets. `differences`: pass@k of each other model less that of the first, in the same form, paired by
    problem. Intervals are 95 %, over the problems of each set."""
    first, *others = scores
    return {
        "models": {
            model: {"sets": {name: s.summary for name, s in sets.items()}, AVERAGE: _figures(sets.values(), k)}
            for model, sets in scores.items()
        },
        "differences": {
            model: {
                "sets": {name: _figures([s], k, [scores[first][name]]) for name, s in scores[model].items()},
                AVERAGE: _figures(scores[model].values(), k, scores[first].values()),
            }
            for model in others
        },
    }


def _figures(
    sets: Iterable[SetScores], k: Sequence[int], reference: Iterable[SetScores] | None = None
) -> dict[str, float]:
    """pass@k averaged over `sets`, less that of `reference` if there is one, and the ends of the interval."""
    found: dict[str, float] = {}
    for each in k:
        values, least = [scores.passes[each] for scores in sets], 0.0
        if reference is not None:
            values = [ours - base.passes[each] for ours, base in zip(values, reference, strict=True)]
            least = -1.0
        ends = zip(("", "_low", "_high"), average_bootstrap(values, least=least), strict=True)
        found |= {f"eval/pass@{each}{end}": value for end, value in ends}
    return found


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
        for model, found in models.items():
            rows.append([model, *(in_percent(_interval(x, each)) for x in _columns(found))])
        for model, found in differences.items():
            cells = (in_percent(_interval(x, each), sign="+") for x in _columns(found))
            rows.append([f"{model} - {first}, points", *cells])
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


def _interval(figures: Mapping[str, float], k: int) -> Interval:
    return Interval(*(figures[f"eval/pass@{k}{end}"] for end in ("", "_low", "_high")))
