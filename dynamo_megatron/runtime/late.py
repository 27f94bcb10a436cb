"""torch for modules that the checks before a run import: it is imported when something of it is first asked for. Its
import takes longer than all these checks. A module that needs torch as it is imported does without this one."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
else:

    class _Late:
        def __init__(self, name: str):
            self.__name__ = name

        def __getattr__(self, name: str) -> Any:
            return getattr(importlib.import_module(self.__name__), name)

    torch, dist = _Late("torch"), _Late("torch.distributed")

__all__ = ["dist", "torch", "uncollected"]


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Around imports of large packages: the garbage collector, a quarter of their time, finds nothing in them, and
    leaves out what there is by then for ever."""
    gc.disable()
    try:
        yield
        gc.freeze()
        atexit.register(gc.unfreeze)  # else libraries report a hundred lines of leaks at the exit
    finally:
        gc.enable()
