"""Pairs of responses of two runs to the same prompt, for a person to read and mark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dynamo_megatron.evaluation.results import read_results, results_file
from dynamo_megatron.reports.page.rollouts import MOST_TEXT
from dynamo_megatron.reports.run_record import RunRecord
from dynamo_megatron.types import ProblemResult

PAIRS = 200


def pairs(runs: Mapping[str, RunRecord], views: Mapping[str, Sequence[dict[str, Any]]], most_bytes: int) -> list[dict]:
    """Of the first two of `runs`: the first responses to held-out problems of their last evaluations, or where they
    share none, shown rollouts (`views`, as `rollout_view`) of the same prompt; at most PAIRS, evenly spaced.

    Each has `prompt_id`, `prompt` and `sides`: two of run, step, response, reward, success. Prompts without a text, and
    pairs of equal responses, of which none is preferred, are left out, and so are those whose texts are too long to be
    given whole: a cut response must not become a preference."""
    names = list(runs)[:2]
    if len(names) < 2:
        return []
    sides = [_of_evaluation(runs[name]) for name in names]
    if not set(sides[0]) & set(sides[1]):
        sides = [_of_rollouts(views[name]) for name in names]
    found = []
    for prompt_id in sorted(set(sides[0]) & set(sides[1])):
        (prompt, first), (_, second) = (side[prompt_id] for side in sides)
        short = max(len(text) for text in (prompt, first["response"], second["response"])) < MOST_TEXT
        if prompt and short and first["response"] != second["response"]:
            two = [{"run": name, **side} for name, side in zip(names, (first, second), strict=True)]
            found.append({"prompt_id": prompt_id, "prompt": prompt, "sides": two})
    places = sorted(set(np.linspace(0, len(found) - 1, PAIRS).round().astype(int).tolist())) if found else []
    kept, size = [], 0
    for pair in (found[i] for i in places):
        size += 6 * (len(pair["prompt"]) + sum(len(side["response"]) for side in pair["sides"]))  # JSON's longest
        if size > most_bytes:
            break
        kept.append(pair)
    return kept


Side = tuple[str, dict[str, Any]]  # the prompt's text; step, response, reward, success


def _of_evaluation(run: RunRecord) -> dict[str, Side]:
    """By prompt_id; nothing without an evaluation or its file."""
    if not run.evaluations:
        return {}
    step = run.evaluations[-1]["step"]
    file = results_file(run.folder, step)
    results = read_results(file) if file.is_file() else []
    return {r.prompt_id: _side(r, step) for r in results if r.prompt and r.responses}


def _side(result: ProblemResult, step: int) -> Side:
    success = result.successes[0] and result.statuses[0] == "ok"
    text = {"response": result.responses[0], "reward": result.rewards[0], "success": success}
    return result.prompt or "", {"step": step, **text}


def _of_rollouts(views: Sequence[dict[str, Any]]) -> dict[str, Side]:
    """The newest of each prompt."""
    keys = ("step", "response", "reward", "success")
    newest = sorted((v for v in views if v["status"] == "ok"), key=lambda v: v["step"])
    return {v["prompt_id"]: (v["prompt"], {key: v[key] for key in keys}) for v in newest}
