"""Inspecting what is at rest: Hugging Face folders, runs with a damaged checkpoint, paths that are neither."""

import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dynamo_megatron import inspection
from dynamo_megatron.convert import hf2mcore
from dynamo_megatron.inspection import describe, differences, in_bytes, inspect
from dynamo_megatron.models.torch_dist import TorchDistWriter


@pytest.fixture
def tool(monkeypatch, capsys):
    """run(*words) -> (exit code, stdout, stderr) of tools/inspect_checkpoint.py."""
    main = runpy.run_path(str(Path(__file__).parents[1] / "tools" / "inspect_checkpoint.py"))["main"]

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["inspect_checkpoint.py", *map(str, words)])
        code = main()
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def edited(tiny_model, tmp_path) -> Path:
    """The tiny model with one value, one dtype and one shape changed, one tensor less and one more."""
    folder = tmp_path / "edited"
    shutil.copytree(tiny_model, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][50, 3] += 0.5
    tensors["model.layers.0.input_layernorm.weight"] = tensors["model.layers.0.input_layernorm.weight"].bfloat16()
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:100].clone()
    tensors["of_mine"] = tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_hugging_face_folder_by_layer_pattern(tiny_model):
    text = describe(inspect(tiny_model))
    assert "Hugging Face folder, complete" in text and "family: qwen2" in text
    assert "model.layers.*.mlp.down_proj.weight  [64, 128] float32, 2 times" in text
    assert "optimizer: none" in text and "model.safetensors: 356.9 KiB" in text


def test_differences_are_listed_by_tensor(tiny_model, edited, tool, monkeypatch):
    monkeypatch.setattr(inspection, "PART_VALUES", 250)  # a few rows at once
    assert tool("--diff", tiny_model, tiny_model)[:2] == (0, "the same tensors, bit for bit\n")
    code, out, _ = tool("--diff", tiny_model, edited)
    assert code == 1
    weight = load_file(tiny_model / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    lines = dict(line.split(": ", 1) for line in out.splitlines()[:-1])
    assert lines.pop("lm_head.weight") == "shape [128, 64] and [100, 64]"
    assert lines.pop("of_mine") == f"only in {edited}"
    assert lines.pop("model.norm.weight") == f"only in {tiny_model}"
    assert lines.pop("model.layers.0.input_layernorm.weight").startswith("float32 and bfloat16, largest difference ")
    relative = 0.5 / float(weight.norm())
    assert lines.pop("model.layers.1.mlp.down_proj.weight") == (
        f"largest difference 5.000e-01, relative (norm) {relative:.3e}"
    )
    assert not lines and out.splitlines()[-1] == "5 of the tensors differ"


def test_differences_are_of_bits(tmp_path):
    """Values that float32 does not tell apart, and NaN, which differs from a number but not from itself."""
    nan, inf = float("nan"), float("inf")
    a = {
        "double": torch.tensor([1.0], dtype=torch.float64),
        "x": torch.tensor([1.0, nan, inf]),
        "zero": torch.tensor(0.0),
    }
    b = {"double": a["double"] + 1e-12, "x": torch.tensor([1.0, 1.0, inf]), "zero": torch.tensor(-0.0)}
    for name, tensors in (("a", a), ("b", b)):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    one, two = inspect(tmp_path / "a"), inspect(tmp_path / "b")
    assert list(differences(one, one)) == []
    double, x, zero = differences(one, two)
    assert double.startswith("double: largest difference 1.000e-12")
    assert x.startswith("x: largest difference inf")
    assert zero.startswith("zero: largest difference 0.000e+00")


def test_each_stored_part_is_read_once(tmp_path, monkeypatch):
    weight = torch.rand(64, 8)
    for name, rows in (("whole", 64), ("quarters", 16)):
        (tmp_path / name).mkdir()
        writer = TorchDistWriter(tmp_path / name)
        for row in range(0, 64, rows):
            writer.add("w", weight[row : row + rows], weight.shape, (row, 0))
        writer.close()
    read, load = [], torch.load
    monkeypatch.setattr(inspection, "BLOCK_VALUES", 10)
    monkeypatch.setattr(torch, "load", lambda *a, **k: read.append(load(*a, **k)) or read[-1])
    whole, quarters = inspect(tmp_path / "whole"), inspect(tmp_path / "quarters")
    for pair in ((whole, quarters), (quarters, whole)):
        read.clear()
        assert list(differences(*pair)) == []
        assert sorted(len(tensor) for tensor in read) == [16, 16, 16, 16, 64]


@pytest.mark.parametrize("text", ["{}", "[]", "["])
@pytest.mark.parametrize("name", ["model.safetensors.index.json", "config.json"])
def test_a_malformed_file_of_a_hugging_face_folder_is_one_line(tiny_model, tmp_path, tool, name, text):
    shutil.copytree(tiny_model, tmp_path / "bad")
    (tmp_path / "bad" / "model.safetensors").rename(tmp_path / "bad" / "model-00001-of-00001.safetensors")
    (tmp_path / "bad" / name).write_text(text)
    code, _, said = tool(tmp_path / "bad")
    if (name, text) == ("config.json", "{}"):
        name = "neither model.safetensors nor model.safetensors.index.json"  # every field of a config may be missing
    assert code == 2 and name in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda f: None, "no such file or folder"),
        (lambda f: f.mkdir(), "neither a run, nor a checkpoint, nor a Hugging Face folder with safetensors"),
        (lambda f: (f / "checkpoints").mkdir(parents=True), "a run without a complete checkpoint"),
    ],
)
def test_a_path_that_is_none_of_these_is_one_line(tmp_path, tool, make, why):
    make(tmp_path / "path")
    assert tool(tmp_path / "path") == (2, "", f"{tmp_path / 'path'}: {why}\n")


def test_a_truncated_file_is_one_line(tiny_model, tmp_path, tool):
    shutil.copytree(tiny_model, tmp_path / "cut")
    file = tmp_path / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    code, _, said = tool(tmp_path / "cut")
    assert code == 2 and said.startswith(f"{file}: corrupt or truncated (") and said.count("\n") == 1


def test_a_damaged_checkpoint_is_said_to_be(tmp_path, tool):
    folder = tmp_path / "checkpoints" / "step-000003"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{}")
    code, out, _ = tool(folder)
    assert code == 1 and f"{folder / 'manifest.json'}: No such file or directory" in out
    code, _, said = tool(tmp_path)
    assert code == 2 and "a run without a complete checkpoint; step 3: " in said


def test_a_flipped_bit_is_said_to_be_there(tiny_model, tmp_path, tool):
    folder = tmp_path / "mcore"
    hf2mcore(tiny_model, folder)
    code, out, _ = tool(folder)
    assert code == 0 and "bytes: as saved, by their checksums" in out
    file = folder / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    code, out, _ = tool(folder)
    assert code == 1 and f"converted model, {file}: its bytes are not those that were saved" in out
    assert "copy or convert the model again" in out


def test_sizes_have_a_unit():
    assert [in_bytes(n) for n in (0, 1023, 1536, 3 << 30)] == ["0 B", "1023 B", "1.5 KiB", "3.0 GiB"]
