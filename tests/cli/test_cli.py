"""Bad input: one line that says what, where and how to mend it, exit code 2, nothing written."""

import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

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


def refused(capsys, *arguments) -> str:
    """The one line of a refusal before any rank is started."""
    assert main(["train", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1, captured.err
    return captured.err.strip()


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("optimzer.lr=1", "unknown key optimzer; did you mean optimizer?"),
        ("rollout.max_tokens=1", "unknown key rollout.max_tokens; did you mean rollout.max_new_tokens?"),
        ("clip_ratio_low=.1", "the nearest key is algorithm.loss.clip_ratio_low"),
        ("optimizer.lr=fast", "optimizer.lr: Input should be a valid number"),
        ("data.batch_prompts=two", "data.batch_prompts: Input should be a valid integer"),
        ("algorithm.allocation.budget=3", "algorithm.allocation.budget: 3 rollouts for 2 prompts is outside [4, 48]"),
        ("rollout.top_p=0.9", "top_p: training needs 1.0"),
        ("parallel.tp=3", "parallel.tp: 3 does not divide the 4 (attention heads); use one of 1, 2"),
        ("parallel.pp=4", "parallel.pp: 4 does not divide the 2 layers"),
        ("parallel.vpp=2", "parallel: vpp: 2 chunks a stage need pp above 1"),
        ("parallel.sequence_parallel=true", "parallel: sequence_parallel: needs tp above 1"),
        ("parallel.ep=2", "parallel.ep: 2, but a qwen2 model has no experts"),
        ("model.dtype=float16", "model.dtype: 'float16' needs loss scaling"),
        ("model.router_aux_loss_coef=0.001", "model.router_aux_loss_coef: 0.001: the policy loss is normalised over"),
        ("algorithm.kl={coef: 0.1, reference: /no/such/model}", "algorithm.kl.reference: /no/such/model: no such"),
        ("algorithm.kl.reference=m", "algorithm.kl: reference: only a coef above 0 uses it"),
        ("rollout.max_new_tokens=128", "rollout.max_new_tokens: 128 tokens leave 0 of 128 for the prompt"),
        ("eval.k=[1,8]", "eval: k: pass@8 needs that many samples a problem, samples is 1"),
        ("eval.every=5", "eval: data: name the problems to evaluate on"),
        (
            "checkpoint.export_hf=best",
            "checkpoint.export_hf: 'best' is chosen by the periodic evaluation; set eval.every",
        ),
        ("trainer.stop_when={metric: eval/pass@1, above: 1}", "eval/pass@1 needs the periodic evaluation"),
        ("trainer.stop_when.above=1", "metric: name the metric that above is about"),
        (
            "tracking.backends=[comet]",
            "tracking.backends.0: Input should be 'jsonl', 'tensorboard', 'wandb', 'mlflow', 'swanlab' or 'trackio'",
        ),
        ("model.family=gpt5", "model_type 'qwen2' is of family qwen2, model.family is 'gpt5'; leave it out"),
        ("model.path=/no/such/model", "/no/such/model: no such folder"),
        ("nothing.yaml", "nothing.yaml: no such config file"),
        ("rollout.servers=1000", "rollout.servers: 1000 servers of 1 ranks (rollout.tp) have 1000 on this machine"),
        ("rollout.python=/no/such/python", "rollout.python: there is no program /no/such/python here"),
        ("rollout.server_args=[--no-such]", "rollout.server_args: SGLang: error: unrecognized arguments: --no-such"),
        ("output_dir=/dev/null", "output_dir: /dev/null is no folder; name another folder"),
        ("output_dir=/dev/null/run", "output_dir: /dev/null is no folder; name another folder"),
    ],
)
def test_refused_before_any_rank_starts(base, capsys, argument, says):
    assert says in refused(capsys, base / "config.yaml", argument)
    assert not (base / "run").exists()


def test_missing_inputs_are_all_named_before_any_rank_starts(base, capsys):
    words = ["model.path=/no/model", "data.source=no.jsonl", "eval={data: no.parquet, every: 1}"]
    assert main(["train", str(base / "config.yaml"), *words]) == 2
    first, *others = capsys.readouterr().err.splitlines()
    assert first.startswith("/no/model: no such folder")
    assert others == ["data.source: there is no file no.jsonl", "eval.data: there is no file no.parquet"]


def test_context_parallelism_refuses_what_needs_whole_sequences(base, capsys):
    keys = ("parallel.cp=2", "algorithm.modulation.expectation=sequence_mean")
    says = "algorithm.modulation.expectation: sequence_mean needs whole sequences on a rank, and parallel.cp is 2"
    assert says in refused(capsys, base / "config.yaml", *keys)


def test_a_reference_policy_of_another_shape_is_refused(base, capsys, make_tiny_model):
    other = make_tiny_model(base / "other", layers=3)
    capsys.readouterr()
    said = refused(capsys, base / "config.yaml", f"algorithm.kl={{coef: 0.1, reference: {other}}}")
    assert f"algorithm.kl.reference: {other} has num_layers 3, the policy 2" in said


def test_a_rope_that_sglang_would_not_serve_is_refused(base, capsys, tiny_model):
    model = shutil.copytree(tiny_model, base / "yarn")
    config = json.loads((model / "config.json").read_text())
    config["rope_parameters"] |= {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.5}
    (model / "config.json").write_text(json.dumps(config))
    says = "attention_factor: 1.5 in config.json's RoPE parameters, which SGLang ignores"
    assert says in refused(capsys, base / "config.yaml", f"model.path={model}")
    keys = ("--model", str(model), "--out", str(base / "eval"), f"eval.data={base / 'problems.jsonl'}")
    assert main(["eval", *keys]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("key", ["eval.every=2", "data.max_prompt_length=9", "checkpoint.export_hf=best"])
def test_sft_refuses_what_it_would_pass_over(base, capsys, key):
    keys = [str(base / "config.yaml"), "eval.data=x.jsonl", "eval.every=1", key]
    assert main(["sft", *(keys if "eval" not in key else [keys[0], keys[1], key])]) == 2
    assert "not for sft" in capsys.readouterr().err


def test_sft_has_no_outcomes_to_draw_prompts_by(base, capsys):
    assert main(["sft", str(base / "config.yaml"), "data.selection=greso"]) == 2
    assert "data.selection: not for sft" in capsys.readouterr().err


def test_an_evaluation_does_not_go_into_a_run(base, tiny_model, capsys):
    run = base / "run"
    run.mkdir()
    (run / "config.yaml").write_text("x: 1\n")
    assert main(["eval", "--model", str(tiny_model), "--out", str(run), f"eval.data={base / 'problems.jsonl'}"]) == 2
    assert capsys.readouterr().err == f"--out: {run} holds a run or an evaluation; name another folder\n"
    assert [p.name for p in run.iterdir()] == ["config.yaml"] and (run / "config.yaml").read_text() == "x: 1\n"


def test_version_names_what_results_depend_on(capsys):
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    said = capsys.readouterr().out
    assert done.value.code == 0 and said.count("\n") == 1
    assert said.startswith(f"dynamo-megatron {metadata.version('dynamo-megatron')} (Python 3.")
    assert f"megatron-core {metadata.version('megatron-core')}" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["trian", "my.yaml"], "unknown command trian; did you mean train?"),
        (["launch", "slrum", "my.yaml"], "unknown command launch slrum; did you mean slurm?"),
        (["convert", "hf2mcor"], "unknown command convert hf2mcor; did you mean hf2mcore?"),
        (["my.yaml"], "unknown command my.yaml; the commands are train, sft, "),
        (["train", "my.yaml", "--rnks", "2"], "unknown option --rnks; did you mean --ranks?"),
        (["launch", "slurm", "my.yaml", "--gpu-per-node=8"], "unknown option --gpu-per-node; did you mean --gpus-per-"),
        (["train", "my.yaml", "--model.path", "m"], "unknown option --model.path; a key of the config has no dashes: "),
        (["replay", "runs/a", "extra"], "unknown argument extra; see dynamo-megatron replay --help"),
    ],
)
def test_an_unknown_word_is_answered_with_the_nearest_one(capsys, words, says):
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith(says) and said.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["train"], ["launch"], ["train", "my.yaml", "--ranks", "two"]])
def test_what_the_parser_refuses_is_one_line(capsys, words):
    with pytest.raises(SystemExit) as refused:
        main(words)
    said = capsys.readouterr().err
    assert refused.value.code == 2 and said.count("\n") == 1 and "--help" in said


@pytest.mark.parametrize("number", ["0", "-1", "two", "0.5"])
@pytest.mark.parametrize("words", [["train", "my.yaml", "--ranks"], ["report", "run", "--watch"]])
def test_counts_and_seconds_are_whole_numbers(words, number, capsys):
    with pytest.raises(SystemExit) as refused:
        main([*words[:-1], f"{words[-1]}={number}"])
    assert refused.value.code == 2
    assert f"argument {words[-1]}: '{number}' is not a whole number of at least 1; see" in capsys.readouterr().err


def test_keys_may_follow_an_option(base, capsys):
    assert main(["train", str(base / "config.yaml"), "--print-config", "optimizer.lr=1e-3"]) == 0
    assert "lr: 0.001  # the command line" in capsys.readouterr().out


def test_a_config_that_is_not_text(base, capsys):
    (base / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "binary.yaml: not UTF-8 text" in refused(capsys, base / "binary.yaml")


def test_a_folder_without_config_json(base, capsys):
    assert "config.json: no such file" in refused(capsys, base / "config.yaml", f"model.path={base}")


def test_print_config_shows_who_set_what(base, capsys):
    assert main(["train", str(base / "config.yaml"), "optimizer.lr=1e-3", "--print-config"]) == 0
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
        (["rollout.tp=2"], 4),
        (["rollout.tp=3"], 2),
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


@pytest.mark.parametrize(("keys", "gpus", "servers"), [([], 8, 8), (["rollout.tp=4"], 8, 2), ([], 0, 1)])
@pytest.mark.parametrize("given", [None, 1, 16])
def test_an_evaluation_uses_all_gpus_unless_a_number_is_given(
    keys, gpus, servers, given, base, tiny_model, capsys, monkeypatch
):
    def started(config, *_):
        raise RolloutError(f"{config.rollout.servers} servers")

    monkeypatch.setattr(command, "RolloutWorker", started)
    monkeypatch.setattr(command, "StopFlag", lambda: SimpleNamespace(catch_signals=lambda: None))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    keys = [*keys, f"eval.data={base / 'problems.jsonl'}", "model.max_length=128", "rollout.max_new_tokens=8"]
    keys += [] if given is None else [f"rollout.servers={given}"]
    assert main(["eval", "--model", str(tiny_model), "--out", str(base / "scores"), *keys]) == 1
    assert f"{servers if given is None else min(servers, given)} servers" in capsys.readouterr().err


def rank_0(folder: Path, *arguments) -> tuple[int, str]:
    """Rank 0 alone, as torchrun would start it."""
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    with open(folder / "out", "w") as out, open(folder / "err", "w") as err, socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as in test_run.py: the port is the rank's alone
        held.bind(("127.0.0.1", 0))
        environment["MASTER_PORT"] = str(held.getsockname()[1])
        code = subprocess.run(
            [sys.executable, "-P", "-m", "dynamo_megatron.cli", "train", *map(str, arguments)],
            env=environment,
            stdout=out,
            stderr=err,
            timeout=120,
        ).returncode
    return code, (folder / "err").read_text()


def corrupt(base: Path, tiny_model: Path) -> list[str]:
    copy = base / "model"
    shutil.copytree(tiny_model, copy)
    data = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(data[: len(data) // 2])
    return [f"model.path={copy}"]


LOST = '{"problem": "1\u00d72=", "answer": "2"}\n{"problem": "2\u00d72=", "answer": "4"}\n'


def jsonl(base: Path, text: str) -> list[str]:
    (base / "bad.jsonl").write_text(text)
    return [f"data.source={base / 'bad.jsonl'}"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (lambda base, model: corrupt(base, model), "model.safetensors: corrupt or truncated"),
        (lambda base, model: jsonl(base, ""), "bad.jsonl"),
        (lambda base, model: jsonl(base, '{"problem": "1", "answer": "1"}\n{"problem": "2"\n'), "bad.jsonl:2"),
        (lambda base, model: jsonl(base, '{"problem": "1"}\n'), "bad.jsonl:1"),
        (lambda base, model: jsonl(base, '{"problem": "1", "answer": null}\n'), "bad.jsonl:1: the answer is null"),
        (lambda base, model: jsonl(base, LOST), "2 of 2 problems have characters that the tokenizer"),
        (lambda base, model: ["data.max_prompt_length=2", "data.on_long_prompt=error"], "'a' has 3 tokens, above"),
        (lambda base, model: ["data.max_prompt_length=2"], "all 2 prompts have more than 2 tokens"),
        (lambda base, model: ["reward.functions=[nowhere:reward]"], "nowhere"),
        (lambda base, model: ["rollout.engine=recorded", f"rollout.recorded={base}"], "has no rollouts/ folder"),
    ],
    ids=[
        *("safetensors", "empty", "malformed", "no-answer", "null", "characters", "long", "all-long", "reward"),
        "recorded",
    ],
)
@pytest.mark.full
def test_refused_by_rank_0(base, tiny_model, arguments, says):
    code, err = rank_0(base, base / "config.yaml", *arguments(base, tiny_model))
    assert (code, err.count("\n")) == (2, 1), err
    assert says in err
    assert not (base / "run").exists()


@pytest.mark.full
def test_a_port_in_use(base):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, err = rank_0(base, base / "config.yaml", f"rollout.port={port}")
    assert (code, err.count("\n")) == (2, 1), err
    assert str(port) in err
    assert not (base / "run").exists()


@pytest.mark.full
def test_a_start_that_is_refused_with_the_policy_leaves_no_folder(base, tiny_model):
    """The weights are read last of all."""
    model = base / "model"
    shutil.copytree(tiny_model, model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    (base / "record" / "rollouts").mkdir(parents=True)
    keys = [f"model.path={model}", "rollout.engine=recorded", f"rollout.recorded={base / 'record'}"]
    code, err = rank_0(base, base / "config.yaml", *keys, f"output_dir={base / 'runs' / 'first'}")
    assert code == 2 and err.splitlines() == [
        f"{model}: tensor model.norm.weight holds NaN or infinity; download or convert the model again"
    ]
    assert not (base / "runs").exists()


def test_an_evaluation_does_not_go_into_a_model(base, tiny_model, capsys):
    before = sorted(tiny_model.iterdir())
    words = ["eval", "--model", str(tiny_model), f"eval.data={base / 'problems.jsonl'}"]
    assert main([*words, "--out", str(tiny_model)]) == 2
    said = capsys.readouterr().err
    assert said == f"--out: {tiny_model} is a model's folder (config.json); name another folder\n"
    assert sorted(tiny_model.iterdir()) == before
    assert main([*words[:-1], "eval.data=/no/such.jsonl", "--out", str(base / "scores" / "first")]) == 2
    assert not (base / "scores").exists() and "/no/such.jsonl" in capsys.readouterr().err


def test_another_run_in_the_output_folder(base):
    (base / "run").mkdir()
    config = yaml.safe_load((base / "config.yaml").read_text())
    from dynamo_megatron.config import Config
    from dynamo_megatron.config.files import to_plain

    text = yaml.safe_dump(to_plain(Config.model_validate(config)))
    (base / "run" / "config.yaml").write_text(text)
    (base / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    code, err = rank_0(base, base / "config.yaml", "algorithm.advantage.kind=grpo")
    assert (code, err.count("\n")) == (2, 1), err
    assert "holds a run with another algorithm.advantage.kind" in err
    assert (base / "run" / "config.yaml").read_text() == text
    assert (base / "run" / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert {p.name for p in (base / "run").iterdir()} == {"config.yaml", "metrics.jsonl"}


@pytest.mark.full
def test_another_process_in_the_output_folder(base, capsys):
    (base / "run").mkdir()
    with open(base / "run" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another process trains in" in refused(capsys, base / "config.yaml")
        code, err = rank_0(base, base / "config.yaml")
    assert (code, err.count("\n")) == (2, 1), err
    assert "another process trains in" in err
    assert [p.name for p in (base / "run").iterdir()] == [".lock"]
