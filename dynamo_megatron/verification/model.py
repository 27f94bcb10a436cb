"""The step's policy in transformers and float64: statistics of the response tokens, and the gradient by autograd.

Every rollout is computed alone, without packing. transformers computes norms in float32 whatever the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dynamo_megatron.types import RolloutBatch
from dynamo_megatron.verification.reference import Loss, Statistics

SAMPLED = 16384  # entries of the gradient in which each rollout's part of it is kept
Tensors = dict[str, torch.Tensor]  # by Hugging Face name


class Gradient(NamedTuple):
    whole: Tensors  # float64
    entries: Tensors  # int64 [n], flat indices of the sampled entries of each parameter
    parts: np.ndarray  # float64 [S, entries]: each rollout's

    def sample(self, gradient: Tensors) -> np.ndarray:
        """float64 [entries]"""
        flat = ((gradient[name].flatten(), at) for name, at in self.entries.items())
        return np.concatenate([g[at.to(g.device)].double().cpu().numpy() for g, at in flat])

    @property
    def norm(self) -> float:
        return float(torch.stack([g.norm() for g in self.whole.values()]).norm())


class ReferenceModel:
    """The model of a Hugging Face folder, whose weights `load` sets. `temperature`: of the rollouts."""

    def __init__(self, folder: str | Path, temperature: float):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        self._device, self._temperature = torch.device("cuda" if torch.cuda.is_available() else "cpu"), temperature
        net = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="sdpa")
        self._net = net.eval().to(self._device)
        self._net.get_input_embeddings().padding_idx = None  # with one, that token's row would have no gradient

    @torch.no_grad()
    def load(self, get: Callable[[str], torch.Tensor]) -> None:
        """Sets every parameter to what `get` returns for its Hugging Face name."""
        for name, parameter in self._net.named_parameters():
            parameter.copy_(get(name))

    @torch.no_grad()
    def statistics(self, rollouts: RolloutBatch) -> Statistics:
        found = np.zeros((3, len(rollouts.engine_logprobs)))
        for s in range(len(rollouts.rewards)):
            for slots, values in self._responses(rollouts, s):
                found[:, slots] = torch.stack(values).cpu().numpy()
        return Statistics(*found)

    def gradient(self, rollouts: RolloutBatch, loss: Loss) -> Gradient:
        """Of the sum of the loss over all tokens."""
        draw, whole, entries = torch.Generator().manual_seed(0), {}, {}
        parameters = dict(self._net.named_parameters())
        for name, p in parameters.items():
            count = min(p.numel(), -(-SAMPLED // len(parameters)))
            entries[name] = torch.randint(p.numel(), (count,), generator=draw)
            p.grad = whole[name] = torch.zeros_like(p)
        found = Gradient(whole, entries, np.zeros((len(rollouts.rewards), sum(map(len, entries.values())))))
        before = found.sample(whole)
        for s in range(len(rollouts.rewards)):
            for slots, (logprobs, entropy, _) in self._responses(rollouts, s):
                slopes = [torch.from_numpy(v[slots]).to(self._device) for v in (loss.slope, loss.entropy_slope)]
                if any(slope.any() for slope in slopes):
                    (slopes[0] @ logprobs + slopes[1] @ entropy).backward()
            after = found.sample(whole)
            found.parts[s], before = after - before, after
        return found

    def _responses(self, rollouts: RolloutBatch, s: int) -> Iterator[tuple[np.ndarray, tuple[torch.Tensor, ...]]]:
        """The slots of the response tokens of each segment of rollout s, and their `Statistics`."""
        _, starts, ends = rollouts.segments(np.array([s]))
        for start, end in zip(starts, ends, strict=True):
            places = np.arange(start + 1, end)
            rows = np.flatnonzero(rollouts.in_response(places, np.full(len(places), s)))
            tokens = torch.from_numpy(rollouts.tokens[start:end]).to(self._device)
            kept = {"use_cache": False, "logits_to_keep": torch.from_numpy(rows).to(self._device)}
            logs = (self._net(tokens[None, :-1], **kept).logits[0] / self._temperature).log_softmax(-1)
            entropy = -(logs.exp() * logs).sum(-1)
            expected = (logs.detach().exp() ** 2 * (logs + entropy[:, None]).detach()).sum(-1)
            logprobs = logs.gather(1, tokens[1:][rows, None])[:, 0]
            yield rollouts.slots(places[rows], np.full(len(rows), s)), (logprobs, entropy, expected)
