"""The rollouts that the page shows: which ones, and what the run's files say of each token."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dynamo_megatron.algorithm.advantages import batch_normalised, group_advantages, overlong_penalty
from dynamo_megatron.config.method import GROUP_ADVANTAGES
from dynamo_megatron.errors import InputError
from dynamo_megatron.reports.page.curves import plain
from dynamo_megatron.reports.page.episodes import episode_view
from dynamo_megatron.reports.page.token_texts import Decode, token_texts
from dynamo_megatron.rollout.store import read_rollouts, step_files, tokens_file
from dynamo_megatron.tracking.token_rows import TokenRow, read_token_rows, response_hash
from dynamo_megatron.types import NOT_TRAINED, Rollout

STEPS = 12  # that rollouts are shown of
EACH = 2  # best, worst, truncated, rejected, ... of a step
LARGEST_GROUP = 16  # rollouts of the group that is shown whole
MOST_TOKENS = 4000  # of a response, that are shown
MOST_TEXT = 20_000  # characters of a prompt or response


@dataclass
class Shown:
    """A rollout with why it is shown."""

    rollout: Rollout
    labels: list[str]
    advantage: float | None
    tokens: Mapping[str, list[float]] = field(default_factory=dict)  # name -> a number a response token


def chosen_steps(steps: Sequence[int], most: int = STEPS) -> list[int]:
    """At most `most`: the first, every 2^k-th after it, and the last. As a run goes on, most of them stay the same."""
    stride = 1
    while len(steps) > stride * (most - 1):
        stride *= 2
    return sorted({*steps[::stride], *steps[-1:]})


def shown_rollouts(
    folder: Path, source: Path, last_step: int, config: Mapping[str, Any], asked: Collection[str]
) -> list[Shown]:
    """Of the steps up to `last_step` of the run in `folder`, whose rollouts are in `source`; those `asked` for by
    rollout_id first, then the newest step's.

    Raises ValueError (path:line) for a line that is broken, and for an id that is asked for and not there."""
    files = {step: path for step, path in step_files(source).items() if step <= last_step}
    wanted: dict[int, set[str]] = defaultdict(set)
    for name in asked:
        head = name.split("-")[0]
        if not head.isdecimal() or int(head) not in files:
            raise InputError(f"--rollout: {source} has no rollouts of the step of {name!r}; ids begin with the step")
        wanted[int(head)].add(name)
    found: list[Shown] = []
    for step in sorted({*chosen_steps(list(files)), *wanted}, reverse=True):
        path = files[step]
        rollouts = sorted(read_rollouts(path), key=lambda r: r.rollout_id)
        advantages = advantages_of(rollouts, config)
        if missing := sorted(wanted[step] - {r.rollout_id for r in rollouts}):
            raise InputError(f"--rollout: {path} has no rollout {missing[0]!r}")
        measured = _measured(rollouts, read_token_rows(tokens_file(folder, step)))
        found += [
            Shown(r, labels, advantages.get(r.rollout_id), measured.get(r.rollout_id, {}))
            for r, labels in _chosen(rollouts, wanted[step], measured)
        ]
    return sorted(found, key=lambda s: ("asked for" not in s.labels, -s.rollout.step))


def _measured(rollouts: Sequence[Rollout], rows: Mapping[str, TokenRow]) -> dict[str, dict[str, list[float]]]:
    """rollout_id -> the lists of its row; none where the row is of another response."""
    found = {}
    for r in (r for r in rollouts if r.rollout_id in rows):
        row, ids = rows[r.rollout_id], r.response_tokens
        if row.response == response_hash(ids):
            found[r.rollout_id] = {name: values for name, values in row.lists.items() if len(values) == len(ids)}
    return found


def advantages_of(rollouts: Sequence[Rollout], config: Mapping[str, Any]) -> dict[str, float]:
    """rollout_id -> advantage, from the rewards of the groups of a step alone; empty for a method whose advantages need
    more: history, token statistics, a function of the user's, merged rounds; and where training has added process
    rewards. `config`: the run's config.yaml."""
    algorithm = config["algorithm"]
    advantage = {"singleton": "zero", "eps": 1e-6, "positive_weight": 1.0, **algorithm.get("advantage", {})}
    kind, trained = advantage.get("kind"), [r for r in rollouts if r.status not in NOT_TRAINED]
    other = ("sequential", "dynamic_sampling")
    if kind not in GROUP_ADVANTAGES or any(algorithm.get(name) is not None for name in other) or not trained:
        return {}
    if advantage.get("entropy_shaping") is not None or has_process_rewards(trained, config):
        return {}
    rewards = np.array([r.reward for r in trained], np.float64)
    if not np.isfinite(rewards).all():
        return {}
    if advantage.get("overlong_buffer") is not None:
        lengths = np.array([sum(r.response_mask) for r in trained])
        most = advantage.get("overlong_penalty", 0.5)
        limit = config["rollout"]["max_new_tokens"]
        rewards = rewards + overlong_penalty(lengths, limit, advantage["overlong_buffer"], most)
    values = group_advantages(
        rewards,
        [r.group_id for r in trained],
        kind,
        singleton=advantage["singleton"],
        eps=advantage["eps"],
        positive_weight=advantage["positive_weight"],
    )
    if advantage.get("normalise") == "batch":
        values = batch_normalised(values)
    return {r.rollout_id: float(value) for r, value in zip(trained, values, strict=True)}


def has_process_rewards(rollouts: Sequence[Rollout], config: Mapping[str, Any]) -> bool:
    """Returns True where each token of these rollouts has its own advantage, of the outcome and of process rewards."""
    if config["algorithm"].get("advantage", {}).get("process", {}).get("weight", 1.0) == 0:
        return False
    return "prime" in config.get("reward", {}).get("functions", []) or any(r.step_rewards for r in rollouts)


def _chosen(
    rollouts: Sequence[Rollout], asked: Collection[str], measured: Collection[str]
) -> list[tuple[Rollout, list[str]]]:
    """Rollouts of a step with their labels, those with most labels first."""
    labels: dict[str, list[str]] = defaultdict(list)

    def label(name: str, its: Iterable[Rollout]) -> None:
        for r in its:
            labels[r.rollout_id].append(name)

    scored = [r for r in rollouts if r.status == "ok"]
    label("asked for", (r for r in rollouts if r.rollout_id in asked))
    label("best", _of_different_groups(sorted(scored, key=lambda r: -r.reward)))
    label("worst", _of_different_groups(sorted(scored, key=lambda r: r.reward)))
    label("truncated", [r for r in rollouts if r.finish_reason == "length"][:EACH])
    label("rejected", [r for r in rollouts if r.status == "rejected"][:EACH])
    label("not scored", [r for r in rollouts if r.status not in ("ok", "rejected")][:EACH])
    label("token statistics", (r for r in rollouts if r.rollout_id in measured))
    label("group", _mixed_group(scored))
    by_id = {r.rollout_id: r for r in rollouts}
    return [(by_id[name], its) for name, its in labels.items()]


def _of_different_groups(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """The first EACH whose groups differ."""
    first: dict[str, Rollout] = {}
    for r in rollouts:
        first.setdefault(r.group_id, r)
    return list(first.values())[:EACH]


def _mixed_group(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Of the group whose rewards vary most; the first of equal ones."""
    groups: dict[str, list[Rollout]] = defaultdict(list)
    for r in rollouts:
        groups[r.group_id].append(r)
    return max(groups.values(), key=lambda g: float(np.var([r.reward for r in g])), default=[])[:LARGEST_GROUP]


def rollout_view(shown: Shown, decode: Decode | None) -> dict[str, Any]:
    """Plain data of one rollout. `values`: name -> a number for each token that is shown, or one for all; nats but for
    advantages and the modulation's factor. `texts`: a piece of text a token, or None without a tokenizer. `episode`: as
    `episode_view`."""
    r = shown.rollout
    prompt = r.response_mask.count(0)
    ids = r.response_tokens[:MOST_TOKENS]
    versions = np.full(len(ids), -1, np.int64)
    for version, start, end in r.weight_versions:
        versions[start:end] = min(version, 2**31)
    engine = np.array(r.engine_logprobs[: len(ids)], np.float64)
    values: dict[str, Any] = {"engine_logprob": plain(engine), "version": versions.tolist()}
    if shown.advantage is not None:
        values["advantage"] = plain([shown.advantage])[0]
    for name, of_all in shown.tokens.items():
        numbers = np.array(of_all[: len(ids)], np.float64)
        values[name] = plain(numbers)
        if name == "logprob" and len(engine) == len(numbers):
            values["gap"] = plain(numbers - engine, 3)
    episode = episode_view(r, decode)
    bounds = sorted({0, *(turn["first"] for turn in episode["turns"])}) if episode is not None else [0]
    answer = r.answer if r.answer is None or isinstance(r.answer, str) else json.dumps(r.answer, ensure_ascii=False)
    return {
        **{"id": r.rollout_id, "group": r.group_id, "prompt_id": r.prompt_id, "step": r.step, "labels": shown.labels},
        **{"reward": plain([r.reward], 6)[0], "success": r.success, "status": r.status, "finish": r.finish_reason},
        **{"parts": dict(zip(r.reward_parts, plain(list(r.reward_parts.values())), strict=True)), "server": r.server},
        "length": len(r.tokens) - prompt,
        "prompt_tokens": prompt,
        "prompt": _cut(r.prompt if r.prompt is not None else _decoded(r.tokens[:prompt], decode)),
        "response": _cut(r.response if r.response is not None else _decoded(r.tokens[prompt:], decode)),
        "answer": None if answer is None else _cut(answer),
        "ids": ids,
        "texts": None if decode is None else _texts(ids, bounds, decode),
        "values": values,
        "episode": episode,
    }


def _texts(ids: Sequence[int], starts: Sequence[int], decode: Decode) -> list[str]:
    """Of answers that begin at `starts`: no character has tokens of two."""
    parts = (ids[start:end] for start, end in itertools.pairwise([*starts, len(ids)]))
    return [text for part in parts for text in token_texts(part, decode)]


def _decoded(ids: Sequence[int], decode: Decode | None) -> str:
    return "" if decode is None else decode(ids)


def _cut(text: str) -> str:
    """With a note of what is left out."""
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}\n[cut: {len(text) - MOST_TEXT:,} more characters]"
