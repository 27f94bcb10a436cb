"""The safetensors of a Hugging Face folder, read lazily and checked against the model's config."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from dynamo_megatron.models.mapping import HF_EMBEDDING, HF_HEAD, huggingface_shapes
from dynamo_megatron.models.spec import ModelSpec

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATING = {"BF16", "F16", "F32", "F64"}


class SafetensorsFolder:
    """The tensors of `model.safetensors`, or of the files that `model.safetensors.index.json` names.

    Opening reads the headers only and checks them: they must hold the model's tensors, all of them and no others, in
    their shapes. A tied model may carry `lm_head.weight`, equal to the embedding; rotary `inv_freq` buffers do not
    matter. Use as a context manager, or let it go out of scope, to close the files.

    Raises ValueError, one line naming the file and the tensor: nothing there, a malformed index, a file missing,
    corrupt or truncated, a tensor missing, in two files, too many, of the wrong shape or quantised.
    """

    def __init__(self, path: str | Path, spec: ModelSpec) -> None:
        self.path = Path(path)
        index = {} if (self.path / SINGLE_FILE).is_file() else self._read_index()
        self._files = {}
        self._file_of: dict[str, Path] = {}
        for name in sorted(set(index.values())) or [SINGLE_FILE]:
            file = self.path / name
            if not file.is_file():
                raise ValueError(f"{file}: no such file, though {INDEX} names it")
            try:
                self._files[file] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{file}: corrupt or truncated ({error})") from None
            for tensor in self._files[file].keys():  # noqa: SIM118 (not a dict: it cannot be iterated)
                if tensor in self._file_of:
                    raise ValueError(f"{file}: tensor {tensor} is also in {self._file_of[tensor].name}")
                self._file_of[tensor] = file
        for tensor, name in index.items():
            if tensor not in self._file_of:
                raise ValueError(f"{self.path / name}: tensor {tensor} is not in it, though {INDEX} says so")
        self._check(spec)

    def __enter__(self) -> SafetensorsFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    def get(self, name: str) -> torch.Tensor:
        """The whole tensor, on the CPU, in the file's dtype. Raises ValueError for a name that is not there."""
        file = self._where(name)
        try:
            return self._files[file].get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{file}: tensor {name} cannot be read ({error})") from None

    def _check(self, spec: ModelSpec) -> None:
        shapes = huggingface_shapes(spec)
        if spec.tied and HF_HEAD in self._file_of:
            shapes[HF_HEAD] = shapes[HF_EMBEDDING]
        for name, file in self._file_of.items():
            if name.endswith("rotary_emb.inv_freq"):
                continue
            if name not in shapes:
                raise ValueError(f"{file}: tensor {name} has no place in a {spec.family} model of this config.json")
            header = self._files[file].get_slice(name)
            if tuple(header.get_shape()) != shapes[name]:
                raise ValueError(
                    f"{file}: tensor {name} has shape {header.get_shape()}, config.json says {list(shapes[name])}"
                )
            if header.get_dtype() not in FLOATING:
                raise ValueError(f"{file}: tensor {name} is {header.get_dtype()}; give unquantised weights")
        for name in shapes:
            self._where(name)
        carries_head = spec.tied and HF_HEAD in self._file_of
        if carries_head and not torch.equal(self.get(HF_HEAD), self.get(HF_EMBEDDING)):
            # transformers leaves such a pair untied: tying them would train another model than the folder's
            raise ValueError(
                f"{self._file_of[HF_HEAD]}: tensor {HF_HEAD} differs from {HF_EMBEDDING}, though config.json says "
                "tie_word_embeddings"
            )

    def _where(self, name: str) -> Path:
        if name not in self._file_of:
            files = ", ".join(file.name for file in list(self._files)[:3])
            raise ValueError(f"{self.path}: tensor {name} is missing ({len(self._files)} files: {files})")
        return self._file_of[name]

    def _read_index(self) -> dict[str, str]:
        file = self.path / INDEX
        if not file.is_file():
            raise ValueError(f"{self.path}: neither {SINGLE_FILE} nor {INDEX}; save the model as safetensors")
        try:
            weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
            if not weight_map or any(Path(name).name != name for name in weight_map.values()):
                raise ValueError("weight_map is empty or names files outside the folder")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file}: malformed ({error!r})") from None
        return weight_map
