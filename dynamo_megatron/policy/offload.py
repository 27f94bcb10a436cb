"""Moves weights, optimizer state and gradients off the device while servers use its memory, and back.

Storages are emptied and filled again, so every view of them (parameters in Megatron's buffers, shards of the
distributed optimizer) stays valid. The tests have CPU tensors alone: host memory takes the place of the device's.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, wait

import torch

from dynamo_megatron.policy.policy import Policy
from dynamo_megatron.runtime.threads import Call

PARTS = ("weights", "optimizer", "gradients")
RELEASES = 100  # times 0.1 s that all ranks of a server have to release their memory
MOMENTS = 2  # of each parameter of the optimizer, from the first update on


class Offload:
    """A part that is released must be resumed before it is used. Weights and optimizer state wait in (pinned) host
    memory, which is kept for the next time. Gradients are dropped, since an update zeroes them first.

    Page-locking took 0.7 s a GB beside an H200, as long as the servers' first weight sync and first rollouts."""

    def __init__(self, policy: Policy):
        self._policy = policy
        self._ahead: dict[int, list[Future[torch.Tensor]]] = defaultdict(list)  # by bytes
        self._held: dict[str, list[tuple[torch.UntypedStorage, int, torch.Tensor | None]]] = {}
        self._host: dict[int, torch.Tensor] = {}  # by the storage's identity

    def allocate_ahead(self) -> None:
        """Has a thread allocate the host memory, in the order in which it will be needed. To be called once a
        checkpoint is loaded, which needs as much of its own."""
        sizes = [storage.nbytes() for part in ("optimizer", "weights") for storage in self._storages(part)]
        sizes += [p.nbytes for optimizer in self._optimizers() for p in _without_state(optimizer)] * MOMENTS
        due = [(size, Future()) for size in sizes]
        for size, future in due:
            self._ahead[size].append(future)
        Call(_allocate, due)

    def close(self) -> None:
        """Waits for the allocation under way: Python aborts if it ends while a thread is inside torch."""
        wait([early for ahead in self._ahead.values() for early in ahead if not early.cancel()])

    def release(self, parts: Iterable[str]) -> int:
        """Releases `parts`, unless they are released already. Returns the bytes freed on the device."""
        freed = 0
        for part in parts:
            if part in self._held:
                continue
            if part == "gradients":
                self._policy.optimizer.zero_grad()  # or main parameters would keep a copy
            held = self._held[part] = []
            for storage in self._storages(part):
                size = storage.nbytes()
                held.append((storage, size, None if part == "gradients" else self._copied(storage)))
                storage.resize_(0)
                freed += size
        if freed and torch.cuda.is_available():
            torch.cuda.empty_cache()
        return freed

    def resume(self, parts: Iterable[str]) -> int:
        """Brings released `parts` back. Returns the bytes allocated on the device."""
        taken = 0
        for part in parts:
            for storage, size, host in self._held.pop(part, []):
                _grow(storage, size)
                if host is not None:
                    _bytes_of(storage).copy_(host, non_blocking=True)
                taken += size
        if taken and torch.cuda.is_available():
            torch.cuda.synchronize()
        return taken

    def _copied(self, storage: torch.UntypedStorage) -> torch.Tensor:
        host = self._host.get(storage._cdata)
        if host is None or len(host) != storage.nbytes():
            ahead = self._ahead[storage.nbytes()]
            early = ahead.pop(0) if ahead else None
            failed = early is None or early.exception() is not None  # there may be enough memory by now
            host = _host_memory(storage.nbytes()) if failed else early.result()
            self._host[storage._cdata] = host
        host.copy_(_bytes_of(storage))
        return host

    def _storages(self, part: str) -> list[torch.UntypedStorage]:
        """The storages of `part`, each once. In float32 the optimizer's main parameters are the weights themselves, and
        count as weights."""
        found = {t.untyped_storage()._cdata: t.untyped_storage() for t in self._tensors(part)}
        if part == "optimizer":
            weights = {t.untyped_storage()._cdata for t in self._tensors("weights")}
            found = {key: storage for key, storage in found.items() if key not in weights}
        return [storage for storage in found.values() if storage.nbytes()]

    def _tensors(self, part: str) -> Iterator[torch.Tensor]:
        policy = self._policy
        if part == "weights":
            yield from (p.data for chunk in policy.chunks for p in chunk.parameters())
        elif part == "gradients":
            for ddp in policy.ddp:
                yield from (buffer.grad_data for buffer in ddp.buffers + ddp.expert_parallel_buffers)
        else:
            for optimizer in self._optimizers():
                for group in optimizer.param_groups:
                    yield from (p.data for p in group["params"])
                for state in optimizer.state.values():
                    yield from (t for t in state.values() if torch.is_tensor(t) and t.dim())

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        if self._policy.config.optimizer.cpu_offload:
            return []  # their state is in host memory already
        whole = self._policy.optimizer
        return [one.optimizer for one in getattr(whole, "chained_optimizers", [whole])]


def _without_state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p not in optimizer.state]


def _allocate(due: Iterable[tuple[int, Future[torch.Tensor]]]) -> None:
    for size, future in due:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(_host_memory(size))
        except (MemoryError, RuntimeError) as error:  # raised where the memory is needed
            future.set_exception(error)


def _host_memory(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


def _grow(storage: torch.UntypedStorage, size: int) -> None:
    """SGLang answers a release when its first rank has released; its other ranks may take a moment longer."""
    for _ in range(RELEASES):
        try:
            storage.resize_(size)
            return
        except torch.OutOfMemoryError:
            time.sleep(0.1)
    storage.resize_(size)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
