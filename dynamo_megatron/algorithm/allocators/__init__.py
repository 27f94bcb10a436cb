"""The allocators by name. Each is a small file; `base.py` defines their interface, `contract.py` tests it."""

from __future__ import annotations

from dynamo_megatron.algorithm.allocators.base import Allocator
from dynamo_megatron.algorithm.allocators.cero import Cero
from dynamo_megatron.algorithm.allocators.cures import Cures
from dynamo_megatron.algorithm.allocators.gvm import Gvm
from dynamo_megatron.algorithm.allocators.knapsack import Knapsack
from dynamo_megatron.algorithm.allocators.neyman import Neyman
from dynamo_megatron.algorithm.allocators.uniform import Uniform
from dynamo_megatron.algorithm.allocators.waterfill import Waterfill
from dynamo_megatron.errors import InputError
from dynamo_megatron.runtime.user_code import load_callable

BUILT_IN = {
    "uniform": Uniform,
    "waterfill": Waterfill,
    "neyman": Neyman,
    "knapsack": Knapsack,
    "cero": Cero,
    "gvm": Gvm,
    "cures": Cures,
}


def load_allocator(kind: str) -> type[Allocator]:
    """The class that `algorithm.allocation.kind` names: a built-in one or the user's. Raises ValueError (one line)."""
    if kind in BUILT_IN:
        return BUILT_IN[kind]
    found = load_callable(kind, "algorithm.allocation.kind")
    if not (isinstance(found, type) and issubclass(found, Allocator)):
        raise InputError(
            f"algorithm.allocation.kind: {kind!r} is no allocator; "
            "derive the class from dynamo_megatron.algorithm.allocators.Allocator"
        )
    return found
