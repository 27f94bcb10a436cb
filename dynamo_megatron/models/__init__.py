"""Models: Hugging Face config -> ModelSpec; names, shapes, and an SGLang server's own layout."""

from __future__ import annotations

from pathlib import Path

from dynamo_megatron.errors import InputError
from dynamo_megatron.models.bridged import bridged_spec
from dynamo_megatron.models.family import Family
from dynamo_megatron.models.gemma3 import Gemma3
from dynamo_megatron.models.glm4 import Glm4
from dynamo_megatron.models.granite import Granite
from dynamo_megatron.models.llama import Llama, Mistral, Phi3
from dynamo_megatron.models.olmo import Olmo2, Olmo3
from dynamo_megatron.models.qwen import Qwen2, Qwen3, Qwen3Moe
from dynamo_megatron.models.smollm3 import SmolLM3
from dynamo_megatron.models.spec import ModelSpec
from dynamo_megatron.runtime import plain_json
from dynamo_megatron.runtime.plain_text import on_one_line

# by config.json's model_type
FAMILIES: dict[str, Family] = {
    "llama": Llama(),
    "mistral": Mistral(),
    "qwen2": Qwen2(),
    "qwen3": Qwen3(),
    "qwen3_moe": Qwen3Moe(),
    "glm4": Glm4(),
    "smollm3": SmolLM3(),
    "phi3": Phi3(),
    "olmo2": Olmo2(),
    "olmo3": Olmo3(),
    "gemma3_text": Gemma3(),
    "granite": Granite(),
}

__all__ = ["FAMILIES", "ModelSpec", "load_model_config"]


def load_model_config(path: str | Path, family: str | None = None, source: str = "own") -> ModelSpec:
    """Reads `path`/config.json. `family`: None, or the family that the file's model_type belongs to. `source`: as
    model.source. Raises ValueError, one line with the path, if there is no config.json, or if it is malformed, has a
    field that cannot be mapped or an unknown model_type: a model with another family's fields may compute something
    else."""
    file = Path(path) / "config.json"
    if not file.parent.is_dir():
        raise InputError(
            f"{path}: no such folder; give a Hugging Face folder on this machine, or one that `convert hf2mcore` wrote"
        )
    if not file.is_file():
        of_run = file.parent / "hf"  # of a run's output_dir
        right = of_run if (of_run / "config.json").is_file() else "a folder with config.json, weights and tokenizer"
        raise InputError(f"{file}: no such file; give {right}")
    config = plain_json.read_object(file)
    kind = config.get("model_type")
    known = FAMILIES.get(kind) if isinstance(kind, str) else None
    if source == "bridge":
        if family is not None:
            raise InputError(f"model.family: {family!r} is of model.source: own; leave it out")
    elif known is None:
        raise InputError(
            f"{file}: model_type {kind!r:.80} is not supported, and model.family does not change that; supported are "
            f"{', '.join(FAMILIES)}; others can be trained with model.source: bridge (docs/checkpoints.md)"
        )
    elif family not in (None, known.name):
        raise InputError(
            f"{file}: model_type {kind!r} is of family {known.name}, model.family is {family!r}; leave it out"
        )
    try:
        return bridged_spec(config, file.parent) if known is None or source == "bridge" else known.read(config)
    except ValueError as error:
        raise InputError(f"{file}: {on_one_line(str(error), 1000)}") from None
