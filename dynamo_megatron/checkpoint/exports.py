"""The Hugging Face folders that a run exports: their paths, and the step of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamo_megatron.checkpoint.safetensors_folder import EXPORT_FILE
from dynamo_megatron.config import Config
from dynamo_megatron.config.files import ConfigError
from dynamo_megatron.runtime import plain_json


def every_export(output: Path, step: int) -> Path:
    """The folder of `checkpoint.export_hf: every`."""
    return output / f"hf-step-{step:06d}"


def exported_step(folder: Path) -> int | None:
    """The step whose weights an exported folder has; None where `folder` is not an export. Raises ConfigError where the
    folder's EXPORT_FILE names no step."""
    file = folder / EXPORT_FILE
    if not file.is_file():
        return None
    try:
        return plain_json.read_object(file)["step"]
    except (ValueError, KeyError):
        raise ConfigError(f"{file}: names no step; delete {folder}, and the run exports its model again") from None


def best_step(evaluations: Sequence[Mapping[str, Any]], config: Config) -> int:
    """The step of the evaluation with the highest pass@k for the first `eval.k`; of equal ones the first."""
    return max(evaluations, key=lambda e: e.get(f"eval/pass@{config.eval.k[0]}", -1.0))["step"]  # of another eval.k: -1
