"""Counts what a rank gives to collectives and to other ranks."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Communicated(TorchDispatchMode):
    """`floats`: bytes of floating-point tensors that this rank has passed to torch.distributed, on any backend; what a
    collective writes its result to counts, too. Objects travel as bytes, and do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.floats = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            tensors = [t for t in tree_leaves((args, kwargs)) if torch.is_tensor(t) and t.is_floating_point()]
            self.floats += sum(t.nbytes for t in tensors)
        return func(*args, **(kwargs or {}))
