"""Inspecting what is at rest: Hugging Face folders, runs with a damaged checkpoint, paths that are neither."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dynamo_megatron.checkpoint import inspection
from dynamo_megatron.checkpoint.convert import hf2mcore
from dynamo_megatron.checkpoint.inspection import describe, differences, in_bytes, inspect
from dynamo_megatron.checkpoint.torch_dist import TorchDistWriter
from dynamo_megatron.cli import main


@pytest.fixture
def tool(capsys):
    """run(*words) -> (exit code, stdout, stderr) of `dynamo-megatron inspect`."""

    def run(*words: object) -> tuple[int, str, str]:
        return main(["inspect", *map(str, words)]), *capsys.readouterr()

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


# -- folders of others -------------------------------------------------------------------------------------------------
HEADER = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'


def safetensors(header: bytes, data: bytes = bytes(8), length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


@pytest.fixture
def folder(tmp_path) -> Path:
    made = tmp_path / "folder"
    made.mkdir()
    (made / "model.safetensors").write_bytes(safetensors(HEADER))
    return made


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (safetensors(HEADER, length=1 << 63), "a header of 9223372036854775808 bytes in a file of "),
        (safetensors(HEADER, length=(1 << 64) - 1), "a header of 18446744073709551615 bytes"),
        (safetensors(b'{"w":' + b"[" * 200_000), "corrupt or truncated"),
        (safetensors(b"{" + HEADER[1:-1] + b"," + HEADER[1:].replace(b'"w"', b'"v"')), "corrupt or truncated"),
        (safetensors(HEADER.replace(b"[2]", b"[9223372036854775807,4]")), "corrupt or truncated"),
        (safetensors(HEADER.replace(b"[0,8]", b"[8,0]")), "corrupt or truncated"),
        (b"\0" * 7, "corrupt or truncated"),
    ],
)
def test_a_crafted_header_is_one_line(folder, tool, content, why):
    (folder / "model.safetensors").write_bytes(content)
    code, out, said = tool(folder)
    assert (code, out, said.count("\n")) == (2, "", 1) and why in said and str(folder / "model.safetensors") in said


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("config.json", '{"model_type":' + "[" * 200_000, "nested more than 100 deep"),
        ("config.json", '{"vocab_size": ' + "9" * 6000 + "}", "a number of more than 4,300 digits"),
        ("config.json", '{"vocab_size": 1, "vocab_size": 2}', "the key 'vocab_size' twice in one object"),
        ("config.json", "\ufeff{}", "not JSON: Unexpected UTF-8 BOM"),
        ("manifest.json", "[" * 200_000, "nested more than 100 deep"),
        ("model.safetensors.index.json", '{"weight_map": {"w": "../folder/a.safetensors"}}', "outside the folder"),
        ("model.safetensors.index.json", '{"weight_map": {"w": ".."}}', "no such file"),
        ("model.safetensors.index.json", '{"weight_map": {"w": 3}}', "malformed"),
        ("model.safetensors.index.json", '{"weight_map": {"w": "a\\u001b[31m\\nb"}}', "a\\x1b[31m"),
    ],
)
def test_a_crafted_json_file_is_one_line(folder, tool, name, text, why):
    if "index" in name:
        (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / name).write_text(text)
    code, out, said = tool(folder)
    lines = out + said
    assert code == (1 if name == "manifest.json" else 2) and why in lines and "\x1b" not in lines
    assert said.count("\n") == (code == 2)


@pytest.mark.parametrize("files", [{"../../outside": 6}, {"/etc/hostname": 6}, {"a": "6"}, {"a": True}, {"..": 4096}])
def test_a_manifest_of_files_elsewhere_is_refused(folder, tool, files):
    (folder.parent / "outside").write_text("secret")
    manifest = {"step": None, "model": {}, "dtype": "float32", "layout": None, "files": files, "checksums": {}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    code, out, _ = tool(folder)
    assert code == 1 and "manifest.json: not a checkpoint's manifest (the file " in out


def test_names_reach_the_terminal_as_text(folder, tool):
    name = "w\x1b[31m\n\u202edrow\x9b"
    (folder / "model.safetensors").write_bytes(safetensors(json.dumps({name: json.loads(HEADER)["w"]}).encode()))
    (folder / "a\x1b[2J\nb").write_text("")
    (folder / "config.json").write_text(json.dumps({"model_type": "\x1b]0;title\x07" + "x" * 10_000}))
    code, out, _ = tool(folder)
    assert code == 0 and all(c.isprintable() or c == "\n" for c in out) and max(map(len, out.splitlines())) < 1000
    assert "w\\x1b[31m\\n\\u202edrow\\x9b  [2] float32" in out and "a\\x1b[2J\\nb: 0 B" in out


def test_pipes_devices_and_links_are_not_followed_blindly(folder, tool):
    os.mkfifo(folder / "config.json")
    os.mkfifo(folder / ".metadata")
    (folder / "manifest.txt").symlink_to("/dev/zero")
    elsewhere = folder.with_name("elsewhere")
    (folder / "model.safetensors").rename(elsewhere)  # as in a download's cache
    (folder / "model.safetensors").symlink_to(elsewhere)
    code, out, _ = tool(folder)
    assert code == 0 and f"model.safetensors -> {elsewhere}: 70 B" in out and "config.json" not in out
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("/dev/zero")
    assert tool(folder)[0] == 2


def test_memory_is_bounded(folder, tool, monkeypatch):
    """256 MiB of empty lists would take 16 GiB."""
    monkeypatch.setattr(inspection, "FREE_MEMORY", 256 << 20)
    (folder / "model.safetensors").unlink()
    (folder / ".metadata").write_bytes(b"\x80\x04](" + b"]" * (32 << 20))
    code, out, said = tool(folder)
    assert (code, out) == (2, "") and said.count("\n") == 1 and str(folder) in said


def test_many_tensors_are_listed_in_part(folder, tool):
    header = {f"w{i}x": {"dtype": "F32", "shape": [], "data_offsets": [4 * i, 4 * i + 4]} for i in range(20_000)}
    (folder / "model.safetensors").write_bytes(safetensors(json.dumps(header).encode(), bytes(80_000)))
    code, out, _ = tool(folder)
    assert code == 0 and "in 20000 tensors" in out and "    and 19,000 more" in out and out.count("\n") < 1100


def test_the_script_is_the_command(folder):
    script = Path(__file__).parents[2] / "tools" / "inspect_checkpoint.py"
    done = subprocess.run([sys.executable, "-P", script, folder], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.startswith(f"{folder}: Hugging Face folder, complete")
