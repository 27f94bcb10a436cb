"""Models: Hugging Face config -> ModelSpec (`families.py`), names, shapes, and an SGLang server's own layout."""

from __future__ import annotations

from pathlib import Path

from dynamo_megatron.errors import InputError
from dynamo_megatron.models.families import FAMILIES
from dynamo_megatron.models.spec import ModelSpec
from dynamo_megatron.runtime import plain_json
from dynamo_megatron.runtime.plain_text import on_one_line

__all__ = ["FAMILIES", "ModelSpec", "load_model_config"]

ALIASES = {"mistral": "llama"}  # model_type -> the family that computes the same from the fields that it knows


def load_model_config(path: str | Path, family: str | None = None) -> ModelSpec:
    """Reads `path`/config.json. `family`: None, or the family that the file's model_type belongs to.

    Raises ValueError, one line with the path, if there is no config.json, or if it is malformed, has a field that
    cannot be mapped or an unknown model_type: a model with Llama's fields may compute something else.
    """
    file = Path(path) / "config.json"
    if not file.parent.is_dir():
        raise InputError(
            f"{path}: no such folder; give a Hugging Face folder on this machine, or one that `convert hf2mcore` wrote"
        )
    if not file.is_file():
        raise InputError(f"{file}: no such file; give a folder with config.json, weights and tokenizer")
    config = plain_json.read_object(file)
    kind = config.get("model_type")
    name = ALIASES.get(kind, kind) if isinstance(kind, str) else None
    if name not in FAMILIES:
        raise InputError(
            f"{file}: model_type {kind!r:.80} is not supported, and model.family does not change that; supported are "
            f"{', '.join([*FAMILIES, *ALIASES])}"
        )
    if family not in (None, name):
        raise InputError(f"{file}: model_type {kind!r} is of family {name}, model.family is {family!r}; leave it out")
    try:
        return FAMILIES[name](config)
    except ValueError as error:
        raise InputError(f"{file}: {on_one_line(str(error), 1000)}") from None
