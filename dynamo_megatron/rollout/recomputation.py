"""Recomputes logprobs that a server reported while it still has the weights that it reported them for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dynamo_megatron.algorithm.rejection import SHORTEST, mean_gaps
from dynamo_megatron.rollout.client import Response, SGLangClient

TOKENS = SHORTEST  # recomputed for each server and push


@dataclass(frozen=True)
class Sampled:
    """What a server sampled: `response`, after the tokens `inputs`."""

    inputs: Sequence[int]
    response: Response

    def indices(self, version: int) -> list[int]:
        """Up to TOKENS indices of the response, evenly spaced over the tokens whose weights were `version`."""
        spans = [range(start, end) for named, start, end in self.response.weight_versions if named == version]
        tokens = [i for span in spans for i in span]
        places = np.unique(np.linspace(0, len(tokens) - 1, TOKENS).round().astype(int)) if tokens else []
        return [tokens[place] for place in places]


async def recomputed_gap(client: SGLangClient, sampled: Sampled, version: int, timeout: float) -> float | None:
    """Returns the mean |reported - recomputed logprob|, nats, over some of the tokens whose weights were `version`,
    which the server has; None without such tokens. Fewer than SHORTEST tokens count as SHORTEST, as in `rejections`.

    Each logprob is that of the first token sampled after the tokens before it, so it has the temperature of the
    rollouts. Raises RolloutError where no answer comes within `timeout` seconds.
    """
    indices = sampled.indices(version)
    if not indices:
        return None
    tokens = sampled.response.tokens

    async def again(index: int) -> float:
        return await client.next_logprob([*sampled.inputs, *tokens[:index]], tokens[index], timeout)

    last = await again(indices[-1])  # first: the others read its KV cache
    recomputed = [*await asyncio.gather(*map(again, indices[:-1])), last]
    reported = [sampled.response.logprobs[index] for index in indices]
    return float(mean_gaps(np.asarray(recomputed), np.asarray(reported), np.asarray([len(indices)]))[0])
