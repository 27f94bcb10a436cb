"""The policy's statistics of each token of a few rollouts per step (`tracking.token_rollouts`), for the report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dynamo_megatron.algorithm.modulation import ModulationRanges, entropy_change, modulate
from dynamo_megatron.algorithm.shaping import shape_tokens
from dynamo_megatron.config import AlgorithmConfig, Config
from dynamo_megatron.errors import InputError
from dynamo_megatron.runtime.line_files import compressed, read_raw_lines
from dynamo_megatron.runtime.whole_files import replacing
from dynamo_megatron.types import TokenStats

if TYPE_CHECKING:  # for type hints only, as in step_metrics
    from dynamo_megatron.policy.batch import TrainBatch


def token_rows(batch: TrainBatch, stats: TokenStats, config: Config, count: int) -> Iterator[dict[str, Any]]:
    """Yields one row for each of `count` rollouts, which are evenly spaced in the order of their mean advantages, and
    include the lowest and the highest.

    The row's lists have one number per response token, under the weights at the beginning of the step: `logprob` and
    `entropy` (nats), `advantage` (as the loss gets it, before the modulation) and `modulation`, the factor of the
    modulation where the ratio is 1. `modulation` is left out where the method has no modulation, or its scope is the
    micro-batch. `stats`: float32 [R].
    """
    rollouts, advantages = batch.rollouts, batch.advantages
    lengths = rollouts.response_lengths
    if batch.process is not None:
        owners = np.repeat(np.arange(len(lengths)), lengths)
        advantages = advantages + np.bincount(owners, batch.process, len(lengths)) / np.maximum(lengths, 1)
    order = np.argsort(advantages, kind="stable")
    wanted = set(order[np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(int)].tolist())
    offsets = rollouts.response_offsets
    for members in batch.mini_batches:
        taken = [s for s in members.tolist() if s in wanted]
        if not taken:
            continue
        fields = (batch.advantages, batch.weights, stats, config.algorithm)
        shaped = shape_tokens(rollouts, members, *fields, seed=config.seed, process=batch.process)
        for s in taken:
            here = slice(int(offsets[s]), int(offsets[s + 1]))
            own = TokenStats(*(statistic[here] for statistic in stats))
            found = {"logprob": own.logprobs, "entropy": own.entropy, "advantage": shaped.advantages[here]}
            if shaped.ranges is not None:
                found["modulation"] = _factor(found["advantage"], own, shaped.ranges, config.algorithm)
            lists = {name: [float(f"{v:.6g}") for v in values.tolist()] for name, values in found.items()}
            yield {"rollout_id": rollouts.rollout_ids[s], **lists}


def _factor(
    advantages: torch.Tensor, stats: TokenStats, ranges: ModulationRanges, algorithm: AlgorithmConfig
) -> torch.Tensor:
    """The factor of the modulation for the n tokens of one rollout, float32 [n]."""
    modulation, loss = algorithm.modulation, algorithm.loss
    expected = stats.expected_pi_lambda[None] if modulation.expectation == "exact" else None
    fields = (advantages, stats.logprobs, stats.entropy, stats.logprobs, torch.ones_like(advantages))
    rows = [field[None] for field in fields]
    change = entropy_change(*rows, loss.clip_ratio_low, loss.clip_ratio_high, expected_pi_lambda=expected)
    factors = {key: getattr(modulation, key) for key in ("alpha", "lambda_min", "gamma", "tau")}
    modulated = modulate(advantages, stats.entropy, change[0], ranges, **factors)
    return modulated.beta_comp * modulated.beta_stab


def write_token_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes the rows. The file appears when it is complete, and replaces an older one. Raises OSError."""
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as file:
        file.writelines(compressed(json.dumps(row).encode() + b"\n") for row in rows)


def read_token_rows(path: Path) -> dict[str, dict[str, list[float]]]:
    """The lists of a file by rollout_id; empty where there is no file. Raises ValueError (path:line) for a line that is
    not such a row."""
    found: dict[str, dict[str, list[float]]] = {}
    for number, line in enumerate(read_raw_lines(path) if path.is_file() else (), 1):
        try:
            row = json.loads(line)
            found[row.pop("rollout_id")] = row
        except (ValueError, KeyError, AttributeError, TypeError):
            raise InputError(f"{path}:{number}: no token statistics of a rollout; remove the file") from None
    return found
