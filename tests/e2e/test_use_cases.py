"""The presets of configs/use_cases: their problems, and a step of each, in a folder that has nothing of the checkout,
with a real SGLang server as the judge."""

import json
import shutil

import pytest
from background_run import step_lines

from dynamo_megatron.config.files import compose
from dynamo_megatron.data.sources import load_prompts
from dynamo_megatron.reward.functions import load_function
from dynamo_megatron.rollout.store import read_rollouts, step_file

NAMES = ("dialogue", "code", "summaries", "questions", "json")
SERVED = ("judge",)
NEEDED = ["model.path=unused", "reward.judge={url: 'http://unused', model: unused}"]


@pytest.mark.parametrize("name", NAMES)
def test_it_has_twenty_problems_whose_solutions_get_the_full_reward(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config, _ = compose([f"use_cases/{name}"], NEEDED)
    prompts = load_prompts(config.data, needs_answer=True)
    assert len(prompts) == 20
    functions = {f: load_function(f, config.reward) for f in config.reward.functions if f not in SERVED}
    if "code" in functions and shutil.which("bwrap") is None:
        pytest.skip("needs bubblewrap")
    assert functions or name == "dialogue"
    for prompt in prompts:
        assert prompt.meta["solution"].strip()
        values = {f: function(prompt, prompt.meta["solution"]) for f, function in functions.items()}
        assert set(values.values()) <= {1.0}, (prompt.prompt_id, values)
        empty = [function(prompt, "I do not know.") for f, function in functions.items() if f != "length"]
        assert not empty or sum(empty) < len(empty)


@pytest.mark.parametrize(
    ("problem", "response"),
    [
        ("json-2", [{"drink": drink, "size": "large", "count": 2} for drink in ("latte", "oat latte")]),
        ("json-9", {"day": "Friday", "tasks": ["water the plants", "water the plants"]}),
        ("json-9", {"day": "Friday", "tasks": ["water the plants and call Tom", "water the plants"]}),
        ("json-12", [{"name": name, "amount": 500, "unit": "g"} for name in ("carrot", "carrots", "Carrots")]),
    ],
)
def test_a_list_must_have_every_item(problem, response):
    config, _ = compose(["use_cases/json"], NEEDED)
    (prompt,) = (each for each in load_prompts(config.data, needs_answer=True) if each.prompt_id == problem)
    assert load_function("json_schema", config.reward)(prompt, json.dumps(response)) == 0.0


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_a_step(name, tiny_model, sglang_server, command_line, tmp_path, monkeypatch):
    if name == "code" and shutil.which("bwrap") is None:
        pytest.skip("needs bubblewrap")
    monkeypatch.setenv("JUDGE_KEY", sglang_server.endpoint.api_key)
    judge = {
        "url": f"{sglang_server.endpoint.url}/v1",
        "model": "shared",
        "api_key_env": "JUDGE_KEY",
        "request": {"temperature": 1.0, "max_tokens": 16, "regex": "Score: [0-9]"},
    }
    code, text = command_line(
        tmp_path,
        "train",
        f"use_cases/{name}",
        *(f"model.path={tiny_model}", "model.dtype=float32", "data.batch_prompts=2", "rollout.max_new_tokens=32"),
        *("trainer.steps=1", "algorithm.allocation.budget=8", "checkpoint.export_hf=never", "optimizer.lr=1.0e-3"),
        f"reward.judge={json.dumps(judge)}",
    )
    assert code == 0, text[-3000:]
    config, _ = compose([f"use_cases/{name}"], NEEDED)
    (row,), functions = step_lines(tmp_path / config.output_dir), config.reward.functions
    assert [row[f"reward/{f}/scored"] for f in functions] == [1.0] * len(functions), row
    rollouts = read_rollouts(step_file(tmp_path / config.output_dir, 1))
    assert len(rollouts) == 8 and all(set(r.reward_parts) == set(functions) for r in rollouts)
    if "judge" in functions:
        assert len({r.reward_parts["judge"] for r in rollouts}) > 1 and row["policy/grad_norm"] > 0
