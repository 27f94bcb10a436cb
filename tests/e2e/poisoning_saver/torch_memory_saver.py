"""Stands for the package torch_memory_saver in a server on a CPU, which is started with --enable-memory-saver and this
folder on its path: memory that is paused is not freed but lost.

`pause` fills it with bytes 255, NaN in every float format and -1 as an integer; the contents do not come back with
`resume`, as with the real package, which unmaps the memory between the two. A write in between is an error here, where
a GPU would end the process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

POISON = 255


def _storages(values: object) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(values) if torch.is_tensor(leaf)]


class _Allocations(TorchDispatchMode):
    """Adds what is allocated meanwhile to `found`: storages that operations return and were not given."""

    def __init__(self, found: list[StorageWeakRef]):
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}
        self._found += [StorageWeakRef(s) for s in _storages(result) if s._cdata not in given]
        return result


class MemorySaver:
    enabled = True

    def __init__(self) -> None:
        self._allocated: dict[str, list[StorageWeakRef]] = {}

    @contextlib.contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        assert not enable_cpu_backup, "what is paused is to be lost"
        with _Allocations(self._allocated.setdefault(tag, [])):
            yield

    def pause(self, tag: str) -> None:
        """Says in the server's log what was lost, which tests read."""
        memory = self._memory(tag)
        for part in memory:
            part.fill_(POISON)
        print(f"lost: {tag} {sum(map(len, memory))}", flush=True)

    def resume(self, tag: str) -> None:
        for memory in self._memory(tag):
            assert bool((memory == POISON).all()), f"{tag} was written while it was released"

    def _memory(self, tag: str) -> list[torch.Tensor]:
        """Bytes of what is still there of the tag's allocations, each once."""
        alive = {}
        for reference in self._allocated.get(tag, []):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None:
                alive[storage._cdata] = storage
        return [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in alive.values()]


torch_memory_saver = MemorySaver()


def configure_subprocess() -> contextlib.AbstractContextManager[None]:
    """Of the processes that will allocate: there is nothing to preload here."""
    return contextlib.nullcontext()
