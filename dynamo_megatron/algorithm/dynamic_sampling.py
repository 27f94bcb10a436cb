"""Which groups have a gradient: DAPO's dynamic sampling (arXiv 2503.14476, Eq. 11)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from dynamo_megatron.algorithm.arrays import Array, group_index, to_numpy


def informative(rewards: Array, group_ids: Sequence[Hashable]) -> np.ndarray:
    """Whether a rollout's group has different rewards, bool [S]. In other groups reward minus group mean is always 0.

    rewards: float [S]. DAPO keeps the groups in which some rollouts succeed and some do not, which is the same for
    rewards of 0 and 1.
    """
    values = to_numpy(rewards, "rewards")
    index, groups = group_index(group_ids, len(values))
    low, high = np.full(groups, np.inf), np.full(groups, -np.inf)
    np.minimum.at(low, index, values)
    np.maximum.at(high, index, values)
    return (low < high)[index]
