"""Loads a Hugging Face folder's tensors into this rank's stage of a Bridge model, and proves that it did.

Every parameter is NaN before. What is loaded is converted back, and has to equal the folder's tensors bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dynamo_megatron.errors import InputError
from dynamo_megatron.models.mapping import is_finite


@torch.no_grad()
def load_model(model: torch.nn.Module, read: Callable[[str], torch.Tensor]) -> set[str]:
    """Returns the names of the folder's tensors that went into this rank's parameters, proved. `model`: BridgeModel.
    `read` gives the folder's tensors by name, in any dtype. A collective over tensor-parallel ranks, of which the first
    compares. Raises InputError naming the parameter or the tensor."""
    mappings, faults, done = model.mappings, [], set()
    if mappings.unmapped:
        raise InputError(f"Bridge has no tensor for Megatron's parameter {mappings.unmapped[0]}")
    for name, unit in mappings.units.items():
        try:
            tensors = {tensor: read(tensor) for tensor in unit.names}
        except KeyError as error:
            raise InputError(f"tensor {error.args[0]} is missing: Bridge makes {name} of it") from None
        for task, value in zip(unit.tasks, mappings.load(name, tensors), strict=True):
            if value.shape != task.parameter.shape:
                here, given = list(task.parameter.shape), list(value.shape)
                raise InputError(f"{name}: {here} in the model, {given} from the folder")
            task.parameter.copy_(value)
        back = mappings.export(name)
        done |= back.keys()
        if mappings.compares:
            faults += [fault for tensor in tensors if (fault := _fault(tensor, tensors[tensor], back[tensor]))]
    if faults:
        raise InputError(faults[0])
    if left := [name for name, parameter in model.named_parameters() if not is_finite(parameter)]:
        raise InputError(f"parameter {left[0]} was not loaded")
    return done


def _fault(name: str, stored: torch.Tensor, back: torch.Tensor) -> str | None:
    if not is_finite(back):
        return f"tensor {name} holds NaN or infinity; download or convert the model again"
    if back.shape != stored.shape or not torch.equal(back.cpu(), stored.to(back.dtype)):
        return f"tensor {name}: what Bridge writes back is not what it read"
    return None
