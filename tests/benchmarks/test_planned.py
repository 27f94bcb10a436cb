"""The planner's figures beside what a benchmark has measured."""

import json

import planned
import pytest
import torch
import training_steps
import yaml
from gpu_check_lines import plan_line
from training_steps import QWEN_1_5B, TINY

from dynamo_megatron.config.files import compose
from dynamo_megatron.models import load_model_config
from dynamo_megatron.planning.hardware import GPUS, Cluster
from dynamo_megatron.planning.plan import Workload, make_plan

H100 = GPUS["h100-80"]


@pytest.fixture(scope="module")
def of_qwen(tmp_path_factory):
    """The config of the training part at full size, with a config.json of that shape and no weights."""
    folder = tmp_path_factory.mktemp("planned")
    file = training_steps.prepare(TINY, folder, "triton")
    shape = folder / "model" / "config.json"
    written = json.loads(shape.read_text())
    del written["layer_types"]
    work = QWEN_1_5B
    written |= {"num_hidden_layers": work.layers, "hidden_size": work.hidden, "intermediate_size": work.ffn}
    written |= {"num_attention_heads": work.heads, "num_key_value_heads": work.kv_heads, "vocab_size": work.vocab}
    written |= {"head_dim": work.hidden // work.heads}
    shape.write_text(json.dumps(written))
    config = yaml.safe_load(file.read_text())
    config["model"]["dtype"] = work.dtype
    config["data"]["batch_prompts"] = work.prompts
    config["algorithm"]["allocation"]["budget"] = work.prompts * work.rollouts
    config["trainer"]["micro_batch_tokens"] = work.micro_batch_tokens
    config["rollout"]["max_new_tokens"] = max(work.response_tokens)
    file.write_text(yaml.safe_dump(config))
    return file


def test_measured_figures_stand_beside_the_plans(of_qwen, monkeypatch):
    monkeypatch.setattr(planned, "gpu_here", lambda: (H100, ""))
    config, _ = compose([str(of_qwen)], [])
    plan = make_plan(config, load_model_config(config.model.path), Cluster(H100, 1, 1), Workload(64, 640.0, 1088))
    measured = {"update seconds": 3 * plan.times.update, "update MFU": 1 / 3, "peak GPU bytes": None, "other": 1.0}
    found = planned.compared(of_qwen, QWEN_1_5B.tokens, 3 * QWEN_1_5B.forward_flops, measured, ranks=1)
    figures = found["figures"]
    assert found["gpu"] == "h100-80" and found["reason"] is None
    assert list(figures) == ["update seconds", "update MFU", "peak GPU bytes"]  # a recording has no server
    assert figures["update seconds"]["measured over planned"] == pytest.approx(3)
    # One rank's floor is the stated rate: all of it, but for the mean length in place of the lengths.
    assert figures["update MFU"]["planned"] == pytest.approx(1, rel=0.01)
    assert figures["peak GPU bytes"]["planned"] == sum(plan.stages[0].training.values())
    assert figures["peak GPU bytes"]["measured over planned"] is None
    seconds = plan.times.update
    expected = f"update seconds {seconds:.3g} planned, {3 * seconds:.3g} measured; update MFU 1 planned, 0.333 measured"
    assert plan_line(found) == f"plan for h100-80: {expected}"


def test_a_live_run_has_servers_figures(of_qwen, tmp_path, monkeypatch):
    monkeypatch.setattr(planned, "gpu_here", lambda: (H100, ""))
    config = yaml.safe_load(of_qwen.read_text())
    config["rollout"] = {"max_new_tokens": 1024, "memory_fraction": 0.3}
    config["reward"] = {"functions": ["a:b"]}
    config["parallel"] = {"pp": 2}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    names = ("generate seconds", "generated tokens a second and GPU", "push seconds", "update seconds")
    tokens = planned.Tokens(64, 1024, 1088)
    figures = planned.compared(file, tokens, 1.0, dict.fromkeys(names, 2.0), ranks=16, nodes=2)["figures"]
    assert set(figures) == set(names)
    made = QWEN_1_5B.prompts * QWEN_1_5B.rollouts * 1024
    generate = figures["generate seconds"]["planned"]
    assert figures["generated tokens a second and GPU"]["planned"] == pytest.approx(made / generate / 16)
    weights = 2 * 1_543_714_304  # bytes, of a server of one rank
    assert figures["push seconds"]["planned"] == pytest.approx(weights / H100.nvlink, rel=0.01)
    assert figures["push seconds"]["measured over planned"] == 2 / figures["push seconds"]["planned"]


def test_without_a_known_gpu_there_is_a_reason_in_place_of_figures(of_qwen, monkeypatch):
    given = {"update seconds": 1.5, "peak GPU bytes": 7}
    arguments = of_qwen, QWEN_1_5B.tokens, 1.0, given, 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = planned.compared(*arguments)
    assert found["gpu"] is None and "no GPU" in found["reason"]
    nothing = {"planned": None, "measured over planned": None}
    assert found["figures"] == {name: {"measured": value, **nothing} for name, value in given.items()}
    assert plan_line(found) == f"plan: no expected figures: {planned.NO_GPU}"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    unknown = type("Device", (), {"name": "NVIDIA L40S", "total_memory": 48 << 30})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: unknown)
    reason = planned.compared(*arguments)["reason"]
    assert "h100-80" in reason and "this is NVIDIA L40S of 48 GiB" in reason
