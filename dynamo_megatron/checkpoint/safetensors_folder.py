"""The safetensors of a Hugging Face folder, read lazily and checked against the model's config."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open

from dynamo_megatron.checkpoint.folder import MANIFEST_FILE
from dynamo_megatron.errors import InputError
from dynamo_megatron.models.mapping import HF_EMBEDDING, HF_HEAD, huggingface_shapes
from dynamo_megatron.models.spec import ModelSpec
from dynamo_megatron.runtime import plain_json

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATING = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
EXPORT_FILE = "export.json"  # in a folder that a run exported: {"step": N}
CHAT_TEMPLATE_FILE = (
    "chat_template.jinja"  # of a model, which transformers prefers to tokenizer_config.json's; of a run
)
NOT_COMPANIONS = ("metadata.json", MANIFEST_FILE, EXPORT_FILE)  # say what weights are there
LARGEST_HEADER = 64 << 20  # bytes: of 500,000 tensors
LISTED = 3  # tensors named in an error, of those it is about


def check_tensors(
    path: Path,
    spec: ModelSpec,
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    file_of: Mapping[str, str] | None = None,
) -> None:
    """Raises ValueError, one line, where the tensors of a checkpoint (name: shape) are not the model's: how many are
    missing, too many or of another shape, and the first few of them."""
    file_of = file_of or {}

    def listed(names: list[str], what: str, detail: Callable[[str], str]) -> str:
        shown = [f"{n}{detail(n)}" + (f" ({file_of[n]})" if n in file_of else "") for n in names[:LISTED]]
        more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        return f"{len(names)} tensor{'s' * (len(names) > 1)} {what}: {', '.join(shown)}{more}"

    missing, extra = [n for n in expected if n not in found], [n for n in found if n not in expected]
    shaped = [n for n in expected if n in found and found[n] != expected[n]]
    wrong = [
        listed(missing, "missing", lambda n: ""),
        listed(extra, f"without a place in a {spec.family} model", lambda n: ""),
        listed(shaped, "of another shape", lambda n: f" {list(found[n])} instead of {list(expected[n])}"),
    ]
    wrong = [text for text, names in zip(wrong, (missing, extra, shaped), strict=True) if names]
    if wrong:
        raise InputError(f"{path}: not the model of this config.json: {'; '.join(wrong)}")


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite."""
    # NaN comes out of aminmax as both; isfinite of the whole tensor would take another one of its size.
    return tensor.numel() == 0 or all(bool(torch.isfinite(end)) for end in tensor.aminmax())


def companion_files(folder: Path) -> list[Path]:
    """What a model's folder holds besides weights: config.json, tokenizer, generation config, licence."""
    weights = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".distcp")
    return sorted(
        file
        for file in folder.iterdir()
        if file.is_file()
        and file.suffix not in weights
        and not file.name.startswith((".", "model"))
        and file.name not in NOT_COMPANIONS
    )


def set_dtype(folder: Path, dtype: str, quantization: Mapping[str, object] | None = None) -> None:
    """In config.json, under the key that it has for it, and `quantization` as quantization_config. Raises ValueError as
    `plain_json.read_object`."""
    file = folder / "config.json"
    config = plain_json.read_object(file)
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    if quantization is not None:
        config["quantization_config"] = quantization
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class SafetensorsFiles:
    """The tensors of `model.safetensors`, or of the files that `model.safetensors.index.json` names, whatever they are.

    Opening reads the headers only. Use as a context manager, or let it go out of scope, to close the files.

    Raises ValueError, one line naming the file: nothing there, a malformed index, a file missing, corrupt or truncated,
    a tensor in two files or not where the index says.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        index = {} if (self.path / SINGLE_FILE).is_file() else self._read_index()
        self._files = {}
        self._file_of: dict[str, Path] = {}
        for name in sorted(set(index.values())) or [SINGLE_FILE]:
            file = self.path / name
            if not file.is_file():
                raise InputError(f"{file}: no such file, though {INDEX} names it")
            _check_header(file)
            try:
                self._files[file] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise InputError(f"{file}: corrupt or truncated ({error})") from None
            for tensor in self._files[file].keys():  # noqa: SIM118 (not a dict: it cannot be iterated)
                if tensor in self._file_of:
                    raise InputError(f"{file}: tensor {tensor} is also in {self._file_of[tensor].name}")
                self._file_of[tensor] = file
        for tensor, name in index.items():
            if tensor not in self._file_of:
                raise InputError(f"{self.path / name}: tensor {tensor} is not in it, though {INDEX} says so")

    def __enter__(self) -> Self:
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
            raise InputError(f"{file}: tensor {name} cannot be read ({error})") from None

    def rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Rows of a tensor of one dimension or more; as `get`."""
        file = self._where(name)
        try:
            return self._files[file].get_slice(name)[first:last]
        except SafetensorError as error:
            raise InputError(f"{file}: tensor {name} cannot be read ({error})") from None

    def stored(self, name: str) -> tuple[tuple[int, ...], str]:
        """(shape, dtype as safetensors names it) of a tensor."""
        header = self._files[self._where(name)].get_slice(name)
        return tuple(header.get_shape()), header.get_dtype()

    def _where(self, name: str) -> Path:
        if name not in self._file_of:
            files = ", ".join(file.name for file in list(self._files)[:3])
            raise InputError(f"{self.path}: tensor {name} is missing ({len(self._files)} files: {files})")
        return self._file_of[name]

    def _read_index(self) -> dict[str, str]:
        file = self.path / INDEX
        if not file.is_file():
            raise InputError(f"{self.path}: neither {SINGLE_FILE} nor {INDEX}; save the model as safetensors")
        weight_map = plain_json.read_object(file).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise InputError(f"{file}: malformed (weight_map is missing, or has values that are not file names)")
        if not weight_map or any(Path(name).name != name for name in weight_map.values()):
            raise InputError(f"{file}: malformed (weight_map is empty or names files outside the folder)")
        return weight_map


def _check_header(file: Path) -> None:
    """Raises ValueError where the header's length, which the file begins with, is more than what is read of it."""
    with open(file, "rb") as stream:
        length, there = int.from_bytes(stream.read(8), "little"), file.stat().st_size - 8
    if length > min(there, LARGEST_HEADER):
        raise InputError(f"{file}: corrupt or truncated (a header of {length} bytes in a file of {there + 8})")


class SafetensorsFolder(SafetensorsFiles):
    """Checked on opening: these are the model's tensors, all of them and no others, in their shapes. A tied model may
    carry `lm_head.weight`, equal to the embedding; rotary `inv_freq` buffers do not matter.

    Raises ValueError, one line naming the file and the tensor, also for a tensor missing, too many, of the wrong shape
    or quantised.
    """

    def __init__(self, path: str | Path, spec: ModelSpec) -> None:
        super().__init__(path)
        self._check(spec)

    def dtype(self, name: str) -> torch.dtype:
        return FLOATING[self.stored(name)[1]]

    def _check(self, spec: ModelSpec) -> None:
        shapes = huggingface_shapes(spec)
        if spec.tied and HF_HEAD in self._file_of:
            shapes[HF_HEAD] = shapes[HF_EMBEDDING]
        found = {}
        for name, file in self._file_of.items():
            if name.endswith("rotary_emb.inv_freq"):
                continue
            found[name], kind = self.stored(name)
            if name in shapes and kind not in FLOATING:
                raise InputError(f"{file}: tensor {name} is {kind}; give unquantised weights")
        check_tensors(self.path, spec, shapes, found, {name: file.name for name, file in self._file_of.items()})
        if HF_HEAD in shapes and spec.tied and not torch.equal(self.get(HF_HEAD), self.get(HF_EMBEDDING)):
            # transformers leaves such a pair untied: tying them would train another model than the folder's
            raise InputError(
                f"{self._file_of[HF_HEAD]}: tensor {HF_HEAD} differs from {HF_EMBEDDING}, though config.json says "
                "tie_word_embeddings"
            )
