"""A bucket's tensors end to end in one buffer, as SGLang's `flattened_bucket` load format has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch


class FlatBuffer:
    """A uint8 buffer that is filled again and again. `make(nbytes)` allocates it; it grows when it must."""

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
            self.tensors.append(
                SimpleNamespace(
                    name=name,
                    shape=tensor.shape,
                    dtype=tensor.dtype,
                    start_idx=start,
                    end_idx=end,
                    numel=tensor.nbytes,
                )
            )
            start = end

    def description(self) -> dict[str, list[Any]]:
        """Returns names, dtypes and shapes as /update_weights_from_distributed takes them."""
        return {
            "names": [t.name for t in self.tensors],
            "dtypes": [str(t.dtype).removeprefix("torch.") for t in self.tensors],
            "shapes": [list(t.shape) for t in self.tensors],
        }
