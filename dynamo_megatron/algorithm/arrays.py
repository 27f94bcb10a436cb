"""Helpers of functions that take either numpy arrays or torch tensors and return the same kind."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import numpy as np

if TYPE_CHECKING:
    import torch

Array = TypeVar("Array", np.ndarray, "torch.Tensor")


def to_numpy(array: Any, name: str) -> np.ndarray:
    """`array` (numpy, torch on CPU, sequence) as numpy. Raises ValueError naming it unless it has one dimension."""
    values = array.detach().numpy() if _is_tensor(array) else np.asarray(array)
    if values.ndim != 1:
        raise ValueError(f"{name}: expected one dimension, got shape {values.shape}")
    return values


def finite(array: Any, name: str, least: float = -np.inf) -> np.ndarray:
    """As `to_numpy`, in float64. Raises ValueError also naming an entry that is not finite, or below `least`."""
    values = to_numpy(array, name).astype(np.float64)
    if (bad := np.flatnonzero(~(np.isfinite(values) & (values >= least)))).size:
        bound = "" if np.isinf(least) else f", {least:g} or above"
        raise ValueError(f"{name}: entry {bad[0]} is {values[bad[0]]}; expected a finite number{bound}")
    return values


def like(result: np.ndarray, source: Any) -> Any:
    """Returns `result` as a tensor if `source` is a tensor, else unchanged."""
    if not _is_tensor(source):
        return result
    import torch

    return torch.from_numpy(result)


def torch_function(function: Callable) -> Callable[..., Any]:
    """Lets a function written in torch take numpy arrays too; then the tensors it returns become numpy arrays."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        import torch

        seen = [value for value in (*args, *kwargs.values()) if isinstance(value, np.ndarray)]
        if not seen:
            return function(*args, **kwargs)
        # order="C" copies: torch takes neither negative strides nor read-only memory
        enter = lambda v: torch.from_numpy(np.array(v, order="C")) if isinstance(v, np.ndarray) else v  # noqa: E731
        leave = lambda v: v.detach().numpy() if _is_tensor(v) else v  # noqa: E731
        result = function(*(enter(v) for v in args), **{k: enter(v) for k, v in kwargs.items()})
        return type(result)(*(leave(v) for v in result)) if isinstance(result, tuple) else leave(result)

    return wrapper


def group_index(group_ids: Sequence[Hashable] | np.ndarray | torch.Tensor, rollouts: int) -> tuple[np.ndarray, int]:
    """(int64 [S] group number of every rollout, number of groups); ids may be strings or integers, in any order. Raises
    ValueError naming `group_ids` unless there is one id per rollout."""
    ids = group_ids.tolist() if _is_tensor(group_ids) or isinstance(group_ids, np.ndarray) else list(group_ids)
    if len(ids) != rollouts:
        raise ValueError(f"group_ids: {len(ids)} ids for {rollouts} rollouts; give one a rollout")
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(i, len(numbers)) for i in ids], np.int64), len(numbers)


def described(value: Any) -> str:
    """Dtype and shape of an array or tensor, or the type of another value, for messages."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape}"
    if _is_tensor(value):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"
    return type(value).__name__


def _is_tensor(value: Any) -> TypeGuard[torch.Tensor]:
    """Does not import torch, which takes seconds: if it is not imported yet, no value is a tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
