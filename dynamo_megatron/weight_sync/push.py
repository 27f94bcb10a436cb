"""The push: sends the policy's weights to every server, checks that they arrived, and measures the pause.

Rank 0 takes the servers out of the rotation; the schedule's senders send their buckets, each server receiving from one
sender at a time; rank 0 ends the update, compares the servers' checksums with the weights sent and returns the
outcomes. A server that fails during the push is left out of the rest of it: its outcome is a message.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from dynamo_megatron.models.fp8 import dequantized
from dynamo_megatron.policy.policy import Policy
from dynamo_megatron.rollout.result import PushNeeded
from dynamo_megatron.rollout.servers.endpoint import Endpoint
from dynamo_megatron.rollout.servers.server_api import CHECK_TIMEOUT, ServerError
from dynamo_megatron.rollout.worker import RolloutWorker
from dynamo_megatron.runtime.coordination import Coordinator
from dynamo_megatron.runtime.threads import for_each
from dynamo_megatron.weight_sync.gather import BucketSource
from dynamo_megatron.weight_sync.proof import (
    Expected,
    ExpectedChecksums,
    mismatch,
    proved_layers,
    server_device,
)
from dynamo_megatron.weight_sync.schedule import Bucket, floor_bytes, make_schedule
from dynamo_megatron.weight_sync.transports import Machine, choose_transport
from dynamo_megatron.weight_sync.transports.base import Transport
from dynamo_megatron.weight_sync.transports.disk import DiskTransport
from dynamo_megatron.weight_sync.transports.group import GroupTransport
from dynamo_megatron.weight_sync.transports.ipc import IpcTransport
from dynamo_megatron.weight_sync.transports.tensor import TensorTransport

T = TypeVar("T")


@dataclass(frozen=True)
class PushReport:
    """The same on every rank. Without servers, all 0."""

    seconds: float = 0.0  # of it all, with the wait for a first server where none is up
    pause_seconds: float = 0.0  # of these, while the servers rested: once begin_push has them, until end_push is done
    proof_seconds: float = 0.0  # of these, asking the servers for their checksums, before and after
    bytes: int = 0  # written for all servers together, and sent to each rank of each
    floor_bytes: int = 0  # every server rank's own parameters, once
    needed: str = ""  # why no server took the weights, where none did

    def __add__(self, other: PushReport) -> PushReport:
        """Two pushes one after the other, as one that came to what `other` did."""
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "needed"}
        return PushReport(**sums, needed=other.needed)


class WeightPusher:
    """Made once by all ranks. `rollout` is rank 0's; None elsewhere, and where a run has no servers.

    Raises ValueError where `rollout.sync` asks for what cannot work here.
    """

    def __init__(self, policy: Policy, rollout: RolloutWorker | None, coordinator: Coordinator):
        self._policy, self._rollout, self._coordinator = policy, rollout, coordinator
        self._layout, self._config = policy.layout, policy.config.rollout
        self._itemsize = getattr(torch, policy.config.model.dtype).itemsize
        sync, ranks = self._config.sync, self._layout.world_size
        self.schedule = make_schedule(
            policy.spec,
            policy.config.parallel,
            ranks,
            bucket_bytes=sync.bucket_bytes,
            itemsize=self._itemsize,
            quantization=self._config.quantization,
        )
        self._source = BucketSource(policy, self.schedule)
        hosts = len(set(self._layout.gather(socket.gethostname())))
        self._transport = self._make(choose_transport(self._config, Machine(torch.cuda.is_available(), hosts)))
        self._connected: set[Endpoint] = set()
        self._endpoints: list[Endpoint] = []
        self._known: set[Endpoint] = set()  # of the last push
        self._proved: dict[int, Expected | None] = {}  # on rank 0, by tp: the checksums of the last push
        self._took: set[Endpoint] = set()  # on rank 0: the servers that have these weights
        self._devices: dict[Endpoint, str] = {}  # those asked; an incarnation does not change its device

    def push(
        self, version: int, on_poll: Callable[[], None] | None = None, on_wait: Callable[[], None] | None = None
    ) -> PushReport:
        """Brings every server to the policy's weights under `version`. Collective over all ranks.

        `on_poll` is called on every rank while servers work, `on_wait` on rank 0 while it waits for one to be up; they
        may raise. If no server took the weights but some will restart, the report says why. Raises RolloutError;
        OSError if the disk is full.
        """
        start = time.monotonic()
        endpoints, device = self._on_rank_0("begin", partial(self._begin, version, on_wait))
        paused = time.monotonic()
        self._endpoints = endpoints
        if not endpoints:
            return PushReport()
        under_way = _Push(endpoints)
        layers = self._to_prove(version, endpoints)
        expected = {
            tp: ExpectedChecksums(self._policy.spec, tp, device, layers)
            for tp in {e.tp for e in endpoints if layers is not None}
        }
        self._open(under_way, on_poll)
        for number, buckets in enumerate(self.schedule.rounds):
            self._round(number, buckets, under_way, expected, on_poll)
        self._transport.end()
        sums = {tp: checksums.gather(self._layout.host) for tp, checksums in sorted(expected.items())}
        sent = sum(self._layout.gather(under_way.sent))

        def settle() -> PushReport:
            needed = ""
            self._on_servers(under_way, lambda e: self._transport.finish(e, version), on_poll)
            self._prove(under_way, sums, on_poll)
            self._proved, self._took = sums, set(under_way.healthy)
            try:
                self._rollout.end_push(version, {e: under_way.failed.get(e.name) for e in endpoints}, on_poll)
            except PushNeeded as error:
                needed = str(error)
            end = time.monotonic()
            width = self._itemsize, self._config.quantization
            floor = sum(floor_bytes(self._policy.spec, e.tp, *width) for e in endpoints)
            return PushReport(end - start, end - paused, under_way.proof_seconds, sent, floor, needed)

        return self._on_rank_0("end", settle)

    @property
    def endpoints(self) -> list[Endpoint]:
        """The servers that the last push began with."""
        return self._endpoints

    def close(self) -> None:
        self._transport.close()

    def _begin(self, version: int, on_wait: Callable[[], None] | None) -> tuple[list[Endpoint], str]:
        """The servers and what they run on, "cpu" or "cuda": external ones perhaps not on what this rank does."""
        endpoints = [] if self._rollout is None else self._rollout.begin_push(version, on_wait)
        self._devices = {e: device for e, device in self._devices.items() if e in endpoints}
        for endpoint in endpoints:
            with contextlib.suppress(ServerError):
                if endpoint not in self._devices:
                    self._devices[endpoint] = server_device(endpoint)
                return endpoints, self._devices[endpoint]
        return endpoints, "cuda" if torch.cuda.is_available() else "cpu"

    def _to_prove(self, version: int, endpoints: Sequence[Endpoint]) -> Collection[int] | None:
        """The layers that this push proves, all of them where a server has (re)started; None: nothing is proved."""
        every = self._config.proof.full_every
        if every is None:
            return None
        known, self._known = self._known, set(endpoints)
        return proved_layers(version, every if known >= self._known else 1, self._policy.spec.num_layers)

    # -- the steps of a push -------------------------------------------------------------------------------------
    def _open(self, under_way: _Push, on_poll: Callable[[], None] | None) -> None:
        """Tells the servers, then links every sender to every server it has no link to, one sender at a time."""
        if self._layout.rank == 0:
            self._prove_again(under_way, on_poll)
            self._transport.prepare()
            self._on_servers(under_way, self._transport.begin, on_poll)
        self._share_failures(under_way)
        new = [e for e in under_way.healthy if e not in self._connected]
        if not new:
            return
        for sender in sorted({bucket.sender for bucket in self.schedule.buckets}):
            if self._layout.rank == sender:
                for endpoint in new:
                    self._on_servers(under_way, self._transport.connect, on_poll, [endpoint])
            self._share_failures(under_way)
        self._connected = {e for e in self._connected if e.name not in {n.name for n in new}} | set(under_way.healthy)

    def _round(
        self,
        number: int,
        buckets: tuple[Bucket, ...],
        under_way: _Push,
        expected: dict[int, ExpectedChecksums],
        on_poll: Callable[[], None] | None,
    ) -> None:
        """Sends every sender's bucket to every server. In one turn each server receives from one sender, and different
        senders send to different servers."""
        tensors = self._source.gather(number)
        own = self.schedule.bucket_of(self._layout.rank, number)
        if tensors is not None:
            under_way.sent += self._transport.stage(own.number, tensors)
            for checksums in expected.values():
                checksums.add(dequantized(tensors))
        for turn in range(len(buckets)):
            # Of all servers, so that ranks agree on who receives from whom; those that have failed drop out.
            mine = self._transport.turn(turn, buckets, own, under_way.endpoints)
            mine = [endpoint for endpoint in mine if endpoint.name not in under_way.failed]
            under_way.sent += sum(self._on_servers(under_way, self._transport.send, on_poll, mine))
            self._share_failures(under_way)

    def _prove(self, under_way: _Push, sums: dict[int, Expected | None], on_poll: Callable[[], None] | None) -> None:
        if not sums:
            return

        def prove(endpoint: Endpoint) -> None:
            if (wrong := mismatch(endpoint, sums[endpoint.tp], CHECK_TIMEOUT)) is not None:
                raise ServerError(wrong)

        start = time.monotonic()
        self._on_servers(under_way, prove, on_poll)
        under_way.proof_seconds += time.monotonic() - start

    def _prove_again(self, under_way: _Push, on_poll: Callable[[], None] | None) -> None:
        """With a staleness bound, tokens are trained on after the weights that sampled them are gone. So before a push
        replaces these weights, the servers are checked for them once more."""
        if not self._config.max_staleness or not self._proved:
            return

        def prove(endpoint: Endpoint) -> None:
            if (wrong := mismatch(endpoint, self._proved[endpoint.tp], CHECK_TIMEOUT)) is not None:
                raise ServerError(f"its weights were no longer those of the last push: {wrong}")

        took, start = [e for e in under_way.endpoints if e in self._took], time.monotonic()
        self._on_servers(under_way, prove, on_poll, took)
        under_way.proof_seconds += time.monotonic() - start
        if wrong := {e: under_way.failed[e.name] for e in took if e.name in under_way.failed}:
            self._rollout.condemn(wrong)

    # -- what they share -----------------------------------------------------------------------------------------
    def _on_servers(
        self,
        under_way: _Push,
        function: Callable[[Endpoint], T],
        on_poll: Callable[[], None] | None,
        endpoints: Sequence[Endpoint] | None = None,
    ) -> list[T]:
        """`function` of the servers (None: the healthy ones) at once; notes failures, returns the others' results."""
        done, failed = for_each(under_way.healthy if endpoints is None else endpoints, function, on_poll)
        under_way.failed |= {endpoint.name: message for endpoint, message in failed}
        return [result for _, result in done]

    def _share_failures(self, under_way: _Push) -> None:
        """Every rank learns of every failure, and drops its link to the server. Collective over all ranks."""
        before = set(under_way.dropped)
        for failed in reversed(self._layout.gather(under_way.failed)):
            under_way.failed = {**under_way.failed, **failed}
        for endpoint in under_way.endpoints:
            if endpoint.name in under_way.failed.keys() - before:
                self._transport.forget(endpoint)
                self._connected.discard(endpoint)
                under_way.dropped.add(endpoint.name)

    def _on_rank_0(self, what: str, make: Callable[[], T]) -> T:
        return self._coordinator.on_rank_0(f"the servers ({what} of a push)", make, self._layout)

    def _make(self, name: str) -> Transport:
        if name == "tensor":
            return TensorTransport()
        if name == "disk":
            return DiskTransport(self._policy, self.schedule, Path(self._policy.config.output_dir) / "push")
        if name == "ipc":
            return IpcTransport(self._layout)
        assert name in ("nccl", "gloo"), name
        return GroupTransport(name, self._layout.device if name == "nccl" else torch.device("cpu"))


class _Push:
    """One push under way."""

    def __init__(self, endpoints: Sequence[Endpoint]):
        self.endpoints = list(endpoints)
        self.failed: dict[str, str] = {}  # server -> why
        self.dropped: set[str] = set()  # of these, the ones this rank has no link to any more
        self.sent = 0  # bytes, by this rank
        self.proof_seconds = 0.0  # on rank 0

    @property
    def healthy(self) -> list[Endpoint]:
        return [endpoint for endpoint in self.endpoints if endpoint.name not in self.failed]
