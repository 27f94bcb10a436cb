"""What the policy says of each token of a few rollouts a step (`tracking.token_rollouts`), for the report."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from dynamo_megatron.algorithm.modulation import ModulationRanges, entropy_change, modulate
from dynamo_megatron.algorithm.shaping import shape_tokens
from dynamo_megatron.config import AlgorithmConfig, Config
from dynamo_megatron.errors import InputError
from dynamo_megatron.rollout.line_files import compressed, read_raw_lines
from dynamo_megatron.runtime.whole_files import replacing
from dynamo_megatron.types import TokenStats

if TYPE_CHECKING:  # names only, as in step_metrics
    from dynamo_megatron.policy.batch import TrainBatch


class TokenRow(NamedTuple):
    """What is known of one rollout's tokens."""

    response: str  # `response_hash`: a rollout_id may have got another response since then
    lists: dict[str, list[float]]  # name -> a number a response token


def response_hash(ids: Sequence[int]) -> str:
    """Of a response's token ids."""
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()[:16]


def token_rows(batch: TrainBatch, stats: TokenStats, config: Config, count: int) -> Iterator[dict[str, Any]]:
    """A line for each of `count` rollouts, evenly spaced in the order of their advantages, the lowest and the highest
    among them, with the `response_hash` of its tokens.

    Lists have a number a response token, under the weights that the step began with: `logprob` and `entropy` (nats),
    `advantage` (as the loss gets it, before the modulation) and `modulation`, its factor where the ratio is 1. The last
    one is left out where the method has none, or its scope is the micro-batch, and so are both where
    `entropy_shaping` is a function of the user's: calls on rank 0 alone could let the ranks' copies of it diverge.
    `stats`: float32 [R].
    """
    rollouts, users = batch.rollouts, isinstance(config.algorithm.advantage.entropy_shaping, str)
    order = np.argsort(batch.advantages, kind="stable")
    wanted = set(order[np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(int)].tolist())
    offsets = rollouts.response_offsets
    for members in batch.mini_batches:
        taken = [s for s in members.tolist() if s in wanted]
        if not taken:
            continue
        shaped = None
        if not users:
            fields = (batch.advantages, batch.weights, stats, config.algorithm)
            shaped = shape_tokens(rollouts, members, *fields, seed=config.seed, process=batch.process)
        for s in taken:
            here = slice(int(offsets[s]), int(offsets[s + 1]))
            own = TokenStats(*(statistic[here] for statistic in stats))
            found = {"logprob": own.logprobs, "entropy": own.entropy}
            if shaped is not None:
                found["advantage"] = shaped.advantages[here]
            if shaped is not None and shaped.ranges is not None:
                found["modulation"] = _factor(found["advantage"], own, shaped.ranges, config.algorithm)
            lists = {name: [float(f"{v:.6g}") for v in values.tolist()] for name, values in found.items()}
            response = response_hash(rollouts.response(s).tolist())
            yield {"rollout_id": rollouts.rollout_ids[s], "response": response, **lists}


def _factor(
    advantages: torch.Tensor, stats: TokenStats, ranges: ModulationRanges, algorithm: AlgorithmConfig
) -> torch.Tensor:
    """float32 [n], of the n tokens of one rollout."""
    modulation, loss = algorithm.modulation, algorithm.loss
    expected = stats.expected_pi_lambda if modulation.expectation == "exact" else None
    change = entropy_change(
        advantages[None],
        stats.logprobs[None],
        stats.entropy[None],
        stats.logprobs[None],
        torch.ones_like(advantages)[None],
        loss.clip_ratio_low,
        loss.clip_ratio_high,
        expected_pi_lambda=None if expected is None else expected[None],
    )
    keys = ("alpha", "lambda_min", "gamma", "tau")
    factors = {key: getattr(modulation, key) for key in keys}
    modulated = modulate(advantages, stats.entropy, change[0], ranges, **factors)
    return modulated.beta_comp * modulated.beta_stab


def write_token_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """The file appears when it is whole, in place of one that a killed run has left of this step. Raises OSError."""
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as file:
        file.writelines(compressed(json.dumps(row).encode() + b"\n") for row in rows)


def read_token_rows(path: Path) -> dict[str, TokenRow]:
    """By rollout_id; nothing without a file. Raises ValueError (path:line) for a line that is not such."""
    found: dict[str, TokenRow] = {}
    for number, line in enumerate(read_raw_lines(path) if path.is_file() else (), 1):
        try:
            row = json.loads(line)
            name, response = row.pop("rollout_id"), row.pop("response")
            sound = isinstance(name, str) and isinstance(response, str) and all(map(_are_numbers, row.values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            sound = False
        if not sound:
            raise InputError(f"{path}:{number}: no token statistics of a rollout; remove the file")
        found[name] = TokenRow(response, row)
    return found


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) in (int, float) for v in values)
