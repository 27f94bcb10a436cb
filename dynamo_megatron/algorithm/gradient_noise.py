"""How the gradient varies between prompts and within them, from the norms of three sums of rollouts' gradients.

A mini-batch's gradient is sum_j w_j x_j over its rollouts, x_j the advantage times the gradient of the log-probability,
sum_j w_j = 1. For prompts drawn at random x_j has the mean g_i within its prompt i and the variance s_i^2 around it. So
for any subset of the rollouts that was chosen independently of their gradients

    E|sum_j w_j x_j|^2 = signal (sum_i u_i)^2 + between sum_i u_i^2 + within sum_j w_j^2

with u_i the sum of the subset's w_j in prompt i, signal = |mean g_i|^2, between = mean |g_i|^2 - signal and
within = mean s_i^2. The gradient noise scale (arXiv 1812.06162, appendix A.1) takes one small and one large subset for
the signal and the total noise. Here a third subset, with half of each prompt's rollouts, separates the noise within
prompts. docs/gradient-variance.md describes what the estimate leaves out.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from dynamo_megatron.algorithm.aggregation import token_weights
from dynamo_megatron.algorithm.arrays import group_index
from dynamo_megatron.config.contradictions import FEWEST_PROMPTS

PREFIX = "gradient_noise/"


@dataclass(frozen=True)
class Noise:
    """Unbiased estimates, any of which may be below 0, in units of the gradient's squared norm."""

    signal: float  # |E g_i|^2
    between: float  # E|g_i|^2 - |E g_i|^2
    within: float  # E s_i^2

    def metrics(self) -> dict[str, float]:
        return {f"{PREFIX}{name}": value for name, value in asdict(self).items()}

    @classmethod
    def of(cls, metrics: Mapping[str, float]) -> Noise | None:
        """Reads the estimates from a step's metrics; None if the noise was not measured."""
        names = ("signal", "between", "within")
        return cls(*(metrics[f"{PREFIX}{name}"] for name in names)) if f"{PREFIX}within" in metrics else None


@dataclass(frozen=True)
class Split:
    """For each of S rollouts, the data-parallel rank that accumulates its gradient, and the part in which it does.

    After part 0 a rank has half of the rollouts of its prompts, after part 1 all of them. If there is only one rank,
    half of the prompts are in these two parts and the others in part 2.
    """

    prompt: np.ndarray  # int64 [S]
    weights: np.ndarray  # float64 [S], sum 1: the weight of a rollout's gradient in the whole
    rank: np.ndarray  # int64 [S]
    part: np.ndarray  # int64 [S]
    parts: int  # 2 or 3

    def noise(self, squares: Sequence[float], whole: float) -> Noise:
        """Estimates the noise. `squares`: the squared gradient norms after part 0 and after part 1, each summed over
        the ranks; `whole`: the squared norm of the whole gradient."""
        rows = [
            *(self._expectation(np.where(self.part <= last, self.weights, 0), self.rank) for last in (0, 1)),
            self._expectation(self.weights, np.zeros_like(self.rank)),
        ]
        return Noise(*np.linalg.solve(np.array(rows), np.array([*squares, whole])).tolist())

    def _expectation(self, weights: np.ndarray, owner: np.ndarray) -> list[float]:
        """The factors of signal, between and within in the sum of the owners' squared norms."""
        u = np.zeros((owner.max() + 1, self.prompt.max() + 1))
        np.add.at(u, (owner, self.prompt), weights)
        return [float((u.sum(1) ** 2).sum()), float((u**2).sum()), float((weights**2).sum())]


def nested_split(
    prompt_ids: Sequence[Hashable],
    group_ids: Sequence[Hashable],
    aggregation: str,
    ranks: int,
    rng: np.random.Generator,
) -> Split | None:
    """Returns a random split. `aggregation`: the loss's (`token_weights`). None if there are fewer than FEWEST_PROMPTS
    prompts, or if fewer than half of them have two rollouts: the estimate would be useless."""
    prompt, prompts = group_index(prompt_ids, len(prompt_ids))
    sizes = np.bincount(prompt, minlength=prompts)
    if prompts < FEWEST_PROMPTS or 2 * np.count_nonzero(sizes > 1) < prompts:
        return None
    by_prompt = aggregation in ("prompt_mean", "prompt_token_mean")
    ones = np.ones(len(prompt), np.int64)
    weights = token_weights("prompt_mean" if by_prompt else "sequence_sum", ones, group_ids, max_length=1)
    place = np.empty(prompts, np.int64)  # prompts with two rollouts come first, so that every rank gets some
    place[np.lexsort((rng.random(prompts), sizes == 1))] = np.arange(prompts)
    order = np.lexsort((rng.random(len(prompt)), prompt))
    within = np.empty_like(order)
    within[order] = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    part = np.where(within < sizes[prompt] // 2, 0, 1)
    if ranks == 1:
        part[place[prompt] % 2 == 1] = 2
    return Split(prompt, weights, place[prompt] % ranks, part, 3 if ranks == 1 else 2)
