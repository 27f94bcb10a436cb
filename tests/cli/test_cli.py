"""Bad input: one line that says what, where and how to mend it, exit code 2, nothing written."""

import json
from importlib import metadata
from pathlib import Path

import pytest
import torch
import yaml

from dynamo_megatron.cli import main
from dynamo_megatron.jobs import eval as command
from dynamo_megatron.rollout.result import RolloutError


@pytest.fixture
def base(tiny_model, tmp_path) -> Path:
    rows = [{"id": "a", "problem": "1+1", "answer": "2"}, {"id": "b", "problem": "1+2", "answer": "3"}]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "model": {"path": str(tiny_model), "dtype": "float32", "max_length": 128},
        "data": {"source": str(tmp_path / "problems.jsonl"), "batch_prompts": 2, "template": "{prompt}"},
        "rollout": {"max_new_tokens": 8},
        "output_dir": str(tmp_path / "run"),
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def refused(capsys, *arguments, command: str = "train") -> str:
    """The one line of a refusal before any rank is started."""
    assert main([command, *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1, captured.err
    return captured.err.strip()


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("rollout.top_p=0.9", "top_p: training needs 1.0"),
        ("parallel.tp=3", "parallel.tp: 3 does not divide the 4 (attention heads); use one of 1, 2"),
        ("parallel.ep=2", "parallel.ep: 2, but a qwen2 model has no experts"),
        ("algorithm.kl={coef: 0.1, reference: /no/such/model}", "algorithm.kl.reference: /no/such/model: no such"),
        ("rollout.max_new_tokens=128", "rollout.max_new_tokens: 128 tokens leave 0 of 128 for the prompt"),
        ("model.family=gpt5", "model_type 'qwen2' is of family qwen2, model.family is 'gpt5'; leave it out"),
        ("model.path=/tmp", "config.json: no such file"),
        ("data.source=no.jsonl", "data.source: there is no file no.jsonl"),
        ("eval={data: no.parquet, every: 1}", "eval.data: there is no file no.parquet"),
        ("rollout.servers=1000", "rollout.servers: 1000 servers of 1 ranks (rollout.tp) have 1000 on this machine"),
    ],
)
def test_refused_before_any_rank_starts(base, capsys, argument, says):
    assert says in refused(capsys, base / "config.yaml", argument)
    assert not (base / "run").exists()


def test_a_reference_policy_of_another_shape_is_refused(base, capsys, make_tiny_model):
    other = make_tiny_model(base / "other", layers=3)
    capsys.readouterr()
    said = refused(capsys, base / "config.yaml", f"algorithm.kl={{coef: 0.1, reference: {other}}}")
    assert f"algorithm.kl.reference: {other} has num_layers 3, the policy 2" in said
    other = make_tiny_model(base / "llama", family="llama")
    capsys.readouterr()
    said = refused(capsys, base / "config.yaml", f"algorithm.kl={{coef: 0.1, reference: {other}}}")
    assert f"algorithm.kl.reference: {other} has family llama, the policy qwen2" in said


@pytest.mark.parametrize("key", ["eval.every=2", "data.max_prompt_length=9", "data.selection=priority"])
def test_sft_refuses_what_it_would_pass_over(base, capsys, key):
    assert "not for sft" in refused(capsys, base / "config.yaml", "eval.data=x", key, command="sft")


def test_an_evaluation_goes_neither_into_a_run_nor_into_a_model(base, tiny_model, capsys):
    run, before = base / "run", sorted(tiny_model.iterdir())
    run.mkdir()
    (run / "config.yaml").write_text("x: 1\n")
    words = ["--model", str(tiny_model), f"eval.data={base / 'problems.jsonl'}", "--out"]
    for folder, what in ((run, "holds a run or an evaluation"), (tiny_model, "is a model's folder (config.json)")):
        assert refused(capsys, *words, folder, command="eval") == f"--out: {folder} {what}; name another folder"
    assert [p.name for p in run.iterdir()] == ["config.yaml"] and sorted(tiny_model.iterdir()) == before


def test_version_names_what_results_depend_on(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert f"megatron-core {metadata.version('megatron-core')}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train", "my.yaml", "--rnks", "2"], "unknown option --rnks; did you mean --ranks?"),
        (["train", "my.yaml", "--model.path", "m"], "unknown option --model.path; a key of the config has no dashes: "),
        (["train", "c", "--prompt-data=x.jsonl"], "unknown option --prompt-data; of slime, here it is data.source"),
        (["replay", "runs/a", "extra"], "unknown argument extra; see dynamo-megatron replay --help"),
        (["launch", "slurm", "c", "--container-image=x"], "unknown option --container-image; see dynamo-"),
        (["configs", "methods/dynmo"], "methods/dynmo: no such shipped config"),
    ],
)
def test_an_unknown_word_is_answered_with_the_nearest_one(capsys, words, says):
    assert refused(capsys, *words[1:], command=words[0]).startswith(says)


@pytest.mark.parametrize(
    "words", [[], ["trian"], ["launch"], ["train", "m", "--ranks=0"], ["samples", "r", "--best=x"]]
)
def test_what_the_parser_refuses_is_one_line(capsys, words):
    with pytest.raises(SystemExit) as refusal:
        main(words)
    said = capsys.readouterr().err
    assert refusal.value.code == 2 and said.count("\n") == 1 and "--help" in said


def test_print_config_shows_who_set_what(base, capsys):
    assert main(["train", str(base / "config.yaml"), "--print-config", "optimizer.lr=1e-3"]) == 0
    shown = capsys.readouterr().out
    assert "lr: 0.001  # the command line" in shown
    assert f"max_new_tokens: 8  # {base / 'config.yaml'}" in shown
    assert "gamma: 50.0  # default" in shown
    assert "#   rollouts a step: 16 for 2 prompts, 1 updates" in shown
    assert yaml.safe_load(shown)["optimizer"]["lr"] == 0.001
    assert not (base / "run").exists()


@pytest.mark.parametrize(
    ("keys", "servers"),
    [
        ([], 8),
        (["rollout.tp=3", "rollout.proof.checksums=false"], 2),
        (["rollout.servers=2"], 2),
        (["rollout.placement=split"], 1),
    ],
)
def test_colocated_servers_use_the_gpus_of_all_ranks(keys, servers, base, capsys, monkeypatch):
    command = ["train", str(base / "config.yaml"), *keys, "--ranks", "8", "--print-config"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert yaml.safe_load(shown)["rollout"]["servers"] == servers and f"#   servers: {servers} of " in shown
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(command) == 0
    assert yaml.safe_load(capsys.readouterr().out)["rollout"]["servers"] == (2 if keys == ["rollout.servers=2"] else 1)


@pytest.mark.parametrize(
    ("keys", "gpus", "servers"),
    [([], 8, 8), (["rollout.tp=4"], 8, 2), ([], 0, 1), (["rollout.servers=1"], 8, 1), (["rollout.servers=16"], 8, 8)],
)
def test_an_evaluation_uses_all_gpus_unless_a_number_is_given(
    keys, gpus, servers, base, tiny_model, capsys, monkeypatch
):
    def started(config, *_):
        raise RolloutError(f"{config.rollout.servers} servers")

    monkeypatch.setattr(command, "RolloutWorker", started)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    keys = [*keys, f"eval.data={base / 'problems.jsonl'}", "model.max_length=128", "rollout.max_new_tokens=8"]
    assert main(["eval", "--model", str(tiny_model), "--out", str(base / "scores"), *keys]) == 1
    assert f"{servers} servers" in capsys.readouterr().err
