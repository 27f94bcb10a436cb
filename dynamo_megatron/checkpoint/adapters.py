"""Checkpoints of LoRA runs, which hold the adapters alone: merged into their base, or as a folder for `peft`."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from dynamo_megatron.checkpoint.folder import MANIFEST_FILE, read_manifest
from dynamo_megatron.checkpoint.safetensors_folder import check_tensors, write_file
from dynamo_megatron.checkpoint.torch_dist import TorchDistReader
from dynamo_megatron.checkpoint.weights import model_digest, open_weights
from dynamo_megatron.config import LoraConfig
from dynamo_megatron.errors import InputError
from dynamo_megatron.models.adapters import ADAPTER, adapted_weights, merged
from dynamo_megatron.models.mapping import (
    huggingface_names,
    huggingface_shapes,
    layout_of,
    parameter_names,
    to_huggingface,
)
from dynamo_megatron.models.spec import ModelSpec


def read_lora(checkpoint: Path) -> tuple[LoraConfig, str] | None:
    """(model.lora, digest of the base) from the manifest of a checkpoint of adapters; None where it is none. Raises
    InputError for a malformed manifest."""
    manifest = read_manifest(checkpoint)
    if "lora" not in manifest:
        return None
    try:
        saved = dict(manifest["lora"])
        digest = str(saved.pop("base"))
        return LoraConfig.model_validate(saved), digest
    except (KeyError, TypeError, ValueError):
        raise InputError(f"{checkpoint / MANIFEST_FILE}: malformed (what it says of its adapters)") from None


def check_base(checkpoint: Path, saved: str, digest: str, base: str | Path) -> None:
    """Raises InputError where the adapters were trained beside weights of another digest, `saved`, than `base`'s."""
    if saved != digest:
        raise InputError(
            f"{checkpoint}: its adapters were trained beside other weights than those in {base} (digest {saved}, not "
            f"{digest}); restore that model, or name its folder"
        )


class MergedFolder:
    """The Hugging Face tensors of a LoRA checkpoint's policy: the base's, with the adapters merged. Used like
    SafetensorsFolder. Raises ValueError (one line): the base is not the checkpoint's, or files are damaged."""

    def __init__(self, path: Path, base: Path, spec: ModelSpec) -> None:
        self.path, self._spec, found = path, spec, read_lora(path)
        assert found is not None, f"{path}: no adapters"
        self.lora, saved = found
        check_base(path, saved, model_digest(base, spec), base)
        self._base, self._reader = open_weights(base, spec), TorchDistReader(path)
        name = read_manifest(path)["dtype"]
        if name not in ("bfloat16", "float32"):
            raise InputError(f"{path / MANIFEST_FILE}: malformed (dtype {name!r:.40})")
        self._dtype = getattr(torch, name)
        self._weight_of = {
            name: weight for weight in adapted_weights(spec, self.lora) for name in huggingface_names(spec, weight)
        }
        self._check()

    @property
    def names(self) -> list[str]:
        return [name for weight in parameter_names(self._spec) for name in huggingface_names(self._spec, weight)]

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype

    def get(self, name: str) -> torch.Tensor:
        """The whole tensor, on the CPU, in the run's dtype: with the values that the run's own export has."""
        weight = self._base.get(name).to(self._dtype)
        if name not in self._weight_of:
            return weight
        return merged(weight, *self.adapter(name), self.lora.alpha / self.lora.rank)

    def adapter(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(a [rank, in], b [out, rank]) of the Hugging Face weight `name`. Those that are parts of one Megatron weight
        share their a."""
        weight = self._weight_of[name]
        a, b = self._read(weight, "a"), self._read(weight, "b")
        return a, b if layout_of(weight) == "row" else to_huggingface(self._spec, weight, [b])[name]

    @property
    def adapted(self) -> list[str]:
        """The Hugging Face weights that adapters change."""
        return list(self._weight_of)

    def _read(self, weight: str, part: str) -> torch.Tensor:
        layer = int(weight.split(".")[2])
        key = _key(weight, part)
        shape = self._reader.stored(key)[0][1:]
        return self._reader.read(key, (layer, 0, 0), (1, *shape))[0]

    def _check(self) -> None:
        shapes, expected = huggingface_shapes(self._spec), {}
        for weight in adapted_weights(self._spec, self.lora):
            parts = [shapes[name] for name in huggingface_names(self._spec, weight)]
            expected[_key(weight, "a")] = (self._spec.num_layers, self.lora.rank, parts[0][1])
            expected[_key(weight, "b")] = (self._spec.num_layers, sum(rows for rows, _ in parts), self.lora.rank)
        found = {key: self._reader.stored(key)[0] for key in self._reader.names if not key.startswith("optimizer.")}
        check_tensors(self.path, self._spec, expected, found)


def _key(weight: str, part: str) -> str:
    """Megatron stacks a parameter over the layers."""
    within = weight.removesuffix(".weight").split(".", 3)[3]
    return f"decoder.layers.{within}{ADAPTER}{part}"


def write_peft(folder: MergedFolder, base: str, out: Path) -> None:
    """Writes the adapters into the folder `out`, as `peft` saves them. Raises OSError."""
    names, tensors = {}, {}
    for name in folder.adapted:
        for part, tensor in zip("AB", folder.adapter(name), strict=True):
            key = f"base_model.model.{name.removesuffix('weight')}lora_{part}.weight"
            names[key], tensors[key] = (name, "AB".index(part)), (tensor.dtype, tensor.shape)
    write_file(out / "adapter_model.safetensors", tensors, lambda key: folder.adapter(names[key][0])[names[key][1]])
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": folder.lora.rank,
        "lora_alpha": folder.lora.alpha,
        "target_modules": sorted({name.split(".")[-2] for name in folder.adapted}),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
