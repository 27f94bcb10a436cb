"""`dynamo-megatron convert` both ways: bit-equal, streamed, and every bad input one line."""

import json
import re
import shutil
import subprocess
import sys
from collections import namedtuple

import pytest
import torch
from conversion_command import SIZES, refusal, say
from safetensors.torch import load_file, save_file

from dynamo_megatron.checkpoint import safetensors_writer, torch_dist
from dynamo_megatron.checkpoint.convert import compare_weights, hf2mcore, mcore2hf
from dynamo_megatron.checkpoint.folder import read_manifest
from dynamo_megatron.checkpoint.safetensors_folder import companion_files
from dynamo_megatron.checkpoint.weights import open_weights
from dynamo_megatron.models import load_model_config

FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_moe"]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_is_bit_equal(tiny_model, tmp_path, monkeypatch, family, dtype, tied):
    monkeypatch.setattr(safetensors_writer, "FILE_BYTES", 20_000)  # several files, as a large model has
    monkeypatch.setattr(torch_dist, "FILE_BYTES", 20_000)
    folder = tiny_model(family, dtype=dtype, tied=tied, **SIZES)
    hf2mcore(folder, tmp_path / "mcore")
    mcore2hf(tmp_path / "mcore", tmp_path / "hf")
    source, back = load_file(folder / "model.safetensors"), {}
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 2 and len(list((tmp_path / "mcore").glob("*.distcp"))) > 2
    for file in files:
        tensors = load_file(file)
        assert not back.keys() & tensors.keys()
        back |= tensors
    assert back.keys() == source.keys()
    assert all(t.dtype == source[name].dtype and torch.equal(t, source[name]) for name, t in back.items())
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            assert (tmp_path / "hf" / file.name).read_bytes() == file.read_bytes() or file.name == "config.json"
    with open_weights(tmp_path / "hf", load_model_config(tmp_path / "hf")) as opened:
        assert set(opened.names) == set(source)  # the index agrees
    assert compare_weights(folder, tmp_path / "mcore") == (dict.fromkeys(back, 0.0), [])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtype(converted, tmp_path, dtype):
    folder, mcore = converted
    hf2mcore(folder, tmp_path / "mcore", dtype)
    mcore2hf(tmp_path / "mcore", tmp_path / "there")
    mcore2hf(mcore, tmp_path / "back", dtype)
    source = load_file(folder / "model.safetensors")
    for out in ("there", "back"):
        assert json.loads((tmp_path / out / "config.json").read_text())["dtype"] == dtype
        for name, tensor in load_file(tmp_path / out / "model.safetensors").items():
            assert torch.equal(tensor, source[name].to(getattr(torch, dtype))), name


@pytest.mark.parametrize(
    ("value", "said"), [(1e5, "too large for float16"), (float("-inf"), "the source"), (float("nan"), "the source")]
)
def test_a_value_that_float16_does_not_have_is_refused(tiny_model, tmp_path, capsys, value, said):
    folder = changed(tiny_model("qwen2", **SIZES), tmp_path, lambda t: t["model.norm.weight"][3].fill_(value))
    line = refusal(capsys, tmp_path / "out", "hf2mcore", folder, tmp_path / "out", "--dtype", "float16")
    assert "model.norm.weight" in line and said in line


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"])
def test_a_value_that_is_not_finite_is_passed_on_in_neither_direction(converted, tmp_path, capsys, name, value):
    folder = changed(converted[0], tmp_path, lambda t: t[name][0, 3].fill_(value))
    says = f"tensor {name}: the source holds NaN or infinity; download the model again"
    assert refusal(capsys, tmp_path / "out", "hf2mcore", folder, tmp_path / "out") == says
    mcore = shutil.copytree(converted[1], tmp_path / "mcore")
    (mcore / "manifest.json").unlink()  # as another program writes it
    whole, damaged = (load_file(f / "model.safetensors")[name].view(torch.uint8) for f in (converted[0], folder))
    data = (mcore / "__0_0.distcp").read_bytes()
    assert data.count(whole.numpy().tobytes()) == 1
    (mcore / "__0_0.distcp").write_bytes(data.replace(whole.numpy().tobytes(), damaged.numpy().tobytes()))
    capsys.readouterr()
    code, said = say(capsys, "mcore2hf", mcore, tmp_path / "out")
    assert (code, said.splitlines()[-1]) == (2, says) and not (tmp_path / "out").exists()


def flipped(converted, tmp_path):
    """A copy of the converted folder with one bit of its data flipped, and the file it is in."""
    folder = shutil.copytree(converted[1], tmp_path / "flipped")
    content = bytearray((folder / "__0_0.distcp").read_bytes())
    content[len(content) // 2] ^= 4
    (folder / "__0_0.distcp").write_bytes(content)
    return folder, folder / "__0_0.distcp"


def test_a_flipped_bit_is_refused(converted, tmp_path, tool, capsys, monkeypatch):
    folder, file = flipped(converted, tmp_path)
    line = refusal(capsys, tmp_path / "out", "mcore2hf", folder, tmp_path / "out")
    assert line.startswith(f"{file}: its bytes are not those that were saved (XXH3 ")
    assert line.endswith("; copy or convert the model again")
    monkeypatch.setattr(sys, "argv", ["verify_conversion", str(converted[0]), str(folder)])
    assert tool("verify_conversion").main() == 2 and capsys.readouterr().err.startswith(f"{file}: its bytes ")


def test_config_and_tokenizer_of_a_converted_folder_may_be_edited(converted, tmp_path, capsys):
    folder = shutil.copytree(converted[1], tmp_path / "edited")
    for file in companion_files(folder):
        file.write_bytes(file.read_bytes() + b"\n")
    capsys.readouterr()
    assert say(capsys, "mcore2hf", folder, tmp_path / "out") == (0, "")


def test_a_folder_that_was_converted_before_there_were_checksums(converted, tmp_path, capsys):
    folder = flipped(converted, tmp_path)[0]
    manifest = read_manifest(folder)
    del manifest["checksums"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    capsys.readouterr()
    assert say(capsys, "mcore2hf", folder, tmp_path / "out") == (
        0,
        f"{folder}: saved without checksums, so that its bytes are not verified",
    )


def test_float16_over_its_whole_range(tiny_model, tmp_path):
    ends = torch.tensor([65504.0, -65504.0])
    folder = changed(
        tiny_model("qwen2", dtype="float32", **SIZES), tmp_path, lambda t: t["model.norm.weight"][:2].copy_(ends)
    )
    hf2mcore(folder, tmp_path / "mcore", "float16")
    mcore2hf(tmp_path / "mcore", tmp_path / "hf")
    assert torch.equal(load_file(tmp_path / "hf" / "model.safetensors")["model.norm.weight"][:2], ends.half())


@pytest.mark.parametrize("name", ["self_attn.k_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"])
def test_one_parameter_has_one_dtype(tiny_model, tmp_path, capsys, name):
    name = f"model.layers.1.{name}"
    folder = changed(tiny_model("qwen2", **SIZES), tmp_path, lambda t: t.update({name: t[name].double()}))
    line = refusal(capsys, tmp_path / "out", "hf2mcore", folder, tmp_path / "out")
    assert "give one dtype" in line
    hf2mcore(folder, tmp_path / "mcore", "float32")


def test_a_tied_folder_may_carry_its_head(tiny_model, tmp_path):
    tied = tiny_model("qwen2", tied=True, **SIZES)
    folder = changed(tied, tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    hf2mcore(folder, tmp_path / "mcore")
    mcore2hf(tmp_path / "mcore", tmp_path / "hf")
    assert load_file(tmp_path / "hf" / "model.safetensors").keys() == load_file(tied / "model.safetensors").keys()


def changed(folder, tmp_path, change):
    copy = shutil.copytree(folder, tmp_path / "changed")
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: [t.pop(n) for n in list(t) if "norm" in n], ["5 tensors missing", "and 2 more"]),
        (lambda t: t.update(extra=torch.ones(1)), ["1 tensor without a place", "extra"]),
        (lambda t: t.update({"model.norm.weight": torch.ones(31)}), ["of another shape", "[31] instead of [32]"]),
    ],
    ids=["missing", "extra", "shape"],
)
def test_wrong_tensors_are_listed(converted, tmp_path, capsys, change, named):
    folder = changed(converted[0], tmp_path, change)
    line = refusal(capsys, tmp_path / "out", "hf2mcore", folder, tmp_path / "out")
    assert all(word in line for word in [str(folder), *named]), line


def test_damaged_and_foreign_folders(converted, tiny_model, tmp_path, capsys):
    def refused(*words):
        return refusal(capsys, tmp_path / "out", *words, tmp_path / "out")

    folder = shutil.copytree(converted[0], tmp_path / "folder")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    assert "model.safetensors: corrupt or truncated" in refused("hf2mcore", folder)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    weights.unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00001-of-00002.safetensors: no such file" in refused("hf2mcore", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "gemma2"}))
    assert "gemma2" in refused("hf2mcore", folder)
    assert "no such folder" in refused("hf2mcore", tmp_path / "nowhere")
    assert "neither a checkpoint nor a run" in refused("mcore2hf", folder)

    mcore = shutil.copytree(converted[1], tmp_path / "mcore")
    data = mcore / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-5000])
    assert "__0_0.distcp: truncated" in refused("mcore2hf", mcore)
    data.unlink()
    assert "__0_0.distcp: no such file" in refused("mcore2hf", mcore)
    (mcore / ".metadata").write_bytes(b"nothing")
    assert ".metadata: has the pickle instruction 'n'" in refused("mcore2hf", mcore)


def test_a_checkpoint_of_another_model(converted, tiny_model, tmp_path, capsys):
    mcore = shutil.copytree(converted[1], tmp_path / "mcore")
    shutil.copy(tiny_model("qwen3", **SIZES) / "config.json", mcore)
    line = refusal(capsys, tmp_path / "out", "mcore2hf", mcore, tmp_path / "out")
    assert "another model" in line and "family qwen2 instead of qwen3" in line
    (mcore / "manifest.json").unlink()  # another program's checkpoint has none: its tensors tell
    line = refusal(capsys, tmp_path / "out", "mcore2hf", mcore, tmp_path / "out")
    assert "missing" in line and "q_layernorm" in line and "linear_qkv.bias" in line


def test_tensors_of_another_family(converted, tmp_path, capsys):
    folder = shutil.copytree(converted[0], tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 8}
    (folder / "config.json").write_text(json.dumps(config))
    line = refusal(capsys, tmp_path / "out", "hf2mcore", folder, tmp_path / "out")
    assert "q_norm.weight" in line and "6 tensors without a place in a qwen3 model" in line and "bias" in line


def test_a_rope_scaling_survives_both_ways(converted, tmp_path, capsys):
    folder = shutil.copytree(converted[0], tmp_path / "yarn")
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 1e6, "rope_scaling": scaling}))
    hf2mcore(folder, tmp_path / "mcore")
    mcore2hf(tmp_path / "mcore", tmp_path / "hf")
    assert load_model_config(tmp_path / "hf") == load_model_config(folder)
    assert load_model_config(tmp_path / "hf").dimensions()["rope_scaling"]["rope_type"] == "yarn"
    with pytest.raises(ValueError, match=r"are different models: rope_theta .* rope_scaling \{\} and \{.*'yarn'"):
        compare_weights(converted[0], tmp_path / "hf")
    shutil.copy(converted[0] / "config.json", tmp_path / "mcore" / "config.json")
    line = refusal(capsys, tmp_path / "out", "mcore2hf", tmp_path / "mcore", tmp_path / "out")
    assert "is a checkpoint of another model" in line and "rope_scaling {'rope_type': 'yarn'" in line


def test_targets(converted, tmp_path, capsys, monkeypatch):
    folder, mcore = converted
    (tmp_path / "file").write_text("")
    line = refusal(capsys, tmp_path / "x", "hf2mcore", folder, tmp_path / "file")
    assert "file: is there already" in line
    line = refusal(capsys, tmp_path / "x", "mcore2hf", mcore, tmp_path / "file" / "out")
    assert "cannot be written" in line
    assert "--step" in refusal(capsys, tmp_path / "x", "mcore2hf", tmp_path, tmp_path / "x", "--step", "7")
    (tmp_path / ".out.unfinished").mkdir()
    line = refusal(capsys, tmp_path / "out", "hf2mcore", folder, tmp_path / "out")
    assert ".out.unfinished: another conversion writes it, or was killed and left it; remove it" in line
    (tmp_path / ".out.unfinished").rmdir()


def test_too_small_a_disk(tiny_model, tmp_path, capsys, monkeypatch):
    folder = tiny_model("qwen2", vocab=8000, hidden=256)
    size = (folder / "model.safetensors").stat().st_size / 1e9
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9, 2 * 10**6))
    for dtype, factor in (("float32", 4), ("bfloat16", 2)):
        line = refusal(capsys, tmp_path / "out", "hf2mcore", folder, tmp_path / "out", "--dtype", dtype)
        needed = float(re.search(r"needs ([\d.]+) GB, the disk has 0.002 GB free", line)[1])
        stored = {"float32": 4, "bfloat16": 2}[json.loads((folder / "config.json").read_text())["dtype"]]
        assert needed == pytest.approx(size * factor / stored, abs=1.5e-3) and needed > 5e-3


def test_a_damaged_checkpoint_is_said_to_be(tmp_path, capsys):
    folder = tmp_path / "run" / "checkpoints" / "step-000007"
    folder.mkdir(parents=True)
    why = f"{folder / 'manifest.json'}: No such file or directory"
    for words, of in (((folder,), ""), ((tmp_path / "run",), ""), ((tmp_path / "run", "--step", "7"), " of step 7")):
        line = refusal(capsys, tmp_path / "out", "mcore2hf", words[0], tmp_path / "out", *words[1:])
        assert line == f"{words[0]}: no complete checkpoint{of}: {why}"


@pytest.mark.full
def test_a_disk_that_fills_up(converted, tmp_path):
    """A limit on a file's size stands in for the disk's end: the system refuses the write in the same place."""
    for number, words in enumerate((("hf2mcore", converted[0]), ("mcore2hf", converted[1]))):
        command = "import resource, sys; from dynamo_megatron import cli; "
        command += "resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000)); sys.exit(cli.main(sys.argv[1:]))"
        with open(tmp_path / f"err-{number}", "w") as err:
            words = [*map(str, words), str(tmp_path / "out")]
            code = subprocess.run([sys.executable, "-P", "-c", command, "convert", *words], stderr=err).returncode
        said = (tmp_path / f"err-{number}").read_text().splitlines()
        assert code == 1 and len(said) == 1 and "out: not written" in said[0], said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["err-0", "err-1"]


def test_verify(converted, tmp_path, tool, monkeypatch, capsys):
    verify = tool("verify_conversion")

    def run(a, b):
        monkeypatch.setattr(sys, "argv", ["verify_conversion", str(a), str(b)])
        return verify.main(), capsys.readouterr()

    folder, mcore = converted
    code, said = run(folder, mcore)
    assert code == 0 and "27 of 27 tensors bit-equal" in said.out and "largest difference 0 " in said.out
    other = changed(folder, tmp_path, lambda t: t["model.norm.weight"][3].add_(0.5))
    code, said = run(mcore, other)
    assert code == 1 and "26 of 27" in said.out and "largest difference 0.5 in model.norm.weight" in said.out
    shutil.rmtree(other)
    other = changed(folder, tmp_path, lambda t: t["model.norm.weight"][3].fill_(float("nan")))
    assert run(other, other)[0] == 0
    code, said = run(folder, other)
    assert code == 1 and "largest difference inf in model.norm.weight" in said.out
    code, said = run(folder, tmp_path)
    assert code == 2 and said.err.count("\n") == 1


def test_tools_are_the_command(converted, tmp_path, tool):
    for name, source in zip(("hf_to_megatron", "megatron_to_hf"), converted, strict=True):
        assert tool(name).main([str(source), str(tmp_path / name)]) == 0
        assert compare_weights(source, tmp_path / name)[1] == []
