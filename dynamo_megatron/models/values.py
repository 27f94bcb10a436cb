"""Values of config.json, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dynamo_megatron.errors import InputError


def flag(config: Mapping[str, Any], key: str) -> bool:
    """A boolean of config.json, False if it is missing or null. Raises ValueError for anything else."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise InputError(f"{key}: {value!r} is not true or false")
    return bool(value)


def integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer of config.json, `default` if missing or null. Raises ValueError for anything else."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise InputError(f"{key}: missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{key}: {value!r} is not a positive integer")
    return value


def number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A positive finite number of config.json, `default` if missing or null. Raises ValueError for anything else."""
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InputError(f"{key}: {value!r} is not a positive number")
    return float(value)
