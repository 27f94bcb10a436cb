"""RoPE's parameters as transformers reads them from config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dynamo_megatron.errors import InputError
from dynamo_megatron.models.config_fields import flag, integer, number

# rope_type -> its parameters besides rope_theta
PARAMETERS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate", "attention_factor",
        "mscale", "mscale_all_dim",
    ),
}  # fmt: skip
COMMON = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
NULLABLE = {"attention_factor", "mscale", "mscale_all_dim"}  # null is as good as missing, for SGLang too

RopeScaling = tuple[tuple[str, Any], ...]


def read_rope(config: Mapping[str, Any], max_positions: int) -> tuple[float, RopeScaling]:
    """Returns (theta, parameters of the scaling as (name, value) pairs: rope_type first, none for plain RoPE).

    transformers 5 writes `rope_parameters`, older versions `rope_theta` beside `rope_scaling`. Raises ValueError naming
    the field that is malformed, not supported, or read differently by versions of transformers or by SGLang: both sets
    if they differ, `mscale` 0, null except for NULLABLE.
    """
    where, part = _parameter_set(config)
    theta = _theta(config, where, part)
    for holder in (config, part):
        if holder.get("partial_rotary_factor") not in (None, 1):
            raise InputError(f"partial_rotary_factor: {holder['partial_rotary_factor']!r} is not supported, only 1.0")
    kind = part.get("rope_type", part.get("type", "default"))
    if part.get("type", kind) != kind:
        raise InputError(f"{where}: type {part['type']!r} contradicts rope_type {kind!r}; remove one of them")
    if not isinstance(kind, str) or kind not in PARAMETERS:
        raise InputError(f"rope_type: {kind!r} is not supported; supported are {', '.join(PARAMETERS)}")
    for key in part:
        if key not in COMMON and key not in PARAMETERS[kind]:
            raise InputError(
                f"{key}: not a parameter of rope_type {kind!r} in {where}, which has "
                f"{', '.join(PARAMETERS[kind]) or 'none besides rope_theta'}; remove it if it has no effect"
            )
        if part[key] is None and key not in NULLABLE:
            raise InputError(f"{key}: null in {where}; remove it or give a value")
    return theta, _scaling(kind, part, max_positions)


def _parameter_set(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    given = {key: config[key] for key in ("rope_scaling", "rope_parameters") if config.get(key)}
    for key, part in given.items():
        if not isinstance(part, dict) or any(isinstance(value, dict) for value in part.values()):
            raise InputError(f"{key}: {part!r} is not one set of RoPE parameters for all layers")
    if len(given) == 2 and given["rope_scaling"] != given["rope_parameters"]:
        raise InputError(
            "rope_scaling: contradicts rope_parameters, and versions of transformers differ in which of them they "
            "read; keep rope_parameters alone and add rope_scaling's keys to it"
        )
    return next(iter(given.items()), ("rope_parameters", {}))


def _theta(config: Mapping[str, Any], where: str, part: Mapping[str, Any]) -> float:
    theta = number({"rope_theta": part.get("rope_theta", config.get("rope_theta", 10000.0))}, "rope_theta")
    if theta <= 1:
        raise InputError(f"rope_theta: {theta!r} is not above 1")
    if config.get("rope_theta") not in (None, theta):
        raise InputError(
            f"rope_theta: {config['rope_theta']!r} contradicts the {theta!r} in {where}, which transformers reads; "
            "remove one of them"
        )
    return theta


def _scaling(kind: str, part: Mapping[str, Any], max_positions: int) -> RopeScaling:
    if kind == "default":
        return ()
    found: dict[str, Any] = {"rope_type": kind, "factor": number(part, "factor")}
    if found["factor"] < 1:
        raise InputError(f"factor: {part['factor']!r} of rope_type {kind!r} is below 1")
    if kind == "linear":
        return tuple(found.items())
    found["original_max_position_embeddings"] = integer(part, "original_max_position_embeddings", max_positions)
    low, high = ("beta_slow", "beta_fast") if kind == "yarn" else ("low_freq_factor", "high_freq_factor")
    found[low] = number(part, low, 1.0 if kind == "yarn" else None)
    found[high] = number(part, high, 32.0 if kind == "yarn" else None)
    if found[high] <= found[low]:
        raise InputError(f"{high}: {found[high]!r} is not above {low} {found[low]!r}")
    if kind == "yarn":
        found |= _yarn(part, found["factor"])
    return tuple(found.items())


def _yarn(part: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """YaRN's other parameters; attention_factor is left out if the others imply its value."""
    found: dict[str, Any] = {"truncate": flag({"truncate": True, **part}, "truncate")}
    scales = {key: number(part, key) for key in ("mscale", "mscale_all_dim") if part.get(key) is not None}
    implied = 0.1 * math.log(factor) + 1
    if len(scales) == 2:  # one alone has no effect
        found |= scales
        implied = (0.1 * scales["mscale"] * math.log(factor) + 1) / (
            0.1 * scales["mscale_all_dim"] * math.log(factor) + 1
        )
    if part.get("attention_factor") is not None:
        given = number(part, "attention_factor")
        if not math.isclose(given, implied, rel_tol=1e-6):
            found["attention_factor"] = given
    return found
