"""`dynamo-megatron report RUN`: what a run has done so far, in words, tables and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dynamo_megatron.evaluation.results import (
    compare_rows,
    markdown,
    markdown_row,
    read_results,
    results_file,
    summary_k,
    summary_rows,
)
from dynamo_megatron.reports.run_record import Revisits, RunRecord, read_revisits, read_run
from dynamo_megatron.tracking.metrics import lost_steps, read_rows

WINDOW = 5  # steps whose mean is called a run's beginning, and its end
PRICES = ("lowest third", "middle third", "highest third")


def write_report(run: Path, out: Path) -> str:
    """Writes OUT/report.md and OUT/report.png; returns the text. A run that is not finished gets what is there.

    Raises ValueError: not a run's folder, no step in it, or a line of its files that is broken.
    """
    from dynamo_megatron.reports.picture import draw_run  # matplotlib takes a second to import

    record = read_run(run)
    revisits = read_revisits(run)
    parts = [_heading(record), _evaluation(record), _allocation(revisits), *_prices(record)]
    text = "\n\n".join([*parts, _course(record)])
    picture = out / "report.png"
    out.mkdir(parents=True, exist_ok=True)
    draw_run(record, revisits, picture)
    (out / "report.md").write_text(f"{text}\n\n![the run in three panels]({picture.name})\n", encoding="utf-8")
    return f"{text}\n\nThis text is in {out / 'report.md'}, the picture in {picture}."


def rate_classes(rate: np.ndarray) -> dict[str, np.ndarray]:
    """The rows of a table by success rate, float [V]: name -> its members, bool [V]."""
    return {
        "never solved (0)": rate == 0,
        "rarely (below .2)": (rate > 0) & (rate < 0.2),
        "sometimes (.2 to .8)": (rate >= 0.2) & (rate <= 0.8),
        "mostly (above .8)": (rate > 0.8) & (rate < 1),
        "always solved (1)": rate == 1,
    }


def _heading(run: RunRecord) -> str:
    config, last = run.config, run.metrics[-1]
    lost = lost_steps(run.folder / "metrics.jsonl", last["step"])
    return (
        f"# Report of {run.folder}\n\n"
        f"{config['model']['path']} trained on {config['data']['source']}, "
        f"allocation {config['algorithm']['allocation']['kind']}: "
        f"{last['step']} of {config['trainer']['steps']} steps, in pass {last['data/epoch'] + 1} over the problems."
        + (f" metrics.jsonl has no line of these steps: {lost}. The curves have a gap there." if lost else "")
    )


def before_and_after(run: RunRecord) -> tuple[str, list[list[str]]]:
    """The first and the last evaluation: a sentence, and the rows of a table, the first of them its head."""
    if not run.evaluations:
        return "This run has no evaluation (`eval.data` and `eval.every` in the config ask for one).", []
    first, last = run.evaluations[0], run.evaluations[-1]
    if first is last:
        return "There is one evaluation so far.", _summaries([first])
    files = [results_file(run.folder, evaluation["step"]) for evaluation in (first, last)]
    k = sorted(set(summary_k(first)) & set(summary_k(last)))
    if k and all(file.is_file() for file in files):
        before, after = (read_results(file) for file in files)
        if {r.prompt_id for r in before} == {r.prompt_id for r in after}:
            return (
                f"Before is step {first['step']}, after is step {last['step']}; pass@k is the chance that at least one "
                "of k responses is right. The 95 % interval is over the problems.",
                compare_rows(before, after, k),
            )
    why = "The first and the last evaluation cannot be paired: problems or k differ, or a file of eval/ is missing."
    return why, _summaries([first, last])


def _evaluation(run: RunRecord) -> str:
    said, rows = before_and_after(run)
    return "\n\n".join(["## Held-out problems before and after", said, *([markdown(rows)] if rows else [])])


def _summaries(evaluations: list[dict]) -> list[list[str]]:
    k = sorted({each for evaluation in evaluations for each in summary_k(evaluation)})
    return summary_rows([(f"step {evaluation['step']}", evaluation) for evaluation in evaluations], k)


def _allocation(revisits: Revisits | None) -> str:
    title = "## Rollouts by what a problem has shown before"
    if revisits is None:
        return f"{title}\n\nThe folder lacks the rollouts of a step, and with them what problems have shown."
    if not len(revisits.rollouts):
        return f"{title}\n\nNo problem has been visited a second time yet."
    rate, given = revisits.success_rates, revisits.rollouts
    classes = rate_classes(rate)
    lines = [
        markdown_row(["success rate over all earlier visits", "visits", "mean rollouts given"]),
        markdown_row(["---", "---:", "---:"]),
    ]
    for name, members in classes.items():
        mean = f"{given[members].mean():.2f}" if members.any() else "-"
        lines.append(markdown_row([name, str(members.sum()), mean]))
    sometimes, always = given[classes["sometimes (.2 to .8)"]], given[classes["always solved (1)"]]
    if len(sometimes) and len(always):
        ratio = sometimes.mean() / always.mean()
        said = f"A problem solved sometimes got {ratio:.2f} times the rollouts of one solved always."
    else:
        said = "There is no ratio of sometimes to always: one of them has no visit."
    return (
        f"{title}\n\nA visit is a step that draws the problem. The {revisits.first_visits} visits to problems without "
        f"earlier rollouts are left out. An even split gives every problem {revisits.uniform:.2f} rollouts.\n\n"
        + "\n".join(lines)
        + f"\n\n{said}"
    )


def price_rows(folder: Path) -> list[dict[str, Any]]:
    """Of `cost: tokens`: visits by the expected tokens of a rollout, in thirds, each with means of a visit (`tokens`,
    `rollouts`) and its `share` of all expected tokens. Nothing where allocation.jsonl has no prices."""
    given, prices = [], []
    for row in read_rows(folder / "allocation.jsonl", "step", "n"):
        if "tokens" not in row:
            return []
        given.append(row["n"])
        prices.append(row["tokens"])
    n, tokens = np.array(given, np.float64), np.array(prices, np.float64)
    thirds = zip(PRICES, np.array_split(np.argsort(tokens, kind="stable"), len(PRICES)), strict=True)
    return [
        {
            "class": name,
            "visits": len(members),
            "tokens": float(tokens[members].mean()),
            "rollouts": float(n[members].mean()),
            "share": float((n * tokens)[members].sum() / (n * tokens).sum()),
        }
        for name, members in thirds
        if len(members)
    ]


def _prices(run: RunRecord) -> list[str]:
    """A section, where rollouts have prices."""
    if not (rows := price_rows(run.folder)):
        return []
    lines = [
        markdown_row(["expected tokens of a rollout", "visits", "mean", "mean rollouts given", "share of the tokens"]),
        markdown_row(["---", "---:", "---:", "---:", "---:"]),
    ]
    for row in rows:
        numbers = [str(row["visits"]), f"{row['tokens']:.0f}", f"{row['rollouts']:.2f}", f"{row['share']:.0%}"]
        lines.append(markdown_row([row["class"], *numbers]))
    return [
        "## Rollouts by what one was expected to cost\n\nThe response tokens that the allocator expected of a rollout;"
        " of an agent's episode, those of all its answers.\n\n" + "\n".join(lines)
    ]


def _course(run: RunRecord) -> str:
    window = min(WINDOW, max(1, len(run.metrics) // 2))
    several = f"{window} steps" if window > 1 else "step"
    head = ["mean of the", f"first {several}", f"last {several}"]
    lines = [markdown_row(head), markdown_row(["---", "---:", "---:"])]
    for name, key in (("reward", "reward/mean"), ("policy entropy, nats a token", "policy/entropy")):
        values = run.metric(key)
        lines.append(markdown_row([name, f"{np.mean(values[:window]):.3f}", f"{np.mean(values[-window:]):.3f}"]))
    return (
        "## Beginning and end\n\nReward is the mean over the rollouts of a step, so a problem weighs as much as it has "
        "rollouts. Entropy is how undecided the policy is about the next token (0: not at all).\n\n" + "\n".join(lines)
    )
