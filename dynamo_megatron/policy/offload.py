"""Moves weights, optimizer state and gradients off the device while servers use its memory, and back.

Storages are emptied and filled again, so every view of them (parameters in Megatron's buffers, shards of the
distributed optimizer) stays valid. The tests have CPU tensors alone: host memory takes the place of the device's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from dynamo_megatron.policy.policy import Policy

PARTS = ("weights", "optimizer", "gradients")


class Offload:
    """A part that is released must be resumed before it is used. Weights and optimizer state wait in (pinned) host
    memory, which is kept for the next time. Gradients are dropped, since an update zeroes them first."""

    def __init__(self, policy: Policy):
        self._policy = policy
        self._held: dict[str, list[tuple[torch.UntypedStorage, int, torch.Tensor | None]]] = {}
        self._host: dict[int, torch.Tensor] = {}  # by the storage's identity

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
                storage.resize_(size)
                if host is not None:
                    _bytes_of(storage).copy_(host, non_blocking=True)
                taken += size
        if taken and torch.cuda.is_available():
            torch.cuda.synchronize()
        return taken

    def _copied(self, storage: torch.UntypedStorage) -> torch.Tensor:
        host = self._host.get(storage._cdata)
        if host is None or len(host) != storage.nbytes():
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
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
        elif not policy.config.optimizer.cpu_offload:  # else its state is in host memory already
            for whole in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]):
                for group in whole.optimizer.param_groups:
                    yield from (p.data for p in group["params"])
                for state in whole.optimizer.state.values():
                    yield from (t for t in state.values() if torch.is_tensor(t) and t.dim())


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
