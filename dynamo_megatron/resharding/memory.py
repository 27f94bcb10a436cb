"""Servers and training ranks that share GPUs take turns with their memory.

Only the training side has run, and on CPU tensors; of the server's side the calls alone, on a CPU server that frees
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dynamo_megatron.policy.offload import PARTS, Offload
from dynamo_megatron.policy.policy import Policy
from dynamo_megatron.resharding.server_api import CONTROL_TIMEOUT, ServerError, call
from dynamo_megatron.rollout.endpoint import Endpoint

CACHES = ("kv_cache", "cuda_graph")
TAGS = ("weights", *CACHES)  # in the order in which they come back
# What is on the device in each phase: the server's tags, the training side's parts. A server that has released its
# weights has lost them: from `training` the way to the others is a push.
PHASES = {
    "generate": (TAGS, ()),
    "weights": (("weights",), ("weights",)),  # logprobs, while more may be generated; and a push
    "train": ((), PARTS),
    "save": (("weights",), PARTS),
}


@dataclass
class Moved:
    """Since the last report. Bytes are of this rank's GPU, the server's only as far as CUDA tells."""

    seconds: float = 0.0
    released: int = 0  # by the training side
    resumed: int = 0
    server_released: int = 0
    server_resumed: int = 0


class MemoryTurns:
    """Every rank's. `say` tells rank 0's user of a server that did not do its part; None elsewhere."""

    def __init__(self, policy: Policy, say: Callable[[str], None] | None):
        self._layout, self._offload, self._say = policy.layout, Offload(policy), say
        self._released: dict[Endpoint, set[str]] = {}  # rank 0's: what each known server lacks
        self.moved = Moved()

    def know(self, endpoints: Sequence[Endpoint]) -> None:
        """The servers there are now. One that has restarted has all its memory."""
        self._released = {e: self._released.get(e, set()) for e in endpoints}

    def enter(self, phase: str) -> None:
        """Collective over all ranks: what the phase does not need is released everywhere, then the rest comes back."""
        start, (tags, parts) = time.monotonic(), PHASES[phase]
        free = _free_bytes()
        self._ask("release", [t for t in TAGS if t not in tags])
        self._all_done()
        self.moved.server_released += max(0, _free_bytes() - free)
        self.moved.released += self._offload.release([p for p in PARTS if p not in parts])
        self._all_done()
        self.moved.resumed += self._offload.resume(parts)
        free = _free_bytes()
        self._ask("resume", tags)
        self._all_done()
        self.moved.server_resumed += max(0, free - _free_bytes())
        self.moved.seconds += time.monotonic() - start

    def report(self) -> Moved:
        """What was moved since the last report."""
        moved, self.moved = self.moved, Moved()
        return moved

    def _ask(self, what: str, tags: Sequence[str]) -> None:
        """Of every server that still has, or lacks, some of `tags`: SGLang dies of being asked twice."""
        for endpoint, released in self._released.items():
            due = [t for t in tags if (t in released) == (what == "resume")]
            if not due:
                continue
            try:
                call(endpoint, f"/{what}_memory_occupation", {"tags": due}, CONTROL_TIMEOUT)
            except ServerError as error:  # a restart mends it
                self._say(f"{endpoint.name} did not {what} its memory: {error}")
            released.symmetric_difference_update(due)

    def _all_done(self) -> None:
        dist.barrier(group=self._layout.host)


def memory_metrics(ranks: Sequence[Moved]) -> dict[str, float]:
    """Of a step: bytes over all ranks, and the slowest rank's seconds."""
    names = ("released", "resumed", "server_released", "server_resumed")
    return {
        **{f"memory/{name}_bytes": sum(getattr(moved, name) for moved in ranks) for name in names},
        "time/memory": max(moved.seconds for moved in ranks),
    }


def _free_bytes() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
