"""Inspecting what is at rest: Hugging Face folders, runs with a damaged checkpoint, paths that are neither."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from dynamo_megatron.checkpoint import inspection
from dynamo_megatron.checkpoint.convert import find_checkpoint
from dynamo_megatron.checkpoint.inspection import differences, inspect
from dynamo_megatron.cli import main


@pytest.fixture
def tool(capsys):
    """run(*words) -> (exit code, stdout, stderr) of `dynamo-megatron inspect`."""

    def run(*words: object) -> tuple[int, str, str]:
        return main(["inspect", *map(str, words)]), *capsys.readouterr()

    return run


def test_a_hugging_face_folder_by_layer_pattern(tiny_model, tool):
    code, text, _ = tool(tiny_model)
    assert code == 0 and "Hugging Face folder, complete" in text and "family qwen2" in text
    assert "model.layers.*.mlp.down_proj.weight  [64, 128] float32, 2 times" in text
    assert "optimizer: none" in text and "model.safetensors: 365," in text


def test_differences_are_listed_by_tensor(tiny_model, tmp_path, tool, monkeypatch):
    """One value, one dtype and one shape changed, one tensor less and one more."""
    monkeypatch.setattr(inspection, "BLOCK_VALUES", 250)
    edited = shutil.copytree(tiny_model, tmp_path / "edited")
    tensors = load_file(edited / "model.safetensors")
    weight = tensors["model.layers.1.mlp.down_proj.weight"]
    relative = 0.5 / float(weight.norm())
    weight[50, 3] += 0.5
    tensors["model.layers.0.input_layernorm.weight"] = tensors["model.layers.0.input_layernorm.weight"].bfloat16()
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:100].clone()
    tensors["of_mine"] = tensors.pop("model.norm.weight")
    save_file(tensors, edited / "model.safetensors", {"format": "pt"})
    assert tool("--diff", tiny_model, tiny_model)[:2] == (0, "the same tensors, bit for bit\n")
    code, out, _ = tool("--diff", tiny_model, edited)
    assert code == 1
    lines = dict(line.split(": ", 1) for line in out.splitlines()[:-1])
    assert lines.pop("lm_head.weight") == "shape [128, 64] and [100, 64]"
    assert lines.pop("of_mine") == f"only in {edited}"
    assert lines.pop("model.norm.weight") == f"only in {tiny_model}"
    assert lines.pop("model.layers.0.input_layernorm.weight").startswith("float32 and bfloat16, largest difference ")
    assert lines.pop("model.layers.1.mlp.down_proj.weight") == (
        f"largest difference 5.000e-01, relative (norm) {relative:.3e}"
    )
    assert not lines and out.splitlines()[-1] == "5 of the tensors differ"


def test_differences_are_of_bits(tmp_path):
    """Values that float32 does not tell apart, and NaN, which differs from a number but not from itself."""
    nan, inf = float("nan"), float("inf")
    one = torch.tensor([1.0], dtype=torch.float64)
    a = {"double": one, "x": torch.tensor([1.0, nan, inf]), "zero": torch.tensor(0.0)}
    b = {"double": one + 1e-12, "x": torch.tensor([1.0, 1.0, inf]), "zero": torch.tensor(-0.0)}
    for name, tensors in (("a", a), ("b", b)):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    one, two = inspect(tmp_path / "a"), inspect(tmp_path / "b")
    assert list(differences(one, one)) == []
    double, x, zero = differences(one, two)
    assert double.startswith("double: largest difference 1.000e-12")
    assert x.startswith("x: largest difference inf")
    assert zero.startswith("zero: largest difference 0.000e+00")


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


def test_a_damaged_checkpoint_is_said_to_be(converted, tmp_path, tool, flip):
    folder = tmp_path / "checkpoints" / "step-000003"
    folder.mkdir(parents=True)
    code, out, _ = tool(folder)
    assert code == 1 and f"{folder / 'manifest.json'}: No such file or directory" in out
    code, _, said = tool(tmp_path)
    assert code == 2 and "a run without a complete checkpoint; step 3: " in said
    folder = shutil.copytree(converted[1], tmp_path / "mcore")
    code, out, _ = tool(folder)
    assert code == 0 and "bytes: as saved, by their checksums" in out
    flip(file := folder / "__0_0.distcp")
    code, out, _ = tool(folder)
    assert code == 1 and f"converted model, {file}: its bytes are not those that were saved" in out


def test_a_run_whose_newest_checkpoint_is_damaged(converted, tmp_path, tool, capsys):
    shutil.copytree(converted[1], tmp_path / "checkpoints" / "step-000003")
    assert tool(tmp_path)[0] == 0
    (tmp_path / "checkpoints" / "step-000004").mkdir()
    code, out, _ = tool(tmp_path)
    assert code == 1 and "complete, but step 4, the newest, is not\n" in out and "  step 4: " in out
    assert find_checkpoint(tmp_path)[0] == 3
    assert "warning: the checkpoint of step 4 is damaged" in (said := capsys.readouterr().err)
    assert said.endswith("; taking that of step 3\n")
    code, out, said = tool("--diff", tmp_path, converted[1])
    assert (code, out) == (1, "the same tensors, bit for bit\n")
    assert said.endswith("step-000003: complete, but step 4, the newest, is not\n")


def test_a_run_in_a_folder_named_checkpoints(converted, tmp_path):
    run = tmp_path / "checkpoints" / "mine"
    folder = shutil.copytree(converted[1], run / "checkpoints" / "step-000003")
    assert find_checkpoint(run) == find_checkpoint(folder) == (3, folder)


def test_names_reach_the_terminal_as_text(tmp_path, tool):
    save_file({"w\x1b[31m\n\u202edrow\x9b": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "\x1b]0;title\x07"}))
    code, out, _ = tool(tmp_path)
    assert code == 0 and all(c.isprintable() or c == "\n" for c in out)
    assert "w\\x1b[31m\\n\\u202edrow\\x9b  [2] float32" in out
