"""Where the host would wait for a GPU, and where tensors of both would meet, found on a CPU.

`HostWaits` follows the tensors that a GPU would hold: what was moved or made there, and all that is computed from it.
An operation that needs a value of theirs on the host (`item`, `nonzero`, `equal`, a shape that depends on data, a copy
to or from memory that is not pinned) is a wait. Not seen: `tolist`, `cpu` and `to` inside torch's own backward pass.
An operation on both kinds of tensors that CUDA refuses is a mix. `dtypes` counts products of matrices that its GEMMs
refuse: of two different dtypes, which a CPU refuses, too, and of whole numbers, which a CPU multiplies.

torch's FakeTensorMode would be the other way to look for mixes. Its tensors on "cuda" have no backward pass in a build
of torch for CPUs: the first product with a parameter ends the process ("PyTorch is not linked with support for cuda
devices", c10/core/impl/DeviceGuardImplInterface.h).
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
NEEDS_VALUES = {
    aten._local_scalar_dense,
    aten.equal,
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.bincount,
}
GPU = torch.device("cuda", 0)
GEMMS = {aten.mm, aten.bmm, aten.addmm, aten.addmm_, aten.baddbmm, aten.baddbmm_, aten.mv, aten.addmv, aten.dot}
ONE_VALUE = {aten.fill_, aten.masked_fill, aten.masked_fill_}  # from the host, as in arithmetic
COPIES = {aten.copy_, aten._to_copy}
MOVES = {torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda}
ON_A_CPU_ALONE = "elif upstream.item() != 1.0:"  # kernels/head.py
ROOTS = ("/dynamo_megatron/", "/kernels/", "/megatron/core/")


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _is_gpu(device: object) -> bool:
    return device is not None and str(device).startswith("cuda")


def _no_gemm(dtypes: set[torch.dtype], func: torch._ops.OpOverload) -> bool:
    widens = "dtype" in func._overloadname  # from bfloat16 to a float32 result, to which it may add
    return not all(t.is_floating_point for t in dtypes) or (len(dtypes) > 1 and not widens)


class _Held:
    """The storages that a GPU would hold."""

    def __init__(self) -> None:
        self._known: dict[int, StorageWeakRef] = {}

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._known[storage._cdata] = StorageWeakRef(storage)

    def drop(self, tensor: torch.Tensor) -> None:
        self._known.pop(tensor.untyped_storage()._cdata, None)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        known = self._known.get(tensor.untyped_storage()._cdata)
        return known is not None and not known.expired()


class HostWaits:
    """`found` counts waits by (phase, layer or "outside", place, operation), `mixed` mixes, `dtypes` products that CUDA
    refuses; `phase` is the caller's to set."""

    def __init__(self) -> None:
        self.found: Counter[tuple[str, str, str, str]] = Counter()
        self.mixed: Counter[tuple[str, str, str, str]] = Counter()
        self.dtypes: Counter[tuple[str, str, str, str]] = Counter()
        self.phase, self._layer = "", "outside"
        self.held = _Held()

    def record(self, operation: str, mix: bool = False, dtype: bool = False) -> None:
        stack = (f for f in traceback.extract_stack() if any(root in f.filename for root in ROOTS))
        frames = [f for f in stack if not f.filename.endswith("policy/backend.py")]
        place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "torch"
        if frames and frames[-1].line == ON_A_CPU_ALONE:
            return
        (self.dtypes if dtype else self.mixed if mix else self.found)[self.phase, self._layer, place, operation] += 1

    def outside(self, phase: str) -> int:
        return sum(n for (p, layer, *_), n in self.found.items() if p == phase and layer == "outside")

    @property
    def in_layers(self) -> dict[str, int]:
        return {" ".join(key): n for key, n in self.found.items() if key[1] != "outside"}

    def watch_layers(self, layers: list[torch.nn.Module]) -> None:
        """While the forward pass of one of them runs, waits are its own."""
        for number, layer in enumerate(layers):

            def enter(*_, number: int = number) -> None:
                self._layer = f"layer {number}"

            def leave(*_) -> None:
                self._layer = "outside"

            layer.register_forward_pre_hook(enter)
            layer.register_forward_hook(leave)

    @contextmanager
    def watching(self) -> Iterator[HostWaits]:
        with _Functions(self), _Operations(self):
            yield self


class _Functions(TorchFunctionMode):
    """Moves between host and GPU, which on a CPU are none, what is made on a GPU, and the device that tensors name."""

    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, held = kwargs or {}, self._waits.held
        if func is torch.Tensor.tolist and args[0] in held:
            self._waits.record("tolist")
        if func in MOVES:
            return self._moved(func, args, kwargs)
        if func == torch.Tensor.device.__get__ and args[0] in held:
            return GPU
        result = func(*args, **kwargs)
        if _is_gpu(kwargs.get("device")) and isinstance(result, torch.Tensor):
            if func is torch.tensor:
                self._waits.record("a value to the GPU")
            held.add(result)
        return result

    def _moved(self, func, args, kwargs) -> torch.Tensor:
        source, held = args[0], self._waits.held
        target = kwargs.get("device", args[1] if len(args) > 1 else None)
        to_gpu = func is torch.Tensor.cuda or _is_gpu(target)
        to_host = func is torch.Tensor.cpu or str(target) == "cpu"
        result = func(*args, **kwargs)
        if to_gpu and source not in held:
            if not kwargs.get("non_blocking"):
                self._waits.record("copy to the GPU")
            if result.untyped_storage()._cdata == source.untyped_storage()._cdata:
                result = result.clone().requires_grad_(result.requires_grad)
            held.add(result)
        elif to_host and source in held:
            if not kwargs.get("non_blocking"):
                self._waits.record("copy to the host")
            result = result.clone()
            held.drop(result)
        return result


class _Operations(TorchDispatchMode):
    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, waits = kwargs or {}, self._waits
        inputs = _tensors((args, kwargs))
        here = [t in waits.held for t in inputs]
        if any(here) and func.overloadpacket in GEMMS and _no_gemm({t.dtype for t in inputs}, func):
            waits.record(f"{func} of {', '.join(str(t.dtype) for t in inputs)}", dtype=True)
        result = func(*args, **kwargs)
        packet = func.overloadpacket
        if packet is aten.copy_:
            if here[0] != here[1] and not (len(args) > 2 and args[2]):
                waits.record("copy_ between host and GPU")
            return result
        if not any(here):
            return result
        if not all(here) and self._refused(func, args, inputs):
            waits.record(packet._qualified_op_name.removeprefix("aten::"), mix=True)
        if packet in NEEDS_VALUES or self._depends_on_values(packet, args, kwargs):
            waits.record(packet._qualified_op_name.removeprefix("aten::"))
        for tensor in _tensors(result):
            waits.held.add(tensor)
        return result

    def _refused(self, func, args, inputs) -> bool:
        """Whether CUDA refuses an operation on these tensors, of which some are on the GPU and others are not. It takes
        one value from the host in arithmetic, and an index from the host."""
        packet, held = func.overloadpacket, self._waits.held
        strangers = [t for t in inputs if t not in held]
        if packet in (aten.index, aten.index_put, aten.index_put_):
            return args[0] not in held or any(t not in held and t.dim() for t in _tensors(args[2:]))
        if packet in COPIES:
            return False
        takes_values = packet in ONE_VALUE or torch.Tag.pointwise in func.tags
        return not takes_values or any(t.dim() for t in strangers)

    def _depends_on_values(self, packet, args, kwargs) -> bool:
        if packet is aten.repeat_interleave:
            return kwargs.get("output_size") is None
        if packet is aten.segment_reduce:
            return not kwargs.get("unsafe")
        if packet in (aten.index, aten.index_put, aten.index_put_):
            return any(t is not None and t.dtype is torch.bool and t in self._waits.held for t in args[1])
        return False
