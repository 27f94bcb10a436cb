"""`dynamo-megatron convert` both ways: bit-equal, streamed, and every bad input one line."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys

import pytest
import torch
import yaml
from background_run import exported, same_weights
from safetensors.torch import load_file, save_file

from dynamo_megatron.checkpoint import convert as conversion
from dynamo_megatron.checkpoint.convert import hf2mcore, mcore2hf
from dynamo_megatron.checkpoint.folder import read_manifest, write_manifest
from dynamo_megatron.checkpoint.safetensors_folder import write_file
from dynamo_megatron.checkpoint.weights import model_digest, open_weights
from dynamo_megatron.models import FAMILIES, load_model_config
from dynamo_megatron.models.mapping import huggingface_shapes
from dynamo_megatron.models.published import PUBLISHED

NORM, UP = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def changed(model_of, tmp_path):
    """changed(change, **options) -> a copy of a model whose tensors `change` has altered."""

    def make(change, **options):
        folder = shutil.copytree(model_of(**options), tmp_path / "changed", dirs_exist_ok=True)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


@pytest.fixture
def mcore(converted, tmp_path):
    """A copy of the converted folder."""
    return shutil.copytree(converted[1], tmp_path / "mcore")


@pytest.mark.parametrize(("dtype", "tied"), [("bfloat16", False), ("float32", True)])
@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_is_bit_equal(model_of, tmp_path, monkeypatch, family, dtype, tied):
    monkeypatch.setattr(conversion, "FILE_BYTES", 20_000)  # several files, as a large model has
    folder = shutil.copytree(model_of(family, dtype=dtype, tied=tied), tmp_path / "model")
    (folder / "config.json").chmod(0o444)  # as in a store that many share
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("x")
    hf2mcore(folder, tmp_path / "mcore")
    mcore2hf(tmp_path / "mcore", tmp_path / "hf")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    assert same_weights(tmp_path / "hf", folder)
    for file in folder.rglob("*.j*"):
        if file.name != "config.json":
            assert (tmp_path / "hf" / file.relative_to(folder)).read_bytes() == file.read_bytes()
    assert (tmp_path / "hf" / "config.json").stat().st_mode & 0o200
    opened = open_weights(tmp_path / "hf", load_model_config(tmp_path / "hf"))
    assert set(opened.names) == set(exported(folder))  # the index agrees
    digests = {model_digest(path, load_model_config(folder)) for path in (folder, tmp_path / "mcore", tmp_path / "hf")}
    assert len(digests) == 1


def test_a_flipped_bit_is_refused(mcore, refused, convert, flip, tmp_path):
    flip(file := mcore / "__0_0.distcp")
    line = refused("mcore2hf", mcore)
    assert line.startswith(f"{file}: its bytes are not those that were saved (XXH3 ")
    assert line.endswith("; copy or convert the model again")
    (mcore / "manifest.json").unlink()  # as another program writes it
    said = f"{mcore}: saved without checksums, so that its bytes are not verified"
    assert convert("mcore2hf", mcore, tmp_path / "out") == (0, said)


def test_config_and_tokenizer_of_a_converted_folder_may_be_edited(mcore, convert, tmp_path):
    for file in (mcore / name for name in ("config.json", "tokenizer.json", "generation_config.json")):
        file.write_bytes(file.read_bytes() + b"\n")
    assert convert("mcore2hf", mcore, tmp_path / "out") == (0, "")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: [t.pop(n) for n in list(t) if "norm" in n], "5 missing: model"),
        (lambda t: t.update(extra=torch.ones(1)), "1 without a place in a qwen2 model: extra"),
        (lambda t: t.update({NORM: torch.ones(31)}), r"1 of another shape: model.norm.weight \[31\] instead of \[32\]"),
        (lambda t: t.update({NORM: torch.ones(32, dtype=torch.int8)}), "model.norm.weight is I8; give unquantised"),
        (lambda t: t.update({UP: torch.ones(64, 32).double()}), "save the model in one dtype first"),
    ],
    ids=["missing", "extra", "shape", "quantised", "dtypes"],
)
def test_wrong_tensors_are_listed(changed, refused, change, said):
    assert re.search(said, refused("hf2mcore", changed(change)))


def test_a_tied_folder_may_carry_its_head(model_of, changed, refused, tmp_path):
    def with_head(tensors, change=0):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone() + change

    hf2mcore(changed(with_head, tied=True), tmp_path / "mcore")
    mcore2hf(tmp_path / "mcore", tmp_path / "hf")
    assert exported(tmp_path / "hf").keys() == exported(model_of(tied=True)).keys()
    assert "lm_head.weight differs" in refused("hf2mcore", changed(lambda t: with_head(t, 1), tied=True))


def test_damaged_folders(changed, mcore, refused, tmp_path):
    folder = changed(lambda t: None)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    assert "model.safetensors: corrupt or truncated" in refused("hf2mcore", folder)
    file.unlink()
    assert "neither model.safetensors nor" in refused("hf2mcore", folder)
    for index, said in (
        ({"weight_map": {"a": "model-00001-of-00002.safetensors"}}, "model-00001-of-00002.safetensors: no such file"),
        ({"weight_map": {"a": "../a.safetensors"}}, "malformed"),
        ({}, "malformed"),
    ):
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        assert said in refused("hf2mcore", folder)
    assert "no such folder" in refused("hf2mcore", tmp_path / "nowhere")
    assert "neither a checkpoint nor a run" in refused("mcore2hf", folder)
    data = mcore / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-5000])
    assert "__0_0.distcp: truncated" in refused("mcore2hf", mcore)
    data.unlink()
    assert "__0_0.distcp: no such file" in refused("mcore2hf", mcore)
    (mcore / ".metadata").write_bytes(b"nothing")
    assert ".metadata: cannot be read" in refused("mcore2hf", mcore)


def test_a_checkpoint_of_another_model(model_of, mcore, refused):
    shutil.copy(model_of("qwen3") / "config.json", mcore)
    line = refused("mcore2hf", mcore)
    assert "another model" in line and "family qwen2 instead of qwen3" in line
    (mcore / "manifest.json").unlink()  # another program's checkpoint has none: its tensors tell
    line = refused("mcore2hf", mcore)
    assert "missing" in line and "q_layernorm" in line and "linear_qkv.bias" in line


def test_targets(converted, refused, convert, tmp_path):
    (tmp_path / "file").write_text("")
    assert "file: is there already" in convert("hf2mcore", converted[0], tmp_path / "file")[1]
    assert "cannot be written" in convert("mcore2hf", converted[1], tmp_path / "file" / "out")[1]
    (tmp_path / ".out.unfinished").mkdir()
    assert ".out.unfinished: another conversion writes it, or was killed" in refused("hf2mcore", converted[0])


def test_a_disk_that_fills_up(converted, convert, tmp_path):
    """A limit on a file's size stands in for the disk's end: the system refuses the write in the same place."""
    for direction, source in zip(("hf2mcore", "mcore2hf"), converted, strict=True):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))
        try:
            code, said = convert(direction, source, tmp_path / "out")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert code == 1 and "out: not written" in said and "\n" not in said
        assert list(tmp_path.iterdir()) == []


def round_to_bfloat16(tensors: dict[str, torch.Tensor]) -> None:
    tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()})


@pytest.fixture
def run_folder(converted, changed, tmp_path, monkeypatch):
    """A run started in `tmp_path`/start with a relative model.path, and its checkpoints of step 3 (bfloat16) and 7."""
    shutil.copytree(converted[0], tmp_path / "start" / "model")
    settings = {"model": {"path": "model"}, "data": {"source": "none"}, "output_dir": "run"}
    for step, model in ((3, changed(round_to_bfloat16)), (7, converted[0])):
        folder = tmp_path / "start" / "run" / "checkpoints" / f"step-{step:06d}"
        hf2mcore(model, folder)
        manifest = read_manifest(folder)
        for file in {*folder.glob("*.j*"), folder / "manifest.json"} - {folder / "metadata.json"}:
            file.unlink()
        write_manifest(folder, {"step": step, **{key: manifest[key] for key in ("model", "dtype", "layout")}})
    (tmp_path / "start" / "run" / "config.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.chdir(tmp_path / "start")
    return tmp_path / "start" / "run"


def test_a_step_of_a_run(run_folder, converted, refused, tmp_path):
    mcore2hf(run_folder, tmp_path / "newest")
    assert same_weights(tmp_path / "newest", converted[0])
    mcore2hf(run_folder / "checkpoints" / "step-000003", tmp_path / "third")
    assert exported(tmp_path / "third")[NORM].dtype == torch.bfloat16
    assert json.loads((tmp_path / "third" / "config.json").read_text())["dtype"] == "bfloat16"
    assert "neither a checkpoint nor a run" in refused("mcore2hf", run_folder / "checkpoints" / "step-000004")
    for number in (3, 7):
        (run_folder / "checkpoints" / f"step-{number:06d}" / "manifest.json").unlink()
    assert refused("mcore2hf", run_folder).startswith(f"{run_folder}: no complete checkpoint: ")


def test_links_to_checkpoints(run_folder, converted, tmp_path):
    (run_folder / "chat_template.jinja").write_text("the run's")
    (run_folder / "checkpoints").rename(tmp_path / "elsewhere")
    (run_folder / "checkpoints").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "latest").symlink_to(run_folder / "checkpoints" / "step-000007")
    (run_folder / "checkpoints" / "latest").symlink_to("step-000007")
    folder = run_folder / "checkpoints"
    for number, path in enumerate((run_folder, folder / "step-000007", folder / "latest", tmp_path / "latest")):
        mcore2hf(path, tmp_path / f"out-{number}")
        assert same_weights(tmp_path / f"out-{number}", converted[0])
        assert (tmp_path / f"out-{number}" / "chat_template.jinja").read_text() == "the run's"


def test_a_checkpoint_without_its_run_or_its_model(run_folder, converted, convert, refused, tmp_path, monkeypatch):
    copy = shutil.copytree(run_folder / "checkpoints" / "step-000003", tmp_path / "step-000003")
    assert "--model" in refused("mcore2hf", copy)
    monkeypatch.chdir(tmp_path)
    line = refused("mcore2hf", run_folder)
    assert "no folder model here" in line and "--model" in line
    for number, path in enumerate((copy, run_folder)):
        assert convert("mcore2hf", path, tmp_path / f"out-{number}", "--model", converted[0]) == (0, "")
    assert exported(tmp_path / "out-0")[NORM].dtype == torch.bfloat16 != exported(tmp_path / "out-1")[NORM].dtype


CONVERTS = """
import sys
from pathlib import Path
from dynamo_megatron.checkpoint.convert import hf2mcore, mcore2hf

def peak():
    status = Path("/proc/self/status").read_text().split()
    return int(status[status.index("VmHWM:") + 1]) * 1024

before = peak()
hf2mcore(Path(sys.argv[1]) / "hf", Path(sys.argv[1]) / "mcore")
mcore2hf(Path(sys.argv[1]) / "mcore", Path(sys.argv[1]) / "back")
print(peak() - before)
"""


@pytest.mark.full
def test_memory_is_that_of_a_few_tensors(tmp_path):
    """Of 0.9 GB, of which the largest tensor has 0.13 GB."""
    folder = tmp_path / "hf"
    folder.mkdir()
    config = PUBLISHED["Qwen2.5-1.5B"]["config"] | {"num_hidden_layers": 8, "vocab_size": 40_000, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {n: (torch.bfloat16, shape) for n, shape in huggingface_shapes(load_model_config(folder)).items()}
    write_file(folder / "model.safetensors", tensors, lambda name: torch.rand(tensors[name][1]).bfloat16())
    command, environment = [sys.executable, "-P", "-c", CONVERTS, tmp_path], os.environ | {"MALLOC_ARENA_MAX": "2"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    # Pages of mapped files count too: those of the source, once.
    size = (folder / "model.safetensors").stat().st_size
    assert int(done.stdout) < size + 0.6e9, f"{int(done.stdout) / 1e9:.2f} GB for {size / 1e9:.2f} GB"
    assert same_weights(folder, tmp_path / "back")
