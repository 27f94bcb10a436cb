"""The safetensors of a Hugging Face folder, read lazily and checked against the model's config, and written; and the
folders that a run exports."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from dynamo_megatron.checkpoint.folder import MANIFEST_FILE
from dynamo_megatron.config.files import ConfigError
from dynamo_megatron.errors import InputError
from dynamo_megatron.models.mapping import HF_EMBEDDING, HF_HEAD, huggingface_shapes
from dynamo_megatron.models.spec import ModelSpec
from dynamo_megatron.runtime import plain_json
from dynamo_megatron.runtime.late import torch

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATING = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
DTYPE_NAMES = {f"torch.{dtype}": name for name, dtype in FLOATING.items()} | {"torch.float8_e4m3fn": "F8_E4M3"}
EXPORT_FILE = "export.json"  # in a folder that a run exported: {"step": N}
CHAT_TEMPLATE_FILE = "chat_template.jinja"  # of a model or a run; transformers prefers it to tokenizer_config.json's
NAMED_TEMPLATES = "additional_chat_templates"  # a folder, of models with several
NOT_COMPANIONS = ("metadata.json", MANIFEST_FILE, EXPORT_FILE)  # say what weights are there
LISTED = 3  # tensors named in an error, of those it is about


def check_tensors(
    path: Path, spec: ModelSpec, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises ValueError, one line, where the tensors of a checkpoint (name: shape) are not the model's: how many are
    missing, too many or of another shape, and the first few of them."""
    shaped = [n for n in expected if n in found and found[n] != expected[n]]
    wrong = {
        "missing": [n for n in expected if n not in found],
        f"without a place in a {spec.family} model": [n for n in found if n not in expected],
        "of another shape": [f"{n} {list(found[n])} instead of {list(expected[n])}" for n in shaped],
    }
    said = [f"{len(names)} {what}: {', '.join(names[:LISTED])}" for what, names in wrong.items() if names]
    if said:
        raise InputError(f"{path}: not the tensors of this config.json's model: {'; '.join(said)}")


def copy_companions(source: Path, folder: Path, chat_template: Path | None = None) -> None:
    """Copies what a model's folder `source` holds besides weights into `folder`: config.json, tokenizer, chat
    templates, generation config, licence. `chat_template`: takes the place of the model's. Raises OSError."""
    weights = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".distcp")
    for file in source.iterdir():
        other = file.suffix in weights or file.name.startswith((".", "model")) or file.name in NOT_COMPANIONS
        if file.is_file() and not other:
            shutil.copyfile(file, folder / file.name)  # without its mode: the copy of a read-only file is written to
    if chat_template is not None:
        shutil.copyfile(chat_template, folder / CHAT_TEMPLATE_FILE)
    elif (source / NAMED_TEMPLATES).is_dir():
        (folder / NAMED_TEMPLATES).mkdir()
        for file in (source / NAMED_TEMPLATES).glob("*.jinja"):
            shutil.copyfile(file, folder / NAMED_TEMPLATES / file.name)


def set_dtype(folder: Path, dtype: str, quantization: Mapping[str, object] | None = None) -> None:
    """In config.json, under each key that it has for it; `quantization` as quantization_config. Raises ValueError as
    `plain_json.read_object`."""
    file = folder / "config.json"
    config = plain_json.read_object(file)
    config |= dict.fromkeys({"torch_dtype", "dtype"} & config.keys() or ["dtype"], dtype)
    if quantization is not None:
        config["quantization_config"] = quantization
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class SafetensorsFiles:
    """The tensors of `model.safetensors`, or of the files that `model.safetensors.index.json` names, whatever they are.

    Opening reads the headers only. The files are closed when the object goes out of scope. Raises
    ValueError, one line naming the file: nothing there, a malformed index, a file missing, corrupt or truncated.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        names, index = [SINGLE_FILE], self.path / INDEX
        if not (self.path / SINGLE_FILE).is_file():
            if not index.is_file():
                raise InputError(f"{self.path}: neither {SINGLE_FILE} nor {INDEX}; save the model as safetensors")
            listed = plain_json.read_object(index).get("weight_map")
            if not isinstance(listed, dict) or not listed or any(Path(str(n)).name != n for n in listed.values()):
                raise InputError(
                    f"{index}: malformed (weight_map is missing, or names what are not files of the folder)"
                )
            names = sorted(set(listed.values()))
        self._files = {}
        self._file_of: dict[str, Path] = {}
        for file in (self.path / name for name in names):
            if not file.is_file():
                raise InputError(f"{file}: no such file, though {INDEX} names it")
            try:
                self._files[file] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise InputError(f"{file}: corrupt or truncated ({error})") from None
            self._file_of |= dict.fromkeys(self._files[file].keys(), file)

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    def get(self, name: str) -> torch.Tensor:
        """The whole tensor, on the CPU, in the file's dtype. Raises ValueError for a name that is not there."""
        if name not in self._file_of:
            raise InputError(f"{self.path}: tensor {name} is missing")
        return self._files[self._file_of[name]].get_tensor(name)

    def stored(self, name: str) -> tuple[tuple[int, ...], torch.dtype | str]:
        """(shape, dtype) of a tensor; the dtype as safetensors names it where it is none of FLOATING."""
        header = self._files[self._file_of[name]].get_slice(name)
        shape, kind = tuple(header.get_shape()), header.get_dtype()
        return shape, getattr(torch, FLOATING[kind]) if kind in FLOATING else kind

    def parts(self, name: str) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(offset, size) of the one part that the tensor is stored in."""
        shape, _ = self.stored(name)
        return [((0,) * len(shape), shape)]

    def read(self, name: str, offset: Sequence[int], size: Sequence[int]) -> torch.Tensor:
        """The region of a tensor at `offset` with shape `size`."""
        region = tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
        return self._files[self._file_of[name]].get_slice(name)[region] if region else self.get(name)


class SafetensorsFolder(SafetensorsFiles):
    """Checked on opening: these are the model's tensors, all of them and no others, in their shapes. A tied model may
    carry `lm_head.weight`, equal to the embedding; rotary `inv_freq` buffers do not matter. Raises ValueError, one line
    naming the file and the tensor, also for a tensor missing, too many, of the wrong shape or quantised."""

    def __init__(self, path: str | Path, spec: ModelSpec) -> None:
        super().__init__(path)
        shapes = huggingface_shapes(spec)
        if spec.tied and HF_HEAD in self._file_of:
            shapes[HF_HEAD] = shapes[HF_EMBEDDING]
        found = {}
        for name, file in self._file_of.items():
            if name.endswith("rotary_emb.inv_freq"):
                continue
            found[name], kind = self.stored(name)
            if name in shapes and isinstance(kind, str):
                raise InputError(f"{file}: tensor {name} is {kind}; give unquantised weights")
        check_tensors(self.path, spec, shapes, found)
        if HF_HEAD in shapes and spec.tied and not torch.equal(self.get(HF_HEAD), self.get(HF_EMBEDDING)):
            # transformers leaves such a pair untied: tying them would train another model than the folder's
            raise InputError(
                f"{self._file_of[HF_HEAD]}: tensor {HF_HEAD} differs from {HF_EMBEDDING}, though config.json says "
                "tie_word_embeddings"
            )

    def dtype(self, name: str) -> torch.dtype:
        return self.stored(name)[1]


# -- writing -----------------------------------------------------------------------------------------------------------
def write_file(
    file: Path, tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], get: Callable[[str], torch.Tensor]
) -> None:
    """Writes `tensors` (name -> dtype, shape) in this order into one file. `get` returns each when it is written: the
    library's own writer needs all of them at once. Raises OSError.

    A file is 8 bytes (the header's length, little endian), a JSON header and the tensors' bytes."""
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + nbytes(dtype, shape)
        header[name] = {"dtype": DTYPE_NAMES[str(dtype)], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    with open(file, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, (dtype, shape) in tensors.items():
            tensor = get(name)
            assert tensor.dtype == dtype and tuple(tensor.shape) == tuple(shape), f"{name}: {tensor.dtype}"
            stream.write(tensor.cpu().contiguous().view(torch.uint8).numpy().data)


def write_index(folder: Path, file_of: Mapping[str, str], size: int) -> None:
    """The index of a folder of several files. `file_of`: tensor -> file name; `size`: bytes of all tensors."""
    index = {"metadata": {"total_size": size}, "weight_map": file_of}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def nbytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return math.prod(shape) * dtype.itemsize


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
