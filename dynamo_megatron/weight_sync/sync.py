"""Weight sync: sends the policy's weights to every server, checks that they arrived, and measures the pause.

Rank 0 takes the servers out of the rotation; the schedule's senders send their buckets, each server receiving from one
sender at a time; rank 0 ends the update, compares the servers' checksums with the weights sent and returns the
outcomes. A server that fails during a sync is left out of the rest of it: its outcome is a message.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from dynamo_megatron.models.adapters import adapted_weights
from dynamo_megatron.models.fp8 import dequantized
from dynamo_megatron.policy.policy import Policy
from dynamo_megatron.rollout.result import SyncNeeded
from dynamo_megatron.rollout.servers.server import shares_memory
from dynamo_megatron.rollout.servers.server_api import CHECK_TIMEOUT, Endpoint, ServerError
from dynamo_megatron.rollout.worker import RolloutWorker
from dynamo_megatron.runtime.coordination import Coordinator
from dynamo_megatron.runtime.threads import for_each
from dynamo_megatron.weight_sync.folder import DiskTransport
from dynamo_megatron.weight_sync.proof import Expected, ExpectedChecksums, mismatch, server_device
from dynamo_megatron.weight_sync.schedule import BucketSource, floor_bytes, make_schedule
from dynamo_megatron.weight_sync.transports import choose_transport
from dynamo_megatron.weight_sync.transports.base import Transport
from dynamo_megatron.weight_sync.transports.group import GroupTransport
from dynamo_megatron.weight_sync.transports.handles import IpcTransport, TensorTransport

T = TypeVar("T")
OnPoll = Callable[[], None] | None


@dataclass(frozen=True)
class SyncReport:
    """The same on every rank. Without servers, all 0."""

    seconds: float = 0.0  # of it all, with the wait of begin_sync for servers
    pause_seconds: float = 0.0  # of these, while the servers rested: once begin_sync has them, until end_sync is done
    proof_seconds: float = 0.0  # of these, asking the servers for their checksums
    bytes: int = 0  # written for all servers together, and sent to each rank of each
    floor_bytes: int = 0  # every server rank's own parameters, once
    needed: str = ""  # why no server took the weights, where none did

    def __add__(self, other: SyncReport) -> SyncReport:
        """Two syncs one after the other, as one with the outcome of `other`."""
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "needed"}
        return SyncReport(**sums, needed=other.needed)


class WeightSync:
    """Made once by all ranks. `rollout` is rank 0's; None elsewhere, and where a run has no servers. Raises ValueError
    where `rollout.sync` asks for what cannot work here."""

    def __init__(self, policy: Policy, rollout: RolloutWorker | None, coordinator: Coordinator):
        self._policy, self._rollout, self._coordinator = policy, rollout, coordinator
        self._layout, self._config = policy.layout, policy.config.rollout
        self._itemsize = getattr(torch, policy.config.model.dtype).itemsize
        schedule = partial(
            make_schedule,
            policy.spec,
            policy.config.parallel,
            self._layout.world_size,
            bucket_bytes=self._config.sync.bucket_bytes,
            itemsize=self._itemsize,
            quantization=self._config.quantization,
        )
        self.schedule = schedule()
        self._source = BucketSource(policy, self.schedule)
        hosts = len(set(self._layout.gather(socket.gethostname())))
        transport = choose_transport(self._config, torch.cuda.is_available(), hosts)
        self._transport = self._make(transport)
        # What adapters change, for servers that have the rest from an earlier sync, which their checksums prove.
        self._changing: BucketSource | None = None
        kept = self._config.proof.checksums and not shares_memory(self._config) and transport != "disk"
        if (lora := policy.config.model.lora) is not None and kept:
            self._changing = BucketSource(policy, schedule(only=set(adapted_weights(policy.spec, lora))))
        self._whole: set[Endpoint] = set()  # servers that have all weights of the last sync
        self._proved: dict[int, Expected] = {}  # on rank 0, by tp, what they have
        self.endpoints: list[Endpoint] = []  # that the last sync began with
        self._device: str | None = None  # of the servers, once one has been asked

    def sync(self, version: int, on_poll: OnPoll = None, on_wait: OnPoll = None) -> SyncReport:
        """Brings every server to the policy's weights under `version`. Collective over all ranks.

        `on_poll` is called on every rank while servers work, `on_wait` on rank 0 while it waits for one to be up; they
        may raise. If no server took the weights but some will restart, the report says why. Raises RolloutError;
        OSError if the disk is full.
        """
        start = time.monotonic()
        endpoints, device = self._on_rank_0("begin", partial(self._begin, version, on_wait))
        paused = time.monotonic()
        self.endpoints = endpoints
        if not endpoints:
            return SyncReport()
        source, under_way, counted = self._source, _UnderWay(endpoints, on_poll), None
        if self._changing is not None and self._whole.issuperset(endpoints):
            source, counted = self._changing, self._changing.schedule.tensors
        tps = {e.tp for e in endpoints} if self._config.proof.checksums else set()
        expected = {tp: ExpectedChecksums(self._policy.spec, tp, device) for tp in sorted(tps)}
        if self._layout.rank == 0:
            self._transport.prepare()
            self._on_servers(under_way, self._transport.begin)
        self._share_failures(under_way)
        stage = partial(self._stage, source, under_way, expected)
        for number in range(len(source.schedule.rounds)):
            self._round(number, source, under_way, stage)
        self._transport.end()
        sums = {tp: checksums.gather(self._layout.host) for tp, checksums in expected.items()}
        if self._layout.rank == 0:
            if source is self._changing:
                sums = {tp: [o | n for o, n in zip(self._proved[tp], new, strict=True)] for tp, new in sums.items()}
            self._proved = sums
        sent = sum(self._layout.gather(under_way.sent))

        def settle() -> tuple[SyncReport, list[Endpoint]]:
            needed = ""
            self._on_servers(under_way, lambda e: self._transport.finish(e, version))
            proof_seconds = self._prove(under_way, sums)
            try:
                self._rollout.end_sync(version, {e: under_way.failed.get(e.name) for e in endpoints}, on_poll)
            except SyncNeeded as error:
                needed = str(error)
            end = time.monotonic()
            width = self._itemsize, self._config.quantization
            floor = sum(floor_bytes(self._policy.spec, e.tp, *width, only=counted) for e in endpoints)
            return SyncReport(end - start, end - paused, proof_seconds, sent, floor, needed), under_way.healthy

        report, whole = self._on_rank_0("end", settle)
        self._whole = set(whole)
        return report

    def close(self) -> None:
        self._transport.close()

    def _begin(self, version: int, on_wait: OnPoll) -> tuple[list[Endpoint], str]:
        """The servers and what they run on, "cpu" or "cuda": external ones perhaps not on what this rank does."""
        endpoints = [] if self._rollout is None else self._rollout.begin_sync(version, on_wait)
        for endpoint in endpoints if self._device is None else ():
            with contextlib.suppress(ServerError):
                self._device = server_device(endpoint)
                break
        return endpoints, self._device or self._layout.device.type

    # -- the steps of a sync ---------------------------------------------------------------------------------------
    def _stage(
        self, source: BucketSource, under_way: _UnderWay, expected: dict[int, ExpectedChecksums], number: int
    ) -> None:
        """Makes this rank's bucket of a round ready, and hashes it."""
        if (tensors := source.gather(number)) is not None:
            bucket = source.schedule.bucket_of(self._layout.rank, number)
            under_way.sent += self._transport.stage(bucket.number, tensors)
            for checksums in expected.values():
                checksums.add(dequantized(tensors))

    def _round(self, number: int, source: BucketSource, under_way: _UnderWay, stage: Callable[[int], None]) -> None:
        """Sends every sender's bucket to every server. In one turn each server receives from one sender, and different
        senders send to different servers. While servers work in the last turn, the next round is staged."""
        rounds, ahead = source.schedule.rounds, self._transport.stages_ahead
        own = source.schedule.bucket_of(self._layout.rank, number)
        if number == 0 or not ahead:
            stage(number)
        last = len(rounds[number]) - 1
        for turn in range(len(rounds[number])):
            # Of all servers, so that ranks agree on who receives from whom; those that have failed drop out.
            mine = self._transport.turn(turn, rounds[number], own, under_way.endpoints)
            mine = [endpoint for endpoint in mine if endpoint.name not in under_way.failed]
            more = ahead and turn == last and number + 1 < len(rounds)
            meanwhile = partial(stage, number + 1) if more else None
            sent = sum(self._on_servers(under_way, self._transport.send, mine, meanwhile))
            under_way.sent += sent  # not in one line: staging adds to it, too
            self._share_failures(under_way)

    def _prove(self, under_way: _UnderWay, sums: dict[int, Expected | None]) -> float:
        """Compares the servers' checksums with `sums`, by tp; returns the seconds that it took."""

        def prove(endpoint: Endpoint) -> None:
            if (wrong := mismatch(endpoint, sums[endpoint.tp], CHECK_TIMEOUT)) is not None:
                raise ServerError(wrong)

        start = time.monotonic()
        if sums:
            self._on_servers(under_way, prove)
        return time.monotonic() - start

    # -- what they share -----------------------------------------------------------------------------------------
    def _on_servers(
        self,
        under_way: _UnderWay,
        function: Callable[[Endpoint], T],
        endpoints: Sequence[Endpoint] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> list[T]:
        """`function` of the servers (None: the healthy ones) at once; notes failures, returns the others' results."""
        endpoints = under_way.healthy if endpoints is None else endpoints
        done, failed = for_each(endpoints, function, under_way.on_poll, meanwhile)
        under_way.failed |= {endpoint.name: message for endpoint, message in failed}
        return [result for _, result in done]

    def _share_failures(self, under_way: _UnderWay) -> None:
        """Every rank learns of every failure, and drops its link to the server. Collective over all ranks."""
        for failed in reversed(self._layout.gather(under_way.failed)):
            under_way.failed = {**under_way.failed, **failed}
        for endpoint in under_way.endpoints:
            if endpoint.name in under_way.failed.keys() - under_way.dropped:
                self._transport.forget(endpoint)
                under_way.dropped.add(endpoint.name)

    def _on_rank_0(self, what: str, make: Callable[[], T]) -> T:
        return self._coordinator.on_rank_0(f"the servers ({what} of a weight sync)", make, self._layout)

    def _make(self, name: str) -> Transport:
        if name == "tensor":
            return TensorTransport()
        if name == "disk":
            return DiskTransport(self._policy, self.schedule, Path(self._policy.config.output_dir) / "push")
        if name == "ipc":
            return IpcTransport(self._layout)
        return GroupTransport(name, self._layout.device if name == "nccl" else torch.device("cpu"))


class _UnderWay:
    """One sync under way."""

    def __init__(self, endpoints: Sequence[Endpoint], on_poll: OnPoll):
        self.endpoints, self.on_poll = list(endpoints), on_poll
        self.failed: dict[str, str] = {}  # server -> why
        self.dropped: set[str] = set()  # of these, the ones this rank has no link to any more
        self.sent = 0  # bytes, by this rank

    @property
    def healthy(self) -> list[Endpoint]:
        return [endpoint for endpoint in self.endpoints if endpoint.name not in self.failed]
