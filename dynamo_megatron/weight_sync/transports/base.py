"""The interface of a transport, which weight_sync/sync.py calls; its defaults are those of transports that stream."""

from __future__ import annotations

import base64
import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch

from dynamo_megatron.rollout.servers.server_api import (
    CONTROL_TIMEOUT,
    TRANSFER_TIMEOUT,
    Endpoint,
    call,
    open_session,
    set_version,
)
from dynamo_megatron.weight_sync.schedule import Bucket


class Transport(ABC):
    """One way to send weights to servers. Calls for different servers come from different threads, calls for one server
    one at a time. What goes wrong with a server raises ServerError, RuntimeError or OSError; after that only `forget`
    is called for it in this sync.
    """

    stages_ahead = False  # whether a round's bucket may be staged during the last turn of the round before

    def prepare(self) -> None:  # noqa: B027  as others below: most transports have nothing to do
        """Rank 0, at the start of a sync, before any server is notified."""

    def begin(self, endpoint: Endpoint) -> None:
        """Rank 0: tells the server that weights are coming."""
        open_session(endpoint)

    @abstractmethod
    def stage(self, number: int, tensors: Mapping[str, torch.Tensor]) -> int:
        """A sender: makes bucket `number` ready for all servers, from the next turn 0 on; returns the bytes written for
        all of them together."""

    def turn(
        self, turn: int, buckets: Sequence[Bucket], own: Bucket | None, endpoints: Sequence[Endpoint]
    ) -> list[Endpoint]:
        """Every rank, `len(buckets)` times a round: returns the servers to which it sends in this turn, so that each
        receives from one rank in a turn, and every bucket once. `own`: this rank's bucket of the round."""
        if own is None:
            return []
        return [e for place, e in enumerate(endpoints) if (place + turn) % len(buckets) == buckets.index(own)]

    @abstractmethod
    def send(self, endpoint: Endpoint) -> int:
        """Sends the turn's bucket to one server; returns the bytes sent to it alone."""

    def finish(self, endpoint: Endpoint, version: int) -> None:
        """Rank 0, after all buckets: has the server run the new weights under `version`, with no cached prefix left."""
        call(endpoint, "/end_weight_update", {}, CONTROL_TIMEOUT)
        set_version(endpoint, version)

    def forget(self, endpoint: Endpoint) -> None:  # noqa: B027
        """A sender: drops the link to a server that has failed."""

    def end(self) -> None:  # noqa: B027
        """Every rank, at the end of a sync: frees memory that only the sync needed."""

    def close(self) -> None:  # noqa: B027
        """Every rank, at the end of the run."""


def pickled(tensor: torch.Tensor, metadata: Sequence[Any], pickler: type[ForkingPickler] = ForkingPickler) -> str:
    """A flat buffer's tensor as a handle of shared memory for one server rank, which maps it. SGLang takes any object
    with the attributes of its FlattenedTensorMetadata, which cannot be imported here."""
    raw = io.BytesIO()
    pickler(raw).dump({"flattened_tensor": tensor, "metadata": metadata})
    return base64.b64encode(raw.getvalue()).decode()


def send_handles(endpoint: Endpoint, handles: Sequence[str]) -> None:
    payload = {"serialized_named_tensors": handles, "load_format": "flattened_bucket", "flush_cache": False}
    call(endpoint, "/update_weights_from_tensor", payload, TRANSFER_TIMEOUT)


class FlatBuffer:
    """A bucket's tensors end to end in one uint8 buffer, as SGLang's `flattened_bucket` load format has them. It is
    filled again and again; `make(nbytes)` allocates it when it must grow."""

    def __init__(self, make: Callable[[int], torch.Tensor]):
        self._make = make
        self._whole: torch.Tensor | None = None
        self.tensors: list[SimpleNamespace] = []  # name, shape, dtype; start_idx, end_idx, numel in bytes

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copies the tensors in, one after the other; each once."""
        total = sum(tensor.nbytes for tensor in tensors.values())
        if self._whole is None or self._whole.numel() < total:
            self._whole = None  # free the old buffer first
            self._whole = self._make(total)
        self.used = self._whole[:total]
        self.tensors, start = [], 0
        for name, tensor in tensors.items():
            end = start + tensor.nbytes
            self.used[start:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            place = {"start_idx": start, "end_idx": end, "numel": tensor.nbytes}
            self.tensors.append(SimpleNamespace(name=name, shape=tensor.shape, dtype=tensor.dtype, **place))
            start = end

    def description(self) -> dict[str, list[Any]]:
        """Returns names, dtypes and shapes as /update_weights_from_distributed takes them."""
        return {
            "names": [t.name for t in self.tensors],
            "dtypes": [str(t.dtype).removeprefix("torch.") for t in self.tensors],
            "shapes": [list(t.shape) for t in self.tensors],
        }
