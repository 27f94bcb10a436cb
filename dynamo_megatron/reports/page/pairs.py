"""Pairs of responses of two runs to the same prompt, for a person to read and mark."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dynamo_megatron.evaluation.results import read_results, results_file
from dynamo_megatron.reports.page.curves import number, plain
from dynamo_megatron.reports.page.rollouts import MOST_TEXT
from dynamo_megatron.reports.run_record import RunRecord
from dynamo_megatron.types import ProblemResult

PAIRS = 200


Side = tuple[str, dict[str, Any]]  # the prompt's text; step, response, reward, success


def pairs(
    runs: Mapping[str, RunRecord], views: Mapping[str, Sequence[dict[str, Any]]], most_bytes: int
) -> dict[str, Any]:
    """`shown`: at most PAIRS pairs of the first two of `runs`, evenly spaced. A pair has the first responses of the
    last evaluations to a held-out problem. Where the evaluations share no problem, it has shown rollouts of the same
    prompt (`views`, from `rollout_view`). `other_prompts`: the number of prompt ids that both runs have with different
    texts, which give no pairs.

    Each pair has `key`, a hash of its texts, `prompt_id`, `prompt` and `sides`: run, step, response, reward and success
    of each. Prompts without a text and pairs of equal responses are left out. So are pairs whose texts are too long to
    be shown whole: a person must not judge a cut response."""
    names = list(runs)[:2]
    if len(names) < 2:
        return {"shown": [], "other_prompts": 0}
    sides = [_of_evaluation(runs[name]) for name in names]
    shared, other_prompts = _shared(*sides)
    if not shared:
        sides = [_of_rollouts(views[name]) for name in names]
        shared, more = _shared(*sides)
        other_prompts += more
    found = []
    for prompt_id in shared:
        (prompt, first), (_, second) = (side[prompt_id] for side in sides)
        texts = (prompt, first["response"], second["response"])
        if prompt and max(map(len, texts)) < MOST_TEXT and first["response"] != second["response"]:
            two = [{"run": name, **side} for name, side in zip(names, (first, second), strict=True)]
            found.append({"key": _hash(texts), "prompt_id": prompt_id, "prompt": prompt, "sides": two})
    places = sorted(set(np.linspace(0, len(found) - 1, PAIRS).round().astype(int).tolist())) if found else []
    kept, size = [], 0
    for pair in (found[i] for i in places):
        more = 6 * (len(pair["prompt"]) + sum(len(side["response"]) for side in pair["sides"]))  # JSON's longest
        if size + more <= most_bytes:
            kept.append(pair)
            size += more
    return {"shown": kept, "other_prompts": other_prompts}


def _shared(first: Mapping[str, Side], second: Mapping[str, Side]) -> tuple[list[str], int]:
    """(the prompt ids that both have with the same text, the number of ids that both have with different texts)."""
    both = sorted(set(first) & set(second))
    equal = [prompt_id for prompt_id in both if first[prompt_id][0] == second[prompt_id][0]]
    return equal, len(both) - len(equal)


def _hash(texts: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]


def _of_evaluation(run: RunRecord) -> dict[str, Side]:
    """The sides of a run's last evaluation by prompt_id; empty where there is no evaluation, or its file is missing."""
    if not run.evaluations:
        return {}
    step = run.evaluations[-1]["step"]
    file = results_file(run.folder, step)
    results = read_results(file) if file.is_file() else []
    return {r.prompt_id: _side(r, step) for r in results if r.prompt and r.responses}


def _side(result: ProblemResult, step: int) -> Side:
    success = result.successes[0] and result.statuses[0] == "ok"
    text = {"response": result.responses[0], "reward": plain([number(result.rewards[0])], 6)[0], "success": success}
    return result.prompt or "", {"step": step, **text}


def _of_rollouts(views: Sequence[dict[str, Any]]) -> dict[str, Side]:
    """The newest view of each prompt, by prompt_id."""
    keys = ("step", "response", "reward", "success")
    newest = sorted((v for v in views if v["status"] == "ok"), key=lambda v: v["step"])
    return {v["prompt_id"]: (v["prompt"], {key: v[key] for key in keys}) for v in newest}
