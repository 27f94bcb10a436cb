"""Each fault is found, in one line that names what, where and the mend."""

import json
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dynamo_megatron.data.templates import load_tokenizer
from dynamo_megatron.models import load_model_config
from dynamo_megatron.preflight import device_checks, machine_checks, model_checks
from dynamo_megatron.runtime.free_ports import free_port


def test_all_is_well(check):
    for name in ("layout", "weights", "round trip", "vocabulary", "context length", "data", "template", "disk"):
        assert {level for level, _ in check(name)} == {"ok"}, check(name)


def edit_json(file: Path, **changes) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def shard(folder: Path) -> None:
    """model.safetensors as two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    halves = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({n: tensors[n] for n in part}, folder / file)
    index = {"weight_map": {n: file for file, part in halves.items() for n in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()


# -- the model's folder ------------------------------------------------------------------------------------------------
def test_a_missing_shard(base, failure, check):
    shard(base / "model")
    assert check("weights")[0][0] == "ok"
    (base / "model" / "model-2.safetensors").unlink()
    said = failure("weights")
    assert "model-2.safetensors: no such file, though model.safetensors.index.json names it" in said


def test_a_truncated_shard(base, failure):
    file = base / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    assert "model.safetensors: corrupt or truncated" in failure("weights")


def test_a_vocabulary_of_another_size_than_the_embedding(base, failure):
    edit_json(base / "model" / "config.json", vocab_size=160)
    said = failure("weights")
    assert "model.embed_tokens.weight [128, 64] instead of [160, 64]" in said and "config.json" in said


def test_another_models_tokenizer(base, failure, make_tiny_model):
    """Its ids go beyond the embedding."""
    tokenizer = json.loads((base / "model" / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {f"extra{i}": len(vocabulary) + i for i in range(300)}
    (base / "model" / "tokenizer.json").write_text(json.dumps(tokenizer))
    said = failure("vocabulary")
    assert "ids up to 400, the embedding 128 rows" in said and "copy the model's own tokenizer files" in said


def test_added_tokens_beyond_the_embedding(base, failure):
    file = base / "model" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 400, "content": "<think>"})
    tokenizer["model"]["vocab"]["<think>"] = 400
    file.write_text(json.dumps(tokenizer))
    assert "ids up to 400, the embedding 128 rows" in failure("vocabulary")


def test_the_demos_tokenizer_is_its_models(tmp_path):
    """transformers adds a token to it that the model has no row for."""
    demo = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "demo_task.py"))
    tokenizer = demo["train_tokenizer"](["1+2=", "34567890"])
    demo["make_model"](tokenizer, tmp_path, 0)
    loaded = load_tokenizer(tmp_path)
    assert max(loaded.get_vocab().values()) >= len(tokenizer), "else this says nothing"
    model_checks.check_vocabulary(tmp_path, load_model_config(tmp_path), loaded)


def test_an_end_token_beyond_the_embedding(base, failure):
    edit_json(base / "model" / "generation_config.json", eos_token_id=[3, 151645])
    said = failure("vocabulary")
    assert "end token 151645" in said and "correct eos_token_id in generation_config.json" in said


def test_a_smaller_models_tokenizer(base, failure):
    """Its ids all fit."""
    edit_json(base / "model" / "generation_config.json", eos_token_id=[3, 120])
    said = failure("vocabulary")
    assert "the end token 120 of" in said and "is unknown to the tokenizer, whose ids end at 100" in said
    assert "copy the model's own tokenizer files" in said
    edit_json(base / "model" / "generation_config.json", eos_token_id=3)
    edit_json(base / "model" / "config.json", vocab_size=4096)
    said = failure("vocabulary")
    assert "has 101 tokens, the embedding 4,096 rows" in said and "another model's tokenizer" in said


def test_no_chat_template(base, failure):
    (base / "model" / "chat_template.jinja").unlink()
    said = failure("template")
    assert "has no chat template; set data.chat_template to plain " in said
    assert said.endswith("or data.template to a text with {prompt} in it")


def test_weights_that_are_not_numbers(base, failure):
    file = base / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.nan
    save_file(tensors, file)
    said = failure("round trip")
    assert "model.layers.1.mlp.up_proj.weight holds NaN" in said and "download the model again" in said


def test_a_config_that_megatron_cannot_follow(base, failure):
    edit_json(base / "model" / "config.json", hidden_act="gelu")
    assert "hidden_act: 'gelu' is not supported, only 'silu'" in failure("model config")


def test_tp_that_does_not_divide_the_key_value_heads(failure):
    said = failure("layout", "parallel.tp=4", ranks=4)
    assert "parallel.tp: 4 does not divide the 2 (key/value heads); use one of 1, 2" in said


def test_a_length_beyond_the_models(base, failure):
    """Qwen2.5-Math has 4,096 positions and is asked for more all the time."""
    edit_json(base / "model" / "config.json", max_position_embeddings=4096)
    assert "model.max_length: 8192 tokens is above the model's 4096" in failure(
        "context length", "model.max_length=8192"
    )
    said = failure("context length", "model.max_length=null", "rollout.max_new_tokens=4096")
    assert "rollout.max_new_tokens: 4096 tokens leave 0 of 4096 for the prompt" in said


# -- data and reward ---------------------------------------------------------------------------------------------------
def test_unreadable_data(base, failure):
    with (base / "problems.jsonl").open("a") as file:
        file.write('{"problem": "cut of\n')
    assert "problems.jsonl:5: not JSON" in failure("data")
    assert "data.source: there is no file /no/such.jsonl" in failure("data", "data.source=/no/such.jsonl")


def test_a_row_without_an_answer(base, check, failure):
    with (base / "problems.jsonl").open("a") as file:
        file.write('{"problem": "What is 9 + 1?", "answer": null}\n')
    level, text = check("data")[-1]
    assert level == "note" and "1 of 5 rows cannot be used and are skipped (data.on_bad_row), the first: " in text
    assert "problems.jsonl:5: the answer is null" in text
    assert "problems.jsonl:5: the answer is null" in failure("data", "data.on_bad_row=error")
    assert {level for level, _ in check("data", "reward.functions=[own:score]")} == {"ok"}


def test_characters_that_the_tokenizer_lacks(base, check, failure):
    with (base / "problems.jsonl").open("a") as file:
        file.write('{"problem": "What is 3\u00d73?", "answer": "9"}\n')
    level, text = check("data")[-1]
    assert level == "note" and "1 of 5 problems have characters that the tokenizer of" in text and "('\u00d7')" in text
    file = base / "model" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"]["unused"] = tokenizer["model"]["vocab"].pop("?")
    file.write_text(json.dumps(tokenizer))
    assert "5 of 5 problems have characters that the tokenizer of" in failure("data")


def test_prompts_that_are_all_too_long(failure):
    said = failure("data", "data.max_prompt_length=3")
    assert "all of the first 4 prompts" in said and "raise it, or lower rollout.max_new_tokens" in said


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise KeyError('no such entry')", "KeyError: 'no such entry' ("),
        ("return float('nan')", "ValueError: returned nan; "),
    ],
)
def test_a_reward_that_raises(base, failure, body, says):
    (base / "own.py").write_text(f"def score(prompt, response):\n    {body}\n")
    said = failure("reward", "reward.functions=[own:score]", "reward.workers=1")
    assert "own:score failed on prompt 'p0' (" in said and "problems.jsonl:1): " in said
    assert says in said and "mend it" in said


def test_a_reward_that_hangs(base, check):
    (base / "own.py").write_text("import time\n\ndef score(prompt, response):\n    time.sleep(60)\n")
    found = check("reward", "reward.functions=[own:score]", "reward.deadline=0.1", "reward.workers=4")
    assert {level for level, _ in found} == {"FAILED"}
    assert "no score within reward.deadline (0.1 s)" in found[0][1] and "raise the deadline" in found[0][1]


def test_a_reward_that_cannot_tell_is_noted(base, check):
    (base / "own.py").write_text("def score(prompt, response):\n    return 1.0\n")
    level, text = check("reward", "reward.functions=[own:score]")[-1]
    assert level == "note" and "the answer itself scores as the wrong one does" in text


def test_problems_that_are_trained_on_are_noted(base, check):
    rows = [{"id": "e0", "problem": "What is 1 + 1?"}, {"id": "e1", "problem": "what is  2 + 1"}]
    rows += [{"id": "e2", "problem": "What is 2 - 1?"}]  # an operator is no punctuation
    (base / "eval.jsonl").write_text("".join(json.dumps({**row, "answer": "2"}) + "\n" for row in rows))
    level, text = check("evaluation", "eval.data=eval.jsonl")[-1]
    assert level == "note" and "2 of 3 problems of eval.jsonl have at least 50% of their" in text


# -- the node ----------------------------------------------------------------------------------------------------------
def test_a_folder_that_cannot_be_written(base, failure):
    assert "cannot be written" in failure("disk", "output_dir=config.yaml/run")
    said = failure("disk", f"output_dir={base / 'model'}")
    assert f"output_dir: {base / 'model'} is a model's folder (config.json); name a new folder" in said


def test_a_port_in_use(failure, monkeypatch):
    port = free_port(2) + 1  # the one before it is free
    with socket.socket() as taken:
        taken.bind(("", port))
        said = failure("ports", f"rollout.port={port}")
        assert said.startswith(f"rollout.port: port {port} cannot be used") and "or leave it out" in said
        model = ["reward.functions=[reward_model]", "reward.reward_model.path=rm", "reward.servers.count=2"]
        said = failure("ports", *model, f"reward.servers.port={port - 1}")
        assert said.startswith(f"reward.servers.port: port {port} cannot be used")
        monkeypatch.setenv("MASTER_PORT", str(port))
        assert failure("ports").startswith(f"MASTER_PORT: port {port} cannot be used")


def test_an_interface_that_is_not_there(failure):
    said = failure("ports", "rollout.host=ib99")
    assert said.startswith("rollout.host: 'ib99' is neither an address nor an interface of")


def test_host_memory_for_a_large_model_on_a_cpu(base, failure):
    edit_json(base / "model" / "config.json", num_hidden_layers=80, hidden_size=8192, intermediate_size=29568)
    said = failure("host memory")
    assert "available on this node, the run needs about" in said and "sbatch --mem" in said


@pytest.mark.parametrize(
    ("line", "folder", "files"),
    [
        ("0::/job", "job", ("memory.max", "memory.current", "inactive_file")),
        ("4:memory:/job", "memory/job", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
    ],
    ids=["version 2", "version 1"],
)
def test_the_job_s_memory_limit(tmp_path, line, folder, files):
    """Pages of files that the job has read are given back: 1000 - 700 + 500."""
    (tmp_path / folder).mkdir(parents=True)
    for name, text in zip((*files[:2], "memory.stat"), ("1000\n", "700\n", f"anon 9\n{files[2]} 500\n"), strict=True):
        (tmp_path / folder / name).write_text(text)
    (tmp_path / "own").write_text(f"12:pids:/job\n{line}\n")
    assert machine_checks._cgroup_room(tmp_path, tmp_path / "own") == 800
    (tmp_path / "own").write_text("12:pids:/job\n0::/other\n")
    assert machine_checks._cgroup_room(tmp_path, tmp_path / "own") == float("inf")


@pytest.mark.parametrize(("name", "value"), [("CUDA_VISIBLE_DEVICES", "0,1"), ("SLURM_GPUS_ON_NODE", "2")])
def test_gpus_that_torch_does_not_see(failure, monkeypatch, name, value):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv(name, value)
    said = failure("devices")
    assert f"{name} is {value}, and torch" in said and "install its CUDA build" in said
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device_checks.gpus_given() is None


def other_interpreter(folder: Path, package: str, version: str) -> Path:
    """A python that has an old version of a package."""
    site = folder / "site" / f"{package}-{version}.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder / "site"}:$PYTHONPATH exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


def test_a_server_of_another_version(base, failure, check):
    python = other_interpreter(base, "sglang", "0.4.9")
    said = failure("versions", f"rollout.python={python}")
    assert f"sglang 0.4.9 in the server's interpreter {python} is older than 0.5.23" in said
    assert "pip install 'sglang==0.5.23'" in said
    shutil.rmtree(base / "site")
    other_interpreter(base, "sglang", "0.9.1")
    assert ("note", "the tests ran with 0.5.23") in [
        (level, text.split("; ")[-1]) for level, text in check("versions", f"rollout.python={python}")
    ]


def test_a_server_of_another_torch_is_noted_where_there_is_no_gpu(base, check):
    python = other_interpreter(base, "torch", "2.99.0")
    notes = [text for level, text in check("versions", f"rollout.python={python}") if level == "note"]
    assert any("and 2.99.0 in the server's; colocated servers on GPUs need one version" in text for text in notes)
    notes = [text for level, text in check("versions", f"rollout.python={sys.executable}") if level == "note"]
    assert not any("one version" in text for text in notes)


def test_a_transport_that_cannot_work(failure):
    assert "rollout.sync.transport: nccl needs GPUs" in failure("versions", "rollout.sync.transport=nccl")


def test_a_trainer_of_another_version(base, command_line):
    """`train` refuses it before anything starts."""
    python = other_interpreter(base, "megatron_core", "0.12.0")
    done = subprocess.run(
        [python, "-P", "-m", "dynamo_megatron.cli", "train", base / "config.yaml"], capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "megatron-core 0.12.0 in the trainer's interpreter is older than 0.16.1" in done.stderr
    assert "pip install -c requirements/lock.txt 'megatron-core==0.16.1'" in done.stderr


@pytest.mark.parametrize("version", ["0.16.1", "0.19.2", "0.21.0"])
def test_a_megatron_that_no_test_ran_with_is_noted(check, monkeypatch, version):
    found = machine_checks.trainer_version
    monkeypatch.setattr(machine_checks, "trainer_version", lambda p: version if p == "megatron-core" else found(p))
    notes = [text for level, text in check("versions") if level == "note" and "megatron-core" in text]
    said = f"megatron-core {version} in the trainer's interpreter is untested; the tests ran with 0.16.1 and 0.19.2"
    assert notes == ([said] if version == "0.21.0" else [])


def test_an_optional_package_that_is_half_there(base, failure, monkeypatch):
    (base / "transformer_engine").mkdir()
    (base / "transformer_engine" / "__init__.py").write_text("raise FileNotFoundError('no shared object')")
    monkeypatch.syspath_prepend(base)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    said = failure("optional packages")
    assert said.startswith(
        "transformer-engine is installed and cannot be imported (FileNotFoundError: no shared object)"
    )


def test_a_gpu_that_needs_flash_attn_is_noted(base, check, monkeypatch):
    (base / "transformer_engine" / "pytorch").mkdir(parents=True)
    monkeypatch.syspath_prepend(base)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    for capability, levels in (((8, 0), ["ok", "note"]), ((9, 0), ["ok"])):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        found = check("optional packages")
        assert [level for level, _ in found] == levels
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        del sys.modules[name]


def test_a_server_interpreter_that_is_none(failure):
    said = failure("versions", "rollout.python=/opt/sglang/bin/python")
    assert said.startswith("rollout.python: /opt/sglang/bin/python does not tell its packages")


def test_a_rank_that_does_not_come():
    """No hang: the one that waits is ended and says so."""
    port = str(free_port())
    job = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    job = {**os.environ, **job}
    assert device_checks._run_ranks([job], timeout=5) == [{"rank": 0, "error": "no sum within 5 s"}]


def test_torchruns_variables_do_not_reach_the_all_reduce(check, monkeypatch):
    """With them its rank 0 waits for a store that nobody serves."""
    port = str(free_port(2))  # the all-reduce takes the next one
    torchrun = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**torchrun, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    assert [level for level, _ in check("devices")] == ["ok"]


def test_the_log_of_a_server_that_ends_stays(failure):
    logs = [Path(re.search(r"see (\S+);", failure("server", "rollout.python=/bin/false"))[1]) for _ in range(2)]
    assert logs[0] != logs[1]
    for log in logs:
        assert log.is_file()
        shutil.rmtree(log.parent)


@pytest.mark.full
def test_a_server_that_does_not_start(failure):
    said = failure("server", "rollout.server_args=[--no-such-option]")
    assert "--no-such-option" in said and "correct rollout.server_args" in said
