"""Reads a Megatron checkpoint as the Hugging Face tensors that its parameters consist of, and writes one from them.

Megatron stacks a parameter over the layers (and the experts) into one tensor of the checkpoint, whatever layout saved
it. Vocabulary rows beyond the model's own are padding. Checkpoints that are written here have no padding: Megatron
loads these tensors with any number of rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

from dynamo_megatron.checkpoint.folder import MANIFEST_FILE, check_model
from dynamo_megatron.checkpoint.safetensors_folder import check_tensors
from dynamo_megatron.checkpoint.torch_dist import TorchDistReader, TorchDistWriter
from dynamo_megatron.errors import InputError
from dynamo_megatron.models.mapping import (
    HF_EMBEDDING,
    HF_HEAD,
    LAYER,
    TRANSFORMER_ENGINE_NAMES,
    expert_number,
    huggingface_names,
    huggingface_shapes,
    is_finite,
    layout_of,
    parameter_names,
    to_huggingface,
    to_megatron,
)
from dynamo_megatron.models.spec import ModelSpec

# Both layer specs store a norm under the name that it has where TransformerEngine fuses it with the next linear layer.
FUSED_NORMS = {alone: fused for fused, alone in TRANSFORMER_ENGINE_NAMES.items()}


class MegatronFolder:
    """The Hugging Face tensors of a `torch_dist` checkpoint, whatever layout saved it. Used like SafetensorsFolder.

    The tensors of a parameter are consecutive in `names`, and the parameter that was read last is kept. Raises
    ValueError (one line) where the folder is not such a checkpoint, is damaged, or has other tensors than the model.
    """

    def __init__(self, path: str | Path, spec: ModelSpec) -> None:
        self.path, self._spec = Path(path), spec
        self._reader = TorchDistReader(path)
        self._stored = dict(_stored_parameters(spec))
        self._parameter_of = {tensor: name for name in self._stored for tensor in huggingface_names(spec, name)}
        self._held: tuple[str, dict[str, torch.Tensor]] = ("", {})
        self._check()

    def __enter__(self) -> MegatronFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._held = ("", {})

    @property
    def names(self) -> list[str]:
        return list(self._parameter_of)

    def dtype(self, name: str) -> torch.dtype:
        return self._reader.stored(self._stored[self._parameter_of[name]].key)[1]

    def get(self, name: str) -> torch.Tensor:
        """The whole tensor, on the CPU, in the stored dtype. Raises ValueError where it cannot be read."""
        if self._spec.tied and name == HF_HEAD:
            name = HF_EMBEDDING
        if name not in self._held[1]:
            parameter = self._parameter_of.get(name)
            if parameter is None:
                raise InputError(f"{self.path}: tensor {name} is missing")
            self._held = ("", {})  # frees the last parameter before the next is read
            self._held = (parameter, self._read(parameter))
        return self._held[1][name]

    def _read(self, parameter: str) -> dict[str, torch.Tensor]:
        where = self._stored[parameter]
        tensor = self._reader.read(where.key, where.offset(0), (*(1,) * len(where.sizes), *where.shape))
        return to_huggingface(self._spec, parameter, [tensor.view(where.shape)])

    def _check(self) -> None:
        if (self.path / MANIFEST_FILE).is_file():  # checkpoints of other programs have none
            check_model(self.path, self._spec.dimensions())
        expected = {where.key: where.whole for where in self._stored.values()}
        found = {key: self._reader.stored(key)[0] for key in self._reader.names if not key.startswith("optimizer.")}
        for name, where in self._stored.items():
            stored = found.get(where.key, ())
            if layout_of(name) == "vocab" and stored[1:] == where.shape[1:] and stored[0] > where.shape[0]:
                found[where.key] = where.whole  # the rest is padding
        check_tensors(self.path, self._spec, expected, found)


@dataclass(frozen=True)
class _Stored:
    """The place of a parameter of this `shape`: entry `index` of the tensor `key`, whose leading dimensions have
    `sizes`."""

    key: str
    index: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def whole(self) -> tuple[int, ...]:
        return (*self.sizes, *self.shape)

    def offset(self, row: int) -> tuple[int, ...]:
        return (*self.index, row, *(0,) * (len(self.shape) - 1))


def _stored_parameters(spec: ModelSpec) -> Iterator[tuple[str, _Stored]]:
    """(parameter, its place) for the whole model, in Megatron's shapes without padding."""
    shapes = huggingface_shapes(spec)
    for name in parameter_names(spec):
        parts = [shapes[part] for part in huggingface_names(spec, name)]
        shape = (sum(part[0] for part in parts), *parts[0][1:])
        key, index, sizes = name, (), ()
        if layer := LAYER.fullmatch(name):
            within, index, sizes = layer[2], (int(layer[1]),), (spec.num_layers,)
            expert = expert_number(name)
            if expert is not None:
                index, sizes = (*index, expert), (*sizes, spec.num_experts)
                within = within.replace(f"local_experts.{expert}", "experts")
            elif not (spec.num_experts and within == "pre_mlp_layernorm.weight"):
                within = FUSED_NORMS.get(within, within)
            key = f"decoder.layers.{within}"
        yield name, _Stored(key, index, sizes, shape)


def write_megatron(
    spec: ModelSpec, get: Callable[[str], torch.Tensor], path: Path, dtype: torch.dtype | None = None
) -> dict[str, str]:
    """Writes a model into the empty folder `path`, one parameter at a time. `get` returns its Hugging Face tensors by
    name; they are converted to `dtype` (None: not converted). Returns the checksums of the data files, by name.

    Raises OSError, and ValueError where a parameter's tensors differ in dtype, or a value is not finite or too large
    for `dtype`.
    """
    writer = TorchDistWriter(path)
    stateful: dict[str, tuple[int, ...]] = {}
    for name, where in _stored_parameters(spec):
        names = huggingface_names(spec, name)
        row = 0
        # gate and up are written separately, as Megatron stores them: this needs less memory
        for together in [(n,) for n in names] if layout_of(name) == "gate_up" else [names]:
            tensors = [converted(n, get(n), dtype) for n in together]
            if len({t.dtype for t in tensors}) > 1:
                raise InputError(f"tensors {', '.join(together)}: of different dtypes; give one dtype (--dtype)")
            tensor = tensors[0] if len(tensors) == 1 else to_megatron(spec, name, tensors, 0, 1)
            del tensors
            writer.add(where.key, tensor.view(*(1,) * len(where.sizes), *tensor.shape), where.whole, where.offset(row))
            row += len(tensor)
        if re.search(r"(\.linear_\w+|layernorm)\.weight$", where.key):
            stateful[where.key.removesuffix("weight")] = where.sizes or (1,)
    # Megatron's own loader requires an extra state of every linear layer and, with TransformerEngine, of every norm
    # that is a separate module; there is none, so an empty one is written.
    for key, sizes in stateful.items():
        for index in product(*map(range, sizes)):
            shard = f"shard_{'.'.join(map(str, index))}_{'.'.join(map(str, sizes))}"
            writer.add_object(f"{key}_extra_state/{shard}", [None])
    return writer.close()


def converted(name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """The tensor in `dtype` (None: as it is). Raises ValueError where a value is NaN, infinite or too large for
    `dtype`."""
    result = tensor if dtype is None else tensor.to(dtype)
    if not is_finite(result):
        if not is_finite(tensor):
            raise InputError(f"tensor {name}: the source holds NaN or infinity; download the model again")
        raise InputError(f"tensor {name}: a value is too large for {str(dtype).removeprefix('torch.')}")
    return result
