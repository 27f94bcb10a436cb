"""The responses of an evaluation: their files, summaries and Markdown tables."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from dynamo_megatron.errors import InputError
from dynamo_megatron.evaluation.estimates import Interval, bootstrap, pass_at_k
from dynamo_megatron.runtime.whole_files import replacing
from dynamo_megatron.types import ProblemResult


def results_file(folder: Path, step: int) -> Path:
    """`folder`: a run's output folder; `step` 0 is before training."""
    return folder / "eval" / f"step-{step:06d}.jsonl"


def write_results(path: Path, results: Sequence[ProblemResult], shared: bool = False) -> None:
    """Writes one line per problem. The file appears when complete; `shared`: several processes may write it at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, shared=shared) as file:
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
    passes = {f"eval/pass@{each}": bootstrap(problem_pass_at_k(results, each)) for each in k}
    return {
        "eval/problems": len(results),
        "eval/samples": sum(len(r.successes) for r in results),
        **{name: interval.mean for name, interval in passes.items()},
        **{f"{name}_low": interval.low for name, interval in passes.items()},
        **{f"{name}_high": interval.high for name, interval in passes.items()},
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


def markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """The table of `rows`, of which the first is the head."""
    head, *others = rows
    return "\n".join(map(markdown_row, [head, ["---"] + ["---:"] * (len(head) - 1), *others]))


def align(*evaluations: Sequence[ProblemResult]) -> list[list[ProblemResult]]:
    """The evaluations with their problems in the order of the first evaluation.

    Raises ValueError naming a problem that is not in all evaluations, or that is in one of them more than once.
    """
    by_id = [{r.prompt_id: r for r in results} for results in evaluations]
    for results, ids in zip(evaluations, by_id, strict=True):
        if len(ids) < len(results):
            ((most, _),) = Counter(r.prompt_id for r in results).most_common(1)
            raise InputError(f"problem {most!r} is more than once in an evaluation")
        if differ := ids.keys() ^ by_id[0].keys():
            raise InputError(f"problem {min(differ)!r} is not in every evaluation; compare those of the same problems")
    return [[ids[prompt_id] for prompt_id in by_id[0]] for ids in by_id]
