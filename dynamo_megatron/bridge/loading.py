"""Loads a Hugging Face folder's tensors into this rank's stage of a Bridge model, and proves that it did.

Every parameter is NaN before. What is loaded is converted back, and has to equal the folder's tensors bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dynamo_megatron.checkpoint.safetensors_folder import SafetensorsFolder
from dynamo_megatron.errors import InputError
from dynamo_megatron.models.mapping import is_finite


@torch.no_grad()
def load_model(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> set[str]:
    """Returns the names of the folder's tensors that went into this rank's parameters, proved. `model`: BridgeModel.
    `state`: the folder's tensors by name, in any dtype. Raises InputError naming the parameter or the tensor."""
    mappings, done = model.mappings, set()
    if mappings.unmapped:
        raise InputError(f"Bridge has no tensor for Megatron's parameter {mappings.unmapped[0]}")
    for name, unit in (mappings.units | mappings.copies).items():
        parameters = [task.parameter for task in unit.tasks]
        shares = range(mappings.tp_size) if unit.sharded else [mappings.tp_rank]
        try:
            shards = {share: mappings.load(unit, state, share) for share in shares}
        except KeyError as error:
            raise InputError(f"tensor {error.args[0]} is missing: Bridge makes {name} of it") from None
        for parameter, value in zip(parameters, shards[mappings.tp_rank], strict=True):
            if value.shape != parameter.shape:
                raise InputError(f"{name}: {list(parameter.shape)} in the model, {list(value.shape)} from the folder")
            parameter.copy_(value)
        of_task = [[shards[share][n].to(p) for share in shares] for n, p in enumerate(parameters)]
        back = mappings.export(unit, of_task)
        for tensor, value in back.items():
            if tensor not in state:
                raise InputError(f"{name}: Bridge writes it to a tensor {tensor}, which the folder does not have")
            if not is_finite(value):
                raise InputError(f"tensor {tensor} holds NaN or infinity; download or convert the model again")
            if value.shape != state[tensor].shape or not torch.equal(value.cpu(), state[tensor].to(value.dtype)):
                raise InputError(f"tensor {tensor}: what Bridge writes back is not what it read")
        done |= set(back)
    left = [name for name, parameter in model.named_parameters() if not is_finite(parameter)]
    if left:
        raise InputError(f"parameter {left[0]} was not loaded")
    return done


class LazyTensors(Mapping):
    """The tensors of a folder by name, each read when it is asked for."""

    def __init__(self, folder: SafetensorsFolder):
        self._folder, self._names = folder, frozenset(folder.names)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._folder.get(name)

    def __iter__(self):
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
