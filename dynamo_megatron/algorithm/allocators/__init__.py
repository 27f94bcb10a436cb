"""The allocators, built in and loaded by name: who gets how many rollouts. Their arithmetic is in `solvers.py`.

`variance` and `counts` of an allocator are pure functions of the statistics, never of random numbers, the time or
earlier calls. So a resumed run and a replay give the same counts. `testing.check_allocator` tests all that is required.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from dynamo_megatron.algorithm.allocators.solvers import largest_gains, priced, proportional, spread, waterfill
from dynamo_megatron.algorithm.history import Statistics
from dynamo_megatron.algorithm.success import expected_variance, measured_energies, success_rate, success_variance
from dynamo_megatron.config import AllocationConfig
from dynamo_megatron.errors import InputError
from dynamo_megatron.runtime.user_code import load_callable

# The published priority of solved prompts, those with at least this success rate, is this variance.
SOLVED_RATE, SOLVED_VARIANCE = 0.85, 0.01
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
    optimum of the theory (DynaMO, arXiv 2602.19208), with integer counts and bounds, also with prices."""

    def variance(self, prompts: Statistics, pool: Statistics) -> np.ndarray:
        variance = super().variance(prompts, pool)
        return variance + self.config.variance_floor * variance.mean()

    def counts(
        self,
        prompts: Statistics,
        variance: np.ndarray,
        budget: float,
        low: int,
        high: int,
        price: np.ndarray | None = None,
    ) -> np.ndarray:
        """As the other allocators'; with `price`, float64 [N], as `priced`."""
        even = np.ones(len(prompts))
        # Without a variance all counts are equally good: spread evenly, not to the lower indices first.
        return priced(variance if variance.any() else even, even if price is None else price, budget, low, high)


class Waterfill(Allocator):
    """The published code's (GithubX-F/DynaMO-RL): shares the budget in proportion to sigma or, as published, sigma^2
    (`power`)."""

    forgets = False

    def variance(self, prompts: Statistics, pool: Statistics) -> np.ndarray:
        """The priority, float64 [N]."""
        # Fewer than two rollouts have no variance: the priority is 0, and `initial_budget` provides rollouts.
        variance = np.nan_to_num(success_variance(prompts.successes, prompts.trials))
        solved = prompts.successes / np.maximum(prompts.trials, 1) >= SOLVED_RATE
        priority = np.where(solved, SOLVED_VARIANCE, variance)
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
        return largest_gains(lambda n: p * q * q * (p**n * q + q**n * p), np.ones(len(p)), budget, low, high)


class Cero(Allocator):
    """Gives rollouts to the prompts that have had too few over the whole run (CERO, arXiv 2606.05606): maximises
    sum v_i (x_i + n_i) / (x_i + n_i + 1), x_i the rollouts of prompt i so far, v_i its expected p(1-p).

    The paper has a concave, saturating utility of a prompt's rollouts over all epochs, scaled by E[p(1-p)] under a Beta
    posterior, and prices for the prompts and the run's budget that are updated by projected gradient steps. Its text
    was not at hand, so form and constants are ours: v x / (x + 1), whose optimum gives every prompt rollouts over the
    whole run in proportion to sqrt(v). Here the step's budget is fixed and is used up exactly, which needs no prices.
    """

    forgets = False

    def counts(self, prompts: Statistics, variance: np.ndarray, budget: int, low: int, high: int) -> np.ndarray:
        value = (variance if variance.any() else np.ones(len(variance)))[:, None]
        after = prompts.trials[:, None] + 1
        return largest_gains(lambda n: value / ((after + n) * (after + n + 1)), np.ones(len(value)), budget, low, high)


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
    """Successes / rollouts of each prompt, float64 [N]; without history the pool's, and without a pool 1/2."""
    trials = pool.trials.sum()
    unknown = np.full(len(prompts), pool.successes.sum() / trials if trials > 0 else 0.5)
    return np.divide(prompts.successes, prompts.trials, out=unknown, where=prompts.trials > 0)


BUILT_IN = {
    "uniform": Uniform,
    "waterfill": Waterfill,
    "neyman": Neyman,
    "knapsack": Knapsack,
    "cero": Cero,
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
