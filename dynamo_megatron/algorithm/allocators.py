"""The allocators, built in and loaded by name, and their arithmetic: who gets how many rollouts.

`variance` and `counts` of an allocator are pure functions of the statistics, never of random numbers, the time or
earlier calls. So a resumed run and a replay give the same counts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np

from dynamo_megatron.algorithm.arrays import Array, finite, like
from dynamo_megatron.algorithm.history import Statistics
from dynamo_megatron.algorithm.success import expected_variance, measured_energies, success_rate, success_variance
from dynamo_megatron.config import AllocationConfig
from dynamo_megatron.errors import InputError
from dynamo_megatron.runtime.user_code import load_callable

# Of the published priority: prompts with at least this success rate have the least; with fewer rollouts it is 0.
SOLVED_RATE, LEAST_VARIANCE, KNOWN_ROLLOUTS = 0.85, 0.01, 4
GVM_ALPHA, GVM_BETA = 1e-3, 2.0  # as in the published run_em.sh


class Allocator(ABC):
    """Decides how many rollouts each prompt of a batch gets. Derive from it and name yours as `kind: module:Class`."""

    forgets = True  # False: observations keep their full weight, whatever `half_life` says

    def __init__(self, config: AllocationConfig) -> None:
        self.config = config

    def variance(self, prompts: Statistics, pool: Statistics) -> np.ndarray:
        """Returns what `counts` decides by, finite float64 [N], 0 or above; logged as `variance` in allocation.jsonl.

        `prompts`: those of the batch. `pool`: all prompts observed so far. Unless overridden: the expected variance of
        a rollout by `config.variance`.
        """
        return expected_variance(self.config.variance, prompts, pool)

    @abstractmethod
    def counts(self, prompts: Statistics, variance: np.ndarray, budget: int, low: int, high: int) -> np.ndarray:
        """Rollouts of each of N >= 1 prompts, int64 [N] with sum `budget` and low <= n <= high.

        The caller ensures N low <= budget <= N high and low >= 1.
        """


class Uniform(Allocator):
    """The same number of rollouts for every prompt."""

    def counts(self, prompts: Statistics, variance: np.ndarray, budget: int, low: int, high: int) -> np.ndarray:
        return spread(len(prompts), budget)


class Neyman(Allocator):
    """Minimises sum_i v_i / n_i, v_i the expected variance plus `variance_floor` times the batch's mean variance: the
    optimum of the theory (DynaMO, arXiv 2602.19208), with integer counts and bounds."""

    def variance(self, prompts: Statistics, pool: Statistics) -> np.ndarray:
        variance = super().variance(prompts, pool)
        return variance + self.config.variance_floor * variance.mean()

    def counts(self, prompts: Statistics, variance: np.ndarray, budget: int, low: int, high: int) -> np.ndarray:
        # Without a variance all counts are equally good: spread evenly, not to the lower indices first.
        return neyman(variance if variance.any() else np.ones(len(prompts)), budget, low, high)


class Waterfill(Allocator):
    """The published code's (GithubX-F/DynaMO-RL): shares the budget in proportion to sigma or, as published, sigma^2
    (`power`)."""

    forgets = False

    def variance(self, prompts: Statistics, pool: Statistics) -> np.ndarray:
        """The priority, float64 [N]; 0 for prompts with few rollouts, which `initial_budget` provides."""
        rate = prompts.successes / np.maximum(prompts.trials, 1)
        variance = success_variance(prompts.successes, prompts.trials) + 1e-6 * (1 - rate)  # ties: the harder prompt
        priority = np.where(rate >= SOLVED_RATE, LEAST_VARIANCE, np.maximum(variance, LEAST_VARIANCE))
        priority = np.where(prompts.trials >= KNOWN_ROLLOUTS, priority, 0.0)
        return np.sqrt(priority) if self.config.power == "sigma" else priority

    def counts(self, prompts: Statistics, variance: np.ndarray, budget: int, low: int, high: int) -> np.ndarray:
        return waterfill(prompts.trials, variance, budget, low, high, self.config.initial_budget)


class Knapsack(Allocator):
    """Maximises sum (1 - p^n - (1-p)^n) p (1-p)^2: the chance that a group's rewards differ, times the expected rise
    of p by a gradient step (Knapsack RL, arXiv 2509.25849).

    The paper solves it by dynamic programming. The value is concave in n, so taking the largest gains one by one gives
    the same optimum. In the paper p is the success rate of the last visit, and prompts that were always right or always
    wrong have no value: they get a fixed number of rollouts, and in public code a share of those that the others are
    estimated not to need. Here p is the posterior mean under a prior fitted to the pool. It is never 0 or 1, so no such
    rule is needed.
    """

    def variance(self, prompts: Statistics, pool: Statistics) -> np.ndarray:
        """p, the success rate."""
        return success_rate(prompts, pool)

    def counts(self, prompts: Statistics, variance: np.ndarray, budget: int, low: int, high: int) -> np.ndarray:
        p = variance[:, None]
        q = 1 - p
        # The gain is p^n q + q^n p, times the worth p q^2.
        return largest_gains(lambda n: p * q * q * (p**n * q + q**n * p), len(p), budget, low, high)


class Gvm(Allocator):
    """GVM-RAFT's (arXiv 2505.02391; code RLHFlow/GVM): n ~ G / sqrt(p + alpha / p^(beta - 1)), G a prompt's gradient
    norm over right rollouts; 0 without a right one.

    The published code measures G by a backward pass through one matrix for each right rollout of a first stage. Here G
    is sqrt(mean energy of right rollouts), from forward passes only; if none is known, the pool's. p is the success
    rate of the prompt's earlier rollouts in place of a first stage; without history it is the pool's.
    """

    def variance(self, prompts: Statistics, pool: Statistics) -> np.ndarray:
        """What the counts are proportional to, float64 [N]."""
        p = observed_rate(prompts, pool)
        right, _ = measured_energies(prompts, pool)
        safe = np.where(p > 0, p, 1.0)
        return np.where(p > 0, np.sqrt(right / (safe + GVM_ALPHA / safe ** (GVM_BETA - 1))), 0.0)

    def counts(self, prompts: Statistics, variance: np.ndarray, budget: int, low: int, high: int) -> np.ndarray:
        return proportional(variance, budget, low, high)


class Cures(Gvm):
    """CurES's (arXiv 2510.01037, equation 127; code ZexuSun/CurES): n ~ sigma, sigma^2 = p q^2 E1[G^2] + p^2 q E0[G^2]
    - p^2 q^2 (E1[G] - E0[G])^2, q = 1 - p, G gradient norms of right (1) and of wrong (0) rollouts; a prompt that was
    always right or always wrong has sigma 0.

    The published code measures norms by backward passes once, before training. Here E[G^2] is the mean energy of
    earlier rollouts (the pool's if none is known) and E[G] its root, so sigma = sqrt(p q) (q G1 + p G0). p is as in
    `Gvm`. The method's selection of prompts is not implemented.
    """

    def variance(self, prompts: Statistics, pool: Statistics) -> np.ndarray:
        """sigma, float64 [N]."""
        p = observed_rate(prompts, pool)
        right, wrong = (np.sqrt(energy) for energy in measured_energies(prompts, pool))
        return np.sqrt(p * (1 - p)) * ((1 - p) * right + p * wrong)


def observed_rate(prompts: Statistics, pool: Statistics) -> np.ndarray:
    """Successes / rollouts of each prompt, float64 [N]; without history their mean over the pool, 1/2 without one."""
    unknown = np.full(len(prompts), (pool.successes / pool.trials).mean() if len(pool) else 0.5)
    return np.divide(prompts.successes, prompts.trials, out=unknown, where=prompts.trials > 0)


BUILT_IN = {
    "uniform": Uniform,
    "waterfill": Waterfill,
    "neyman": Neyman,
    "knapsack": Knapsack,
    "gvm": Gvm,
    "cures": Cures,
}


def load_allocator(kind: str) -> type[Allocator]:
    """The class that `algorithm.allocation.kind` names: a built-in one or the user's. Raises ValueError (one line)."""
    if kind in BUILT_IN:
        return BUILT_IN[kind]
    found = load_callable(kind, "algorithm.allocation.kind")
    if not (isinstance(found, type) and issubclass(found, Allocator)):
        raise InputError(
            f"algorithm.allocation.kind: {kind!r} is no allocator; "
            "derive the class from dynamo_megatron.algorithm.allocators.Allocator"
        )
    return found


LEAST_PRIORITY = 1e-8  # at or below it a prompt takes no part in the published proportional share


def checked(values: Array, name: str, least: int, low: int, high: int) -> np.ndarray:
    """`values` as float64 [N]. Raises ValueError naming the bounds or the entry that is negative or not finite."""
    if not least <= low <= high:
        raise ValueError(
            f"rollout_n_min: {low}, rollout_n_max: {high}; expected {least} <= rollout_n_min <= rollout_n_max"
        )
    return finite(values, name, 0.0)


def spread(prompts: int, budget: int) -> np.ndarray:
    """The budget spread evenly, int64 [prompts]; the remainder goes to the lower indices."""
    return budget // prompts + (np.arange(prompts) < budget % prompts).astype(np.int64)


def settle(n: np.ndarray, budget: int, low: int, high: int) -> np.ndarray:
    """Clips `n` to the bounds, then adds or removes rollouts one by one in index order, in turn, until the sum is
    `budget`."""
    n = np.clip(n, low, high)
    while missing := budget - int(n.sum()):
        step = 1 if missing > 0 else -1
        room = np.flatnonzero(n < high if step > 0 else n > low)
        n[room[: abs(missing)]] += step
    return n


def largest_gains(
    gain: Callable[[np.ndarray], np.ndarray], prompts: int, budget: int, low: int, high: int
) -> np.ndarray:
    """The counts of N prompts that maximise a sum of concave values: int64 [N], sum `budget`, low <= n <= high.

    `gain`: numbers of rollouts, float64 [1, M] -> the value of one more rollout of each prompt, float64 [N, M], falling
    with the number. Takes the largest gains one by one, ties by the lower index. The caller ensures N low <= budget <=
    N high.
    """
    left = budget - low * prompts
    further = min(high - low, left)  # of any one prompt
    if further <= 0:
        return np.full(prompts, low, np.int64)
    gains = gain(low + np.arange(further, dtype=np.float64)[None]).ravel()
    threshold = np.partition(gains, gains.size - left)[gains.size - left]
    above, tied = np.flatnonzero(gains > threshold), np.flatnonzero(gains == threshold)
    taken = np.concatenate([above, tied])[:left] // further
    return low + np.bincount(taken, minlength=prompts).astype(np.int64)


def proportional(weight: np.ndarray, budget: int, low: int, high: int) -> np.ndarray:
    """int64 [N], sum `budget`, low <= n <= high, n as nearly in proportion to `weight` >= 0 as that allows.

    Takes the largest weight_i / (n_i + 1/2) one by one (Sainte-Lague), ties by the lower index. What the others have no
    room for goes to the prompts of weight 0 in turn. The caller ensures N low <= budget <= N high.
    """
    least = weight[weight > 0].min() if weight.any() else 1.0
    share = np.where(weight > 0, weight, least / (2 * high + 1))[:, None]  # after all others have `high`
    return largest_gains(lambda n: share / (n + 0.5), len(weight), budget, low, high)


def neyman(variance: Array, budget: int, rollout_n_min: int, rollout_n_max: int) -> Array:
    """The exact integer minimiser of sum_i variance_i / n_i, int64 [N] (Neyman allocation, integer and bounded).

    sum n = budget clipped to [N rollout_n_min, N rollout_n_max], rollout_n_min <= n_i <= rollout_n_max. One rollout
    more for prompt i gains variance_i / (n (n + 1)), which falls with n, so taking the largest gains one by one is
    optimal; ties go to the lower index. Prompts of variance 0 get what the others have no room for, in index order.
    Raises ValueError for bounds that contradict each other or a variance that is negative or not finite.
    """
    v = checked(variance, "variance", 1, rollout_n_min, rollout_n_max)
    budget = min(max(budget, len(v) * rollout_n_min), len(v) * rollout_n_max)
    gain = lambda n: v[:, None] / (n * (n + 1))  # noqa: E731
    return like(largest_gains(gain, len(v), budget, rollout_n_min, rollout_n_max), variance)


def waterfill(
    sample_counts: Array,
    priority: Array,
    total_rollout_n: int,
    rollout_n_min: int,
    rollout_n_max: int,
    initial_budget: int,
) -> Array:
    """The allocation of the published code (GithubX-F/DynaMO-RL), kept within its bounds; int64 [N].

    `sample_counts`: the rollouts of each prompt so far. `priority` >= 0: what a prompt's share is proportional to. sum
    n = total_rollout_n clipped to [N rollout_n_min, N rollout_n_max]. First every prompt is brought to
    max(rollout_n_min, initial_budget) samples, then to the lower bound, then the rest is shared by priority. At last
    rollouts are added or removed one by one in index order until the sum fits (the published code breaks the bounds
    there). Raises ValueError for bounds or lengths that contradict each other and for entries that are negative or not
    finite.
    """
    share = checked(priority, "priority", 0, rollout_n_min, rollout_n_max)
    seen = finite(sample_counts, "sample_counts", 0.0)
    if seen.shape != share.shape:
        raise ValueError(f"sample_counts: {len(seen)} entries for {len(share)} priorities")
    low, high = rollout_n_min, rollout_n_max
    budget = min(max(total_rollout_n, len(share) * low), len(share) * high)

    need = np.clip(max(low, initial_budget) - np.floor(seen).astype(np.int64), 0, high)
    n = need if need.sum() <= budget else np.maximum(need * budget // need.sum(), low)
    for _ in range(int(n.sum()) - budget):
        n[np.argmax(n)] -= 1
    short = np.maximum(0, low - n)
    rest = budget - int(n.sum())
    if short.any():
        n = n + (short if short.sum() <= rest else short * rest // short.sum())
    n = _share_by_priority(n, share, budget, high)
    return like(settle(n, budget, low, high), priority)


def _share_by_priority(n: np.ndarray, priority: np.ndarray, budget: int, high: int) -> np.ndarray:
    """Shares the rest in proportion to priority by largest remainders, capped at `high`, until no prompt has room."""
    n = n.copy()
    while (rest := budget - int(n.sum())) > 0:
        open_ = np.flatnonzero((n < high) & (priority > LEAST_PRIORITY))
        if not len(open_):
            break
        exact = rest * (priority[open_] / priority[open_].sum())
        whole = np.floor(exact).astype(np.int64)
        largest = np.argsort(-(exact - whole), kind="stable")[: max(0, rest - int(whole.sum()))]
        whole[largest] += 1
        n[open_] = np.minimum(n[open_] + whole, high)
    return n
