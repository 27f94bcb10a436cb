"""Which updates are skipped, or end the run, since their gradient is far larger than earlier ones (`optimizer.spike`).

The history holds the norms of all updates, including skipped ones: if gradients stay large, the median follows after
half a window. Norms of 0 (no gradient) do not count.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dynamo_megatron.config import SpikeConfig
from dynamo_megatron.errors import StatedError

if TYPE_CHECKING:  # this module needs no Megatron
    from dynamo_megatron.policy.layout import Layout

SPIKES = "spikes"  # name in a checkpoint's state


class GradientSpike(StatedError):
    """`optimizer.spike.action` is `stop`, and an update's gradient norm is above the limit."""


class Spikes:
    """Every rank has one. Rank 0's decides for all ranks, and only its state is in a checkpoint."""

    def __init__(self, config: SpikeConfig):
        self._config = config
        self._norms: deque[float] = deque(maxlen=config.window)

    def observe(self, norm: float) -> str | None:
        """Adds the norm of an update to the history. Returns why the update is a spike, or None if it is not."""
        full = len(self._norms) == self._config.window
        median = statistics.median(self._norms) if full else math.inf
        if norm > 0:
            self._norms.append(norm)
        if norm <= self._config.above * median:
            return None
        return (
            f"gradient norm {norm:g} is above {self._config.above:g} times the median of the last "
            f"{self._config.window} updates, {median:g} (optimizer.spike)"
        )

    def on_all_ranks(self, norm: float, layout: Layout) -> bool:
        """Whether the update with gradient norm `norm` is to be skipped: rank 0's decision, on every rank. Collective
        over all ranks. Raises GradientSpike on every rank with action `stop`."""
        decision = [self.observe(norm) if layout.rank == 0 else None]
        dist.broadcast_object_list(decision, src=0, group=layout.host)
        if decision[0] is not None and self._config.action == "stop":
            raise GradientSpike(f"{decision[0]}; the optimizer step was not made")
        return decision[0] is not None

    def state_dict(self) -> dict[str, Any]:
        return {"norms": list(self._norms)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._norms.extend(state["norms"])
