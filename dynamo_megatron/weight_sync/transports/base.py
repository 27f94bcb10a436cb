"""The interface of a transport, which weight_sync/push.py calls, and the code that streaming transports share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from dynamo_megatron.rollout.servers.endpoint import Endpoint
from dynamo_megatron.rollout.servers.server_api import close_session, open_session, set_version
from dynamo_megatron.weight_sync.schedule import Bucket


class Transport(Protocol):
    """One way to send weights to servers. Calls for different servers come from different threads, calls for one server
    one at a time.

    Whatever goes wrong with one server raises ServerError, RuntimeError or OSError; after that only `forget` is called
    for it in this push. A method that a transport does not need does nothing.
    """

    def prepare(self) -> None:
        """Rank 0, at the start of a push, before any server is notified."""

    def begin(self, endpoint: Endpoint) -> None:
        """Rank 0: tells the server that weights are coming."""

    def connect(self, endpoint: Endpoint) -> None:
        """Every sender, one after the other: links to this incarnation of the server. The link is kept for later
        pushes."""

    @abstractmethod
    def stage(self, number: int, tensors: Mapping[str, torch.Tensor]) -> int:
        """A sender: makes bucket `number` ready for all servers; returns the bytes written for all of them together."""

    @abstractmethod
    def turn(
        self, turn: int, buckets: Sequence[Bucket], own: Bucket | None, endpoints: Sequence[Endpoint]
    ) -> list[Endpoint]:
        """Every rank, `len(buckets)` times a round: returns the servers to which it sends in this turn. In one turn a
        server receives from one rank, and in all turns it receives every bucket once. `own`: this rank's bucket of the
        round."""

    @abstractmethod
    def send(self, endpoint: Endpoint) -> int:
        """Sends the turn's bucket to one server; returns the bytes sent to it alone."""

    @abstractmethod
    def finish(self, endpoint: Endpoint, version: int) -> None:
        """Rank 0, after all buckets: has the server run the new weights under `version`, with no cached prefix left."""

    def forget(self, endpoint: Endpoint) -> None:
        """A sender: drops the link to a server that has failed."""

    def end(self) -> None:
        """Every rank, at the end of a push: frees memory that only the push needed."""

    def close(self) -> None:
        """Every rank, at the end of the run."""


def rotate(turn: int, buckets: Sequence[Bucket], own: Bucket | None, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
    """Returns the servers of a turn. Senders go round the servers, so that in one turn they send to different ones."""
    if own is None:
        return []
    return [e for place, e in enumerate(endpoints) if (place + turn) % len(buckets) == buckets.index(own)]


class Streamed(Transport):
    """The part of transports that send bucket by bucket into an update session."""

    def begin(self, endpoint: Endpoint) -> None:
        open_session(endpoint)

    def turn(
        self, turn: int, buckets: Sequence[Bucket], own: Bucket | None, endpoints: Sequence[Endpoint]
    ) -> list[Endpoint]:
        return rotate(turn, buckets, own, endpoints)

    def finish(self, endpoint: Endpoint, version: int) -> None:
        close_session(endpoint)
        set_version(endpoint, version)
