"""Each fault is found, in one line that names what, where and the mend."""

import json
import re
import runpy
import shutil
import socket
from pathlib import Path

import pytest
import torch

from dynamo_megatron.bridge import environment
from dynamo_megatron.config.files import compose
from dynamo_megatron.data.sources import load_prompts
from dynamo_megatron.jobs.output_dir import OutputDir
from dynamo_megatron.preflight.checks import Subject, data, evaluation, vocabulary
from dynamo_megatron.reward.functions import check_answers
from dynamo_megatron.runtime.listening import free_port

GIB = 1 << 30
LORA, CRITIC = "model.lora={rank: 4}", "algorithm={advantage: {kind: gae, normalise: batch}, modulation: null}"


@pytest.mark.parametrize("keys", [(), (LORA,), (CRITIC,)])
def test_all_is_well(check, keys):
    for name in ("layout", "model config", "weights", "vocabulary", "data", "reward", "results", "network", "disk"):
        assert {level for level, _ in check(name, *keys)} == {"ok"}, check(name, *keys)


def test_checkpoints_of_adapters_are_smaller_and_those_with_a_critic_larger(check):
    def needed(*keys: str) -> float:  # bytes
        number, unit = re.search(r"3 checkpoints (\S+) (kB|MB)", check("disk", *keys)[0][1]).groups()
        return float(number) * {"kB": 1e3, "MB": 1e6}[unit]

    assert needed(LORA) < needed() / 3 and needed(CRITIC) == pytest.approx(2 * needed(), rel=0.01)


@pytest.mark.parametrize(
    ("name", "key", "says"),
    [
        ("data", "data.max_prompt_length=3", "all of the first 4 prompts .* raise it, or lower rollout.max_new_tokens"),
        ("network", "rollout.host=ib99", "^rollout.host: 'ib99' is neither an address nor an interface of"),
        ("network", "rollout.python=/no/python", "rollout.python: there is no program /no/python here"),
        ("results", "tracking.backends=[json:Tracker]", "^tracking.backends: .json. .* has no .Tracker.$"),
        ("results", "algorithm.allocation.kind=json:Own", "^algorithm.allocation.kind: .json. .* has no .Own.$"),
        ("results", "rollout.agent=json:agent", "^rollout.agent: cannot load json:agent: AttributeError"),
        (
            "results",
            "rollout={placement: external, urls: ['http://h:1'], api_key_env: NO_KEY}",
            "_env: .* NO_KEY is not",
        ),
    ],
)
def test_a_key_that_cannot_work(failure, name, key, says):
    assert re.search(says, failure(name, key))


def edit_json(file: Path, **changes) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


# -- the model's folder ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key", ["critic.path", "algorithm.teacher.path", "algorithm.kl.reference", "reward.prime.model"]
)
def test_truncated_weights_of_a_model_beside_the_policy(base, check, failure, key):
    keys = {"critic.path": [CRITIC], "algorithm.kl.reference": ["algorithm.kl.coef=0.1"]}.get(key, [])
    keys += ["reward.functions=[math, prime]"] if "prime" in key else []
    shutil.copytree(base / "model", base / "other")
    assert [level for level, _ in check("weights", *keys, f"{key}=other")] == ["ok", "ok"]
    file = base / "other" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    said = failure("weights", *keys, f"{key}=other")
    assert said.startswith(f"{key}: ") and "model.safetensors: corrupt or truncated" in said


def test_a_teacher_is_asked_and_its_tokenizer_compared(base, check, failure):
    shutil.copytree(base / "model", base / "other")
    assert [level for level, _ in check("vocabulary", "algorithm.teacher.path=other")] == ["ok", "ok"]
    assert "no answer" in failure("vocabulary", "algorithm.teacher.path='http://127.0.0.1:9'")


def test_a_model_of_bridge_without_bridge(failure, monkeypatch):
    monkeypatch.setattr(environment, "PINS", {"megatron-bridge": "0.0"})
    said = failure("model config", "model.source=bridge", "rollout.proof.checksums=false")
    assert said.startswith("model.source: bridge needs megatron-bridge 0.0, here: ")


def test_a_window_that_sglang_ignores(base, failure):
    windowed = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1, "layer_types": None}
    edit_json(base / "model" / "config.json", **windowed)
    assert "set model.max_length to 16 or less" in failure("model config")


@pytest.mark.parametrize("added", [False, True])
def test_a_tokenizer_whose_ids_go_beyond_the_embedding(base, failure, added):
    file = base / "model" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"]["<think>"] = 400
    if added:
        tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 400, "content": "<think>"})
    file.write_text(json.dumps(tokenizer))
    said = failure("vocabulary")
    assert "ids up to 400, the embedding 128 rows" in said and "copy the model's own tokenizer files" in said


@pytest.mark.parametrize(
    ("end", "says"),
    [
        (151645, "the end token 151645 of .*; correct eos_token_id in generation_config.json"),
        (120, "the end token 120 of .* is unknown to the tokenizer, whose ids end at 100; .* copy the model's own"),
    ],
)
def test_an_end_token_that_the_tokenizer_or_the_embedding_lacks(base, failure, end, says):
    edit_json(base / "model" / "generation_config.json", eos_token_id=[3, end])
    assert re.search(says, failure("vocabulary"))


def test_the_demo_passes(tmp_path, monkeypatch):
    """Its tokenizer knows little but its task, and transformers adds a token to it that the model has no row for."""
    root = Path(__file__).parents[2]
    rows = runpy.run_path(str(root / "tools" / "demo_task.py"))["sums"](0)
    for part in ("pool", "held_out"):
        (tmp_path / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[part][:128]))
    keys = {"data.source": "pool.jsonl", "eval.data": "held_out.jsonl", "output_dir": "run"}
    files = [str(root / "configs" / name) for name in ("demo/rl.yaml", "methods/dynamo.yaml")]
    monkeypatch.chdir(root)  # the warm start's path is of this folder
    demo = Subject(compose(files, [f"{key}={tmp_path / name}" for key, name in keys.items()])[0], 2, 2)
    assert max(demo.tokenizer.get_vocab().values()) >= demo.spec.vocab_size, "else this says nothing"
    assert {finding.level for check in (vocabulary, data, evaluation) for finding in check(demo)} <= {"ok", "note"}


def test_a_length_beyond_the_models(base, failure):
    """Qwen2.5-Math has 4,096 positions and is asked for more all the time."""
    edit_json(base / "model" / "config.json", max_position_embeddings=4096)
    assert "model.max_length: 8192 tokens is above the model's 4096" in failure("data", "model.max_length=8192")


# -- data and reward ---------------------------------------------------------------------------------------------------
def test_rows_that_are_skipped_are_noted(base, check):
    with (base / "problems.jsonl").open("a") as file:
        file.write('{"problem": "What is 9 + 1?", "answer": null}\n')
    (skipped,) = (text for level, text in check("data") if level == "note")
    assert "1 of 5 rows cannot be used and are skipped" in skipped and "problems.jsonl:5: the answer is null" in skipped


def test_a_reward_that_raises(base, failure):
    (base / "own.py").write_text("def score(prompt, response):\n    raise KeyError('no such entry')\n")
    said = failure("reward", "reward.functions=[own:score]")
    assert "own:score failed on prompt 'p0' (" in said and "problems.jsonl:1): KeyError: 'no such entry' (" in said
    assert "mend it" in said


def test_an_answer_that_no_reward_can_read(base, failure):
    rows = [{"id": f"q{n}", "problem": f"Which? {n}", "answer": "A" if n < 5 else "none of these"} for n in range(6)]
    (base / "choices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, keys in (("reward", ["data.source=choices.jsonl"]), ("evaluation", ["eval.data=choices.jsonl"])):
        said = failure(name, *keys, "reward.functions=[choice]")
        assert said.startswith("prompt 'q5' (") and "choices.jsonl:6): the choice reward needs a letter" in said
    assert "reward.on_error=zero" in said
    assert "needs a letter" in failure("reward", "data.source=choices.jsonl", "reward.functions=[length, choice]")
    calls = '{"problem": "q", "answer": {"inputs": [5], "outputs": [5], "fn_name": "f"}}'  # 5 is no list of arguments
    (base / "calls.jsonl").write_text(calls)
    assert "(reward code); mend the row" in failure("reward", "data.source=calls.jsonl", "reward.functions=[code]")
    for leave in ("reward.on_error=zero", "rollout.agent=own:agent"):
        config, _ = compose(
            [str(base / "config.yaml")], ["data.source=choices.jsonl", "reward.functions=[choice]", leave]
        )
        check_answers(load_prompts(config.data), config)


def test_a_reward_that_hangs(base, failure):
    (base / "own.py").write_text("import time\n\ndef score(prompt, response):\n    time.sleep(60)\n")
    said = failure("reward", "reward.functions=[own:score]", "reward.deadline=0.1", "reward.workers=4")
    assert "no score within reward.deadline (0.1 s)" in said and "raise the deadline" in said


def test_a_reward_that_cannot_tell_is_noted(base, check):
    (base / "own.py").write_text("def score(prompt, response):\n    return 1.0\n")
    level, text = check("reward", "reward.functions=[own:score]")[-1]
    assert level == "note" and "the answer itself scores as the wrong one does" in text


def test_problems_that_are_trained_on_are_noted(base, check):
    (base / "eval.jsonl").write_text('{"id": "e0", "problem": "What is 1 + 1?", "answer": "2"}\n')
    level, text = check("evaluation", "eval.data=eval.jsonl")[-1]
    assert level == "note" and "1 of 1 problems are in prompts of" in text and "too (the first, 'e0': in '" in text


# -- the node ----------------------------------------------------------------------------------------------------------
def test_a_folder_that_cannot_be_written(base, failure):
    assert "cannot be written" in failure("disk", "output_dir=config.yaml/run")


def test_the_results_of_this_run_and_of_another(base, check, failure):
    (base / "run").mkdir()
    OutputDir(compose([str(base / "config.yaml")], [])[0]).take_over(0, 1)
    (base / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    assert check("results") == [("ok", f"{base / 'run'} holds this run, which would go on")]
    assert failure("results", "seed=7").startswith(f"output_dir: {base / 'run'} holds a run with another ")


def test_a_port_in_use(failure, monkeypatch):
    port = free_port(2) + 1  # the one before it is free
    with socket.socket() as taken:
        taken.bind(("", port))
        said = failure("network", f"rollout.port={port}")
        assert said.startswith(f"rollout.port: port {port} cannot be used") and "or leave it out" in said
        monkeypatch.setenv("MASTER_PORT", str(port))
        assert failure("network").startswith(f"MASTER_PORT: port {port} cannot be used")


def test_host_memory_for_a_large_model_on_a_cpu(base, failure):
    layers = {"num_hidden_layers": 80, "layer_types": ["full_attention"] * 80}
    edit_json(base / "model" / "config.json", **layers, hidden_size=8192, intermediate_size=29568)
    said = failure("host memory")
    assert "available on this node, the run needs about" in said and "sbatch --mem" in said


@pytest.mark.parametrize(("name", "value"), [("CUDA_VISIBLE_DEVICES", "0,1"), ("SLURM_GPUS_ON_NODE", "2")])
def test_gpus_that_torch_does_not_see(check, failure, monkeypatch, name, value):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv(name, value)
    assert "torch's CUDA build" in failure("devices")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
    assert check("devices") == [("ok", "no GPU: the ranks run on CPUs")]


@pytest.fixture
def two_h100s(monkeypatch):
    """What torch says of them; they are not there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70 * GIB, int(79.1 * GIB)))


def test_the_plan_for_the_gpus_here(check, failure, monkeypatch, two_h100s):
    ((level, text),) = check("plan", ranks=2)
    assert level == "ok" and text == "2 x h100-80 in 1 node: fits"
    assert "GiB too much on the fullest rank" in failure("plan", "trainer.micro_batch_tokens=400000000", ranks=2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA L40S")
    ((level, text),) = check("plan", ranks=2)
    assert level == "skipped" and "NVIDIA L40S" in text


def test_the_nodes_of_a_run_without_a_launcher(check, failure, two_h100s):
    said = failure("network", ranks=4)
    assert said.startswith("rollout.host: '127.0.0.1' is each host's own, and the ranks are on 2 (node 0, node 1...)")
    on_all = ["rollout.host=192.0.2.7", "rollout.servers=4"]
    assert [level for level, _ in check("network", *on_all, ranks=4)] == ["ok"]
    assert "servers of 1 ranks (rollout.tp) have 4 on this machine" in failure("network", *on_all, ranks=2)


def test_servers_on_gpus_without_ranks(check, failure, two_h100s):
    for key in ("rollout.servers=2", "rollout.tp=2"):
        said = failure("network", key)
        assert "have 2 GPUs on this machine, which has 1 training ranks, and by ipc" in said
        assert [level for level, _ in check("network", key, ranks=2)] == ["ok"]
        assert [level for level, _ in check("network", key, "rollout.sync.transport=gloo")] == ["ok"]


def test_an_address_of_rank_0_that_no_name_server_knows(failure, monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "1", "MASTER_ADDR": "no-such-host.invalid"}.items():
        monkeypatch.setenv(name, value)
    assert failure("network").startswith("MASTER_ADDR: this node does not reach no-such-host.invalid (")


def test_what_a_server_lacks_on_a_machine_with_cuda(base, check, monkeypatch, two_h100s):
    graphs = "rollout.server_args=[--cuda-graph-max-bs, '8', --attention-backend=triton]"
    ambiguous, cutlass = check("gpu server", graphs)
    assert ambiguous[0] == cutlass[0] == "FAILED" and "add -decode or -prefill" in ambiguous[1]
    assert "pip install nvidia-cutlass-dsl there" in cutlass[1]
    monkeypatch.setenv("PYTHONPATH", str(base))
    (base / "cutlass.py").touch()
    ((level, text),) = check("gpu server")
    assert level == "FAILED" and "install flashinfer_python there, or give an --attention-backend" in text
    (base / "flashinfer.py").touch()
    assert [level for level, _ in check("gpu server")] == ["ok"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [level for level, _ in check("gpu server", graphs)] == ["skipped"]


@pytest.mark.parametrize("answer", [None, ""])
def test_rows_of_an_agent_may_have_no_answer(base, check, answer):
    rows = [{"id": f"p{i}", "problem": "Play.", "answer": answer} for i in range(4)]
    (base / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ((level, text),) = check("reward", "rollout.agent=mine:agent", "data.template=chat")
    assert level == "skipped" and text == "no row has an answer, so the agent must give the reward"


# -- the server --------------------------------------------------------------------------------------------------------
def test_the_log_of_a_server_that_ends_stays(failure):
    logs = [Path(re.search(r"see (\S+);", failure("server", "rollout.python=/bin/false"))[1]) for _ in range(2)]
    assert logs[0] != logs[1]
    for log in logs:
        assert log.is_file()
        shutil.rmtree(log.parent)
