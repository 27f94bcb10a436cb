"""A penalty on responses near the length limit, added to rewards before advantages (DAPO, arXiv 2503.14476)."""

from __future__ import annotations

import numpy as np

from dynamo_megatron.algorithm.arrays import Array, like, to_numpy


def overlong_penalty(lengths: Array, max_length: int, buffer: float, most: float) -> Array:
    """Returns the value to add to each reward, float64 [S]: 0 up to the buffer, falling to -`most` at `max_length`
    (Eq. 13).

    lengths: int [S], response tokens. The buffer is the last share `buffer` (0 to 1) of `max_length` tokens. A
    truncated response has max_length tokens, so it gets -`most`. `most` is 1 in the paper, whose rewards are -1 and 1;
    0.5 has the same effect with rewards of 0 and 1.
    """
    tokens = buffer * max_length
    excess = to_numpy(lengths, "lengths") - (max_length - tokens)
    return like(most * np.clip(-excess / tokens, -1.0, 0.0), lengths)
