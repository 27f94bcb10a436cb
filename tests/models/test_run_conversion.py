"""`dynamo-megatron convert` of a run's checkpoints."""

import shutil

import pytest
import torch
import yaml
from conversion_command import SIZES, refusal, say
from safetensors.torch import load_file

from dynamo_megatron.checkpoint.convert import compare_weights, hf2mcore, mcore2hf
from dynamo_megatron.checkpoint.folder import read_manifest, write_manifest
from dynamo_megatron.checkpoint.safetensors_folder import companion_files
from dynamo_megatron.jobs.layout_checks import check_reference
from dynamo_megatron.models import load_model_config


@pytest.fixture
def run_folder(converted, tmp_path, monkeypatch):
    """A run started in `tmp_path` with a relative model.path, and its checkpoints of step 3 (float16) and 7."""
    shutil.copytree(converted[0], tmp_path / "start" / "model")
    settings = {"model": {"path": "model"}, "data": {"source": "none"}, "output_dir": "run"}
    for step, dtype in ((3, "float16"), (7, None)):
        folder = tmp_path / "start" / "run" / "checkpoints" / f"step-{step:06d}"
        hf2mcore(converted[0], folder, dtype)
        manifest = read_manifest(folder)
        for file in (*companion_files(folder), folder / "manifest.json"):
            file.unlink()
        write_manifest(folder, {"step": step, **{key: manifest[key] for key in ("model", "dtype", "layout")}})
    (tmp_path / "start" / "run" / "config.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.chdir(tmp_path / "start")
    return tmp_path / "start" / "run"


def dtype_of(folder):
    return load_file(folder / "model.safetensors")["model.norm.weight"].dtype


def test_a_step_of_a_run(run_folder, converted, tmp_path, capsys):
    mcore2hf(run_folder, tmp_path / "newest")
    assert compare_weights(converted[0], tmp_path / "newest")[1] == []
    assert say(capsys, "mcore2hf", run_folder, tmp_path / "third", "--step", 3) == (0, "")
    mcore2hf(run_folder / "checkpoints" / "step-000003", tmp_path / "same")
    assert dtype_of(tmp_path / "third") == dtype_of(tmp_path / "same") == torch.float16
    line = refusal(capsys, tmp_path / "out", "mcore2hf", run_folder, tmp_path / "out", "--step", 4)
    assert "--step" in line and "it has 3, 7" in line


def test_a_runs_checkpoint_may_be_the_reference_policy(run_folder, converted, tiny_model):
    checkpoint = next((run_folder / "checkpoints").iterdir())
    check_reference(load_model_config(converted[0]), str(checkpoint), "algorithm.kl.reference")
    other = load_model_config(tiny_model("qwen2", **{**SIZES, "ffn": 32}))
    with pytest.raises(ValueError, match=r"^algorithm\.kl\.reference: .* is a checkpoint of another model: ffn_hidden"):
        check_reference(other, str(checkpoint), "algorithm.kl.reference")


def test_a_checkpoint_without_its_run_or_its_model(run_folder, converted, tmp_path, monkeypatch, capsys):
    copy, model = shutil.copytree(run_folder / "checkpoints" / "step-000003", tmp_path / "step-000003"), converted[0]
    (run_folder / "config.yaml").rename(run_folder / "other.yaml")
    for path in (copy, run_folder):
        assert "--model" in refusal(capsys, tmp_path / "out", "mcore2hf", path, tmp_path / "out")
    (run_folder / "other.yaml").rename(run_folder / "config.yaml")
    monkeypatch.chdir(tmp_path)
    line = refusal(capsys, tmp_path / "out", "mcore2hf", run_folder, tmp_path / "out")
    assert "no folder model here" in line and "--model" in line
    for number, path in enumerate((copy, run_folder)):
        assert say(capsys, "mcore2hf", path, tmp_path / f"out-{number}", "--model", model) == (0, "")
    assert dtype_of(tmp_path / "out-0") == torch.float16 != dtype_of(tmp_path / "out-1")
