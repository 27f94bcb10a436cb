"""The variance of a mini-batch's whole gradient under a design, from stored rollouts and their gradients.

A design draws M prompts, gives prompt i n_i rollouts and makes of their rewards the advantages A_ij. With g_ij the
gradient of the log-probability of response j the mini-batch's gradient is, up to the constant response length,

    G = 1/M sum_i e_i,   e_i = 1/n_i sum_j A_ij g_ij            (aggregation prompt_mean)

and for prompts that are drawn independently, from a pool much larger than M,

    tr Cov G = 1/M (mean_i E|e_i|^2 - |mean_i E e_i|^2):

the variance between prompts and that within them. Both terms are estimated without bias from N prompts with K rollouts
each. Any n different ones of a prompt's K rollouts are as good as n fresh ones: in a random order of them the first
`history` are what earlier visits showed, the next n_i the group. Counts and baseline follow by the trainer's own
functions, and |e_i|^2 is a quadratic form of the inner products of the prompt's own gradients. The second term takes
pairs of different prompts alone. So the noise of a mean of K gradients never counts as signal. Rewards are 0 or 1.
For grpo, which is biased, E e_i is what it is on average over the counts; how the counts of a mini-batch's prompts go
together is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from dynamo_megatron.algorithm.advantages import group_advantages, history_advantages
from dynamo_megatron.algorithm.allocation import RolloutAllocator
from dynamo_megatron.config import AllocationConfig

BASELINES = ("rloo", "grpo", "history", "history + pooled")
VARIANCES = get_args(AllocationConfig.model_fields["variance"].annotation)
ALLOCATORS = {"uniform": {"kind": "uniform"}} | {f"neyman {v}": {"kind": "neyman", "variance": v} for v in VARIANCES}
MOST = 24  # rollouts that an allocator may give a prompt


@dataclass(frozen=True)
class Pool:
    """N prompts with K rollouts each, all float64."""

    rewards: np.ndarray  # [N, K], 0 or 1
    energy: np.ndarray  # [N, K]: sum_t (1 - 2 pi_t + sum_v pi_v^2)
    products: np.ndarray  # [N, K, K]: inner products of the gradients of a prompt's rollouts
    sums: np.ndarray  # [2 N, 2 N]: inner products of the prompts' sums of gradients, those of wrong ones (2 i), right

    @classmethod
    def of(cls, gradients: Iterable[np.ndarray], rewards: np.ndarray, energy: np.ndarray) -> Pool:
        """`gradients`: of each prompt, [K, D], one after the other. Raises ValueError for a reward not 0 or 1."""
        if (bad := np.argwhere((rewards != 0) & (rewards != 1))).size:
            i, j = bad[0]
            raise ValueError(f"rewards: prompt {i}, rollout {j}: {rewards[i, j]}; rewards must be 0 or 1")
        n, stored = rewards.shape
        products, sums = np.empty((n, stored, stored)), None
        for i, (own, right) in enumerate(zip(gradients, rewards, strict=True)):
            if sums is None:  # the largest array: never twice in memory
                sums = np.empty((2 * n, own.shape[1]), own.dtype)
            products[i] = own @ own.T
            for reward in (0, 1):
                sums[2 * i + reward] = own[right == reward].sum(0)
        return cls(rewards.astype(np.float64), energy.astype(np.float64), products, (sums @ sums.T).astype(np.float64))

    def pairs(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """[N, N] inner products of the prompts' sum_j A_j g_j with A given by the reward, `left` and `right` [N, 2] for
        reward 0 and 1; 0 on the diagonal, where the same rollouts would meet."""
        n = len(self.rewards)
        table = np.einsum("ia,iajb,jb->ij", left, self.sums.reshape(n, 2, n, 2), right)
        np.fill_diagonal(table, 0)
        return table

    def unbiased(self) -> np.ndarray:
        """[N, 2]: what rloo over all K rollouts makes of reward 0 and 1, over K."""
        k, right = self.rewards.shape[1], self.rewards.sum(1)
        return np.stack([-right, k - right], axis=1) / (k * (k - 1))


@dataclass(frozen=True)
class Design:
    prompts: int
    rollouts: int  # of a prompt, on average
    baseline: str
    allocator: str

    @property
    def least(self) -> int:
        """The fewest rollouts of a prompt: a baseline of the group alone needs two."""
        return 1 if self.baseline.startswith("history") else 2


def designs(shapes: Iterable[tuple[int, int]]) -> Iterator[Design]:
    """Every design of these shapes (prompts, rollouts) that can be: not a group of one with a baseline of the group,
    not an allocation where no prompt could have fewer rollouts than another."""
    for prompts, rollouts in shapes:
        for baseline in BASELINES:
            for allocator in ALLOCATORS:
                design = Design(prompts, rollouts, baseline, allocator)
                if rollouts > design.least or (rollouts == design.least and allocator == "uniform"):
                    yield design


class Past:
    """What the rollouts `chosen`, int64 [N, history], of every prompt have shown to the trainer's own allocator."""

    def __init__(self, pool: Pool, chosen: np.ndarray, allocator: str, least: int):
        stored = pool.rewards.shape[1]
        most = min(MOST, stored - chosen.shape[1])
        self._allocator = RolloutAllocator({**ALLOCATORS[allocator], "rollout_n_min": least, "rollout_n_max": most})
        owners = np.repeat(np.arange(len(chosen)), chosen.shape[1])
        rewards, energy = pool.rewards[owners, chosen.ravel()], pool.energy[owners, chosen.ravel()]
        self._allocator.observe([str(i) for i in owners], rewards, rewards == 1, 0, energy)

    def counts(self, batch: np.ndarray, budget: int) -> np.ndarray:
        """int64 [M], for the prompts `batch`."""
        return self._allocator.decide([str(i) for i in batch], budget, step=1).counts

    def advantages(self, rewards: np.ndarray, group: np.ndarray, batch: np.ndarray, baseline: str) -> np.ndarray:
        """float64 [S]; rollout s is of the prompt batch[group[s]]."""
        if not baseline.startswith("history"):
            return group_advantages(rewards, group, baseline)
        ids = [str(i) for i in batch]
        known = self._allocator.reward_baseline(ids, score_ratio=None if baseline == "history + pooled" else 1.0)
        return history_advantages(rewards, group, known.mean[group], known.strength[group], known.score_ratio)


@dataclass(frozen=True)
class Moments:
    """Of a design, over the orders: of each prompt's e_i."""

    squared: np.ndarray  # [N]: E|e_i|^2
    by_reward: np.ndarray  # [N, 2]: E e_i = sum_j g_ij by_reward[i, r_ij], over all K


def moments(pool: Pool, design: Design, orders: np.ndarray, history: int, rng: np.random.Generator) -> Moments:
    """Over `orders`, int64 [R, N, K]: permutations of each prompt's rollouts."""
    prompts = np.arange(len(pool.rewards))
    squared, times = np.zeros(len(prompts)), np.zeros(len(prompts))
    by_reward = np.zeros((len(prompts), 2))
    for order in orders:
        past = Past(pool, order[:, :history], design.allocator, design.least)
        for batch in batches(prompts, design.prompts, rng):
            counts = past.counts(batch, design.prompts * design.rollouts)
            group = np.repeat(np.arange(len(batch)), counts)
            place = history + np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)
            owner = batch[group]
            rollout = order[owner, place]
            rewards = pool.rewards[owner, rollout]
            weights = past.advantages(rewards, group, batch, design.baseline) / counts[group]
            for i, own, weight in zip(
                batch, *(np.split(x, np.cumsum(counts)[:-1]) for x in (rollout, weights)), strict=True
            ):
                squared[i] += weight @ pool.products[i][np.ix_(own, own)] @ weight
            np.add.at(by_reward, (owner, rewards.astype(int)), weights)
            np.add.at(times, batch, 1)
    right = pool.rewards.sum(1)
    share = np.stack([pool.rewards.shape[1] - right, right], axis=1)  # rollouts of each reward
    mean = by_reward / times[:, None]
    return Moments(squared / times, np.divide(mean, share, out=np.zeros_like(mean), where=share > 0))


def batches(prompts: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """int64 [batches, size]: every prompt in at least one; none twice in a batch unless there are too few."""
    return np.resize(rng.permutation(prompts), (-(-len(prompts) // size), size))


def prompt_parts(pool: Pool, orders: np.ndarray, rollouts: int) -> tuple[np.ndarray, np.ndarray]:
    """Of each prompt, by rloo, (|g_i|^2, s_i^2), float64 [N]: g_i the gradient of its expected reward, s_i^2 / n the
    variance of its estimate from n = `rollouts` rollouts. Both are unbiased, so s_i^2 of a prompt may be below 0.

    |g_i|^2 is the product of rloo gradients from two halves without a rollout in common.
    """
    half = pool.rewards.shape[1] // 2
    squared, signal = np.zeros(len(pool.rewards)), np.zeros(len(pool.rewards))
    for order in orders:
        for i, (products, rewards, own) in enumerate(zip(pool.products, pool.rewards, order, strict=True)):
            parts = own[:half], own[half : 2 * half]
            left, right = (group_advantages(rewards[part], np.zeros(half, int), "rloo") for part in parts)
            signal[i] += left @ products[np.ix_(*parts)] @ right / half**2
            group = own[:rollouts]
            weights = group_advantages(rewards[group], np.zeros(rollouts, int), "rloo") / rollouts
            squared[i] += weights @ products[np.ix_(group, group)] @ weights
    signal, squared = signal / len(orders), squared / len(orders)
    return signal, rollouts * (squared - signal)


def signal_share(pool: Pool, parts: tuple[np.ndarray, np.ndarray], rollouts: int) -> dict[str, float]:
    """Of rloo with uniform counts, from `prompt_parts`: mean |g_i|^2 over mean s_i^2, and the share of the variance
    that lies between prompts at `rollouts` each, which no counts within a mini-batch can change."""
    signal, within = (part.mean() for part in parts)
    unbiased, n = pool.unbiased(), len(pool.rewards)
    between = signal - pool.pairs(unbiased, unbiased).sum() / (n * (n - 1))
    return {
        "|g|^2/s^2": float(signal / within),
        "between prompts": float(between / (between + within / rollouts)),
    }


class Estimate:
    """A design's variance from its prompts, each counted `times` (float64 [N], sum N) over."""

    def __init__(self, pool: Pool, design: Design, found: Moments):
        self._prompts, self._squared = design.prompts, found.squared
        unbiased = pool.unbiased()
        self._target = pool.pairs(unbiased, unbiased)
        self._biased = design.baseline == "grpo"
        if self._biased:
            self._own = pool.pairs(found.by_reward, found.by_reward)
            self._along = pool.pairs(found.by_reward, unbiased)

    def scale(self, times: np.ndarray) -> float:
        """The part of the expected gradient along the gradient of the mean reward, over that gradient."""
        return float(times @ self._along @ times / (times @ self._target @ times)) if self._biased else 1.0

    def spread(self, times: np.ndarray) -> float:
        """tr Cov G."""
        n = times.sum()
        table = self._own if self._biased else self._target
        mean = times @ table @ times / (n * n - times @ times)
        return float((times @ self._squared / n - mean) / self._prompts)

    def variance(self, times: np.ndarray) -> float:
        """`spread` over the squared `scale`: a factor is a matter of the learning rate."""
        return self.spread(times) / self.scale(times) ** 2


def compare(
    pool: Pool,
    shapes: Sequence[tuple[int, int]],
    *,
    history: int,
    orders: np.ndarray,
    resamples: int = 1000,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Every design's variance relative to rloo with uniform counts at the first shape, with 95 % intervals of
    `resamples` bootstraps over prompts (the same ones for all designs). `orders`, `history`: as for `moments`."""
    rng, n = np.random.default_rng(seed), len(pool.rewards)
    estimates = {d: Estimate(pool, d, moments(pool, d, orders, history, rng)) for d in designs(shapes)}
    reference = estimates[Design(*shapes[0], "rloo", "uniform")]
    times = [np.bincount(rng.integers(0, n, n), minlength=n).astype(np.float64) for _ in range(resamples)]
    once, rows = np.ones(n), []
    for design, estimate in estimates.items():
        ratios = [estimate.variance(t) / reference.variance(t) for t in times]
        low, high = np.percentile(ratios, [2.5, 97.5])
        rows.append(
            {
                "shape": f"{design.prompts}x{design.rollouts}",
                "baseline": design.baseline,
                "allocator": design.allocator,
                "variance": estimate.variance(once) / reference.variance(once),
                "interval": [float(low), float(high)],
                "scale": estimate.scale(once),
            }
        )
    return rows
