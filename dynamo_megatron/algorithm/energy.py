"""The energy of a rollout, and its dependence on the reward.

It is the squared norm of the gradient of a response's logprob with respect to the logits,
sum_t (1 - 2 pi_t + sum_v pi_v^2), pi_t the probability of the sampled token: W of arXiv 2602.07078.
"""

from __future__ import annotations

import math

import numpy as np

RATIO_RANGE = (1.0, 8.0)  # of the energies of wrong over right rollouts; measured: 2 to 8
PRIOR_ROLLOUTS = 2.0  # added at each of the rewards 0 and 1, with the mean energy: a few rollouts are not enough


def token_energies(logprobs: np.ndarray, collision: np.ndarray) -> np.ndarray:
    """1 - 2 pi + sum_v pi_v^2, float64 [R], from logprobs (natural log) and sum_v pi_v^2, float [R]."""
    # Rounding can make the energy of a token of probability 1 slightly negative.
    return np.maximum(1 - 2 * np.exp(logprobs.astype(np.float64)) + collision, 0)


def rollout_energies(logprobs: np.ndarray, collision: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """float64 [S]: the sum of the energies of each response's tokens; 0 for a response without tokens.

    `logprobs`, `collision`: as `token_energies`, through the responses of `lengths` (int [S], tokens) in order.
    """
    owner = np.repeat(np.arange(len(lengths)), lengths)
    return np.bincount(owner, weights=token_energies(logprobs, collision), minlength=len(lengths))


def token_baselines(
    rewards: np.ndarray, group: np.ndarray, energies: np.ndarray, lengths: np.ndarray, singleton: str
) -> np.ndarray:
    """The optimal token baseline (arXiv 2602.07078, as verl computes it) of each response token, float64 [R].

    B_t = sum_i r_i W_it / sum_i W_it over the group's responses of at least t tokens, W_it the energy of response i's
    first t tokens. Tokens that no other response of the group reaches have the baseline 0, and a group of one its
    reward with `singleton` "zero". `rewards`, `group`, `lengths` (tokens): [S]; `energies`: float64 [R].
    """
    owner = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.cumsum(lengths) - lengths
    place = np.arange(len(owner)) - starts[owner]
    total = np.cumsum(energies)
    so_far = total - (total - energies)[starts[owner]]  # W
    longest = int(lengths.max(initial=0))
    cell = group[owner] * longest + place
    weight = np.bincount(cell, so_far)
    baseline = (np.bincount(cell, so_far * rewards[owner]) / (weight + 1e-8))[cell]
    alone = np.bincount(cell)[cell] == 1
    size = np.bincount(group)[group][owner]
    baseline = np.where(alone, 0.0, baseline)
    return np.where((size == 1) & (singleton == "zero"), rewards[owner], baseline)


class EnergyLine:
    """The regression of energy on reward over all rollouts observed; older rollouts count less.

    For rewards of 0 and 1 the line's values at 0 and 1 are the mean energies of wrong and of right rollouts.
    """

    def __init__(self, sums: np.ndarray | None = None, outside: int = 0) -> None:
        """`sums`: float64 [5], weighted sums over rollouts of 1, r, r^2, S and r S (r the reward, S the energy).
        `outside`: rollouts with a reward outside [0, 1]; these are never forgotten."""
        self.sums = np.zeros(5) if sums is None else sums
        self.outside = outside

    def after(self, rewards: np.ndarray, energies: np.ndarray, keep: float) -> EnergyLine:
        """Returns the line with rollouts added, float64 [S] each; earlier rollouts' weight is multiplied by `keep`."""
        fresh = [np.ones_like(rewards), rewards, rewards**2, energies, rewards * energies]
        exact = [math.fsum(x.tolist()) for x in fresh]  # whatever the order of the rollouts
        outside = self.outside + int(((rewards < 0) | (rewards > 1)).sum())
        return EnergyLine(keep * self.sums + np.array(exact), outside)

    @property
    def score_ratio(self) -> float:
        """S(0) / S(1) on the line, clamped to RATIO_RANGE; 1 if nothing was observed, or a reward outside [0, 1]."""
        least, most = RATIO_RANGE
        count, r, rr, s, rs = self.sums
        if self.outside:
            return 1.0
        if s <= 0:
            return least
        mean = s / count
        count, r, rr = count + 2 * PRIOR_ROLLOUTS, r + PRIOR_ROLLOUTS, rr + PRIOR_ROLLOUTS
        s, rs = s + 2 * PRIOR_ROLLOUTS * mean, rs + PRIOR_ROLLOUTS * mean
        slope = (count * rs - r * s) / (count * rr - r * r)  # the prior rollouts keep this positive
        at_0 = (s - slope * r) / count
        at_1 = at_0 + slope
        if at_0 <= 0:
            return least
        return float(min(max(at_0 / at_1, least), most)) if at_1 > 0 else most
