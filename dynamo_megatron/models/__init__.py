"""One small file per family: Hugging Face config -> ModelSpec and the family's name table.

A new family is one file with `spec_from_config` and one entry in FAMILIES.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dynamo_megatron.models import llama, qwen2, qwen3, qwen3_moe
from dynamo_megatron.models.checkpoint_files import SafetensorsFolder
from dynamo_megatron.models.megatron_folder import MegatronFolder
from dynamo_megatron.models.spec import ModelSpec
from dynamo_megatron.models.torch_dist import is_torch_dist
from dynamo_megatron.models.weights import load_weights

__all__ = [
    "FAMILIES",
    "MegatronFolder",
    "ModelSpec",
    "SafetensorsFolder",
    "load_model_config",
    "load_weights",
    "open_weights",
]

FAMILIES: dict[str, Callable[[Mapping[str, Any]], ModelSpec]] = {
    "llama": llama.spec_from_config,
    "qwen2": qwen2.spec_from_config,
    "qwen3": qwen3.spec_from_config,
    "qwen3_moe": qwen3_moe.spec_from_config,
}


def load_model_config(path: str | Path, family: str | None = None) -> ModelSpec:
    """Reads `path`/config.json; `family` None takes the file's model_type.

    Raises ValueError, one line with the path: no folder, no config.json, malformed, a family that is not known, a
    field that cannot be mapped.
    """
    file = Path(path) / "config.json"
    if not file.parent.is_dir():
        raise ValueError(
            f"{path}: no such folder; give a Hugging Face folder on this machine, or one that `convert hf2mcore` wrote"
        )
    if not file.is_file():
        raise ValueError(f"{file}: no such file; give a folder with config.json, weights and tokenizer")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: not JSON ({error})") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file}: not a JSON object")
    name = config.get("model_type") if family is None else family
    if name not in FAMILIES:
        what = "model_type" if family is None else "model.family"
        raise ValueError(f"{file}: {what} {name!r} is not mapped; the families known are {', '.join(FAMILIES)}")
    try:
        return FAMILIES[name](config)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def open_weights(path: str | Path, spec: ModelSpec) -> SafetensorsFolder | MegatronFolder:
    """The weights in a model's folder, safetensors or a Megatron checkpoint; opening checks every name and shape.

    Raises ValueError, one line.
    """
    return MegatronFolder(path, spec) if is_torch_dist(path) else SafetensorsFolder(path, spec)
