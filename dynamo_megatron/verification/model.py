"""The step's policy in transformers and float64: statistics of the response tokens, and the gradient by autograd.

Every rollout is computed alone, without packing. transformers computes norms in float32 whatever the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dynamo_megatron.types import RolloutBatch
from dynamo_megatron.verification.reference import Loss, Statistics

SAMPLED = 16384  # entries of the gradient in which the rollouts' parts of it are kept


@dataclass(frozen=True)
class ReferenceGradient:
    """`parts`: float64 [S, entries], each rollout's part of the gradient at the sampled `entries` of each parameter."""

    whole: dict[str, torch.Tensor]  # by Hugging Face name, float64
    entries: dict[str, torch.Tensor]  # int64, flat indices
    parts: np.ndarray

    def sample(self, gradient: dict[str, torch.Tensor]) -> np.ndarray:
        """float64 [entries]"""
        return torch.cat([gradient[name].flatten()[at] for name, at in self.entries.items()]).cpu().numpy()


class ReferenceModel:
    """The model of the Hugging Face folder `folder`, whose weights `load` sets. `temperature`: of the rollouts."""

    def __init__(self, folder: str | Path, temperature: float):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        made = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="sdpa")
        self._net, self._temperature = made.eval().to(self._device), temperature
        self.parameters = dict(self._net.named_parameters())

    def load(self, get: Callable[[str], torch.Tensor]) -> None:
        """Sets every parameter to what `get` returns for its Hugging Face name."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(get(name))

    def statistics(self, rollouts: RolloutBatch) -> Statistics:
        found = np.zeros((3, len(rollouts.engine_logprobs)))
        with torch.no_grad():
            for s in range(len(rollouts.rewards)):
                for slots, values in self._responses(rollouts, s):
                    found[:, slots] = torch.stack(values).cpu().numpy()
        return Statistics(*found)

    def gradient(self, rollouts: RolloutBatch, loss: Loss) -> ReferenceGradient:
        """Of the sum of the loss over all tokens."""
        count = -(-SAMPLED // len(self.parameters))
        draw = torch.Generator().manual_seed(0)
        entries = {
            name: torch.randint(p.numel(), (min(count, p.numel()),), generator=draw).to(self._device)
            for name, p in self.parameters.items()
        }
        whole = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        for name, parameter in self.parameters.items():
            parameter.grad = whole[name]
        gradient = ReferenceGradient(whole, entries, np.zeros((len(rollouts.rewards), sum(map(len, entries.values())))))
        before = gradient.sample(whole)
        for s in range(len(rollouts.rewards)):
            for slots, (logprobs, entropy, _) in self._responses(rollouts, s):
                slopes = [torch.from_numpy(v[slots]).to(self._device) for v in (loss.slope, loss.entropy_slope)]
                if any(slope.any() for slope in slopes):
                    (slopes[0] @ logprobs + slopes[1] @ entropy).backward()
            after = gradient.sample(whole)
            gradient.parts[s], before = after - before, after
        return gradient

    def _responses(self, rollouts: RolloutBatch, s: int) -> Iterator[tuple[np.ndarray, tuple[torch.Tensor, ...]]]:
        """Of each segment of rollout s (one without an agent) the slots of its response tokens, and their statistics as
        in `Statistics`, float64."""
        _, starts, ends = rollouts.segments(np.array([s]))
        for start, end in zip(starts, ends, strict=True):
            places = np.arange(start + 1, end)
            rows = np.flatnonzero(rollouts.in_response(places, np.full(len(places), s)))
            if not len(rows):
                continue
            tokens = torch.from_numpy(rollouts.tokens[start:end]).to(self._device)
            hidden = self._net.model(tokens[None, :-1], use_cache=False).last_hidden_state[0, rows]
            logs = (self._net.lm_head(hidden) / self._temperature).log_softmax(-1)
            entropy = -(logs.exp() * logs).sum(-1)
            with torch.no_grad():
                expected = (logs.exp() ** 2 * (logs + entropy[:, None])).sum(-1)
            logprobs = logs.gather(1, tokens[1:][rows, None])[:, 0]
            yield rollouts.slots(places[rows], np.full(len(rows), s)), (logprobs, entropy, expected)
