"""Whole runs of `dynamo-megatron train` on two ranks, as a user starts them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from background_run import Run, json_lines, made_rollout
from transformers import AutoModelForCausalLM

from dynamo_megatron.data.templates import load_tokenizer
from dynamo_megatron.rollout.store import RolloutStore, step_file
from dynamo_megatron.runtime.line_files import read_raw_lines
from dynamo_megatron.types import Rollout

LOSE_STEP, KILL_STEP = 3, 5
ANSWERS = "aei 7"
REPLAYED_STEPS, REPLAYED_GROUP, REPLAYED_RESPONSE = 2, 16, 12  # tokens


def metrics(output: Path) -> list[dict]:
    return json_lines(output / "metrics.jsonl")


def rollout_lines(output: Path, step: int) -> list[str]:
    file = step_file(output, step)
    return [line.decode() for line in read_raw_lines(file)] if file.is_file() else []


@pytest.fixture(scope="session")
def steps() -> int:
    """Of the run in `live`."""
    return 20


@pytest.fixture(scope="session")
def workspace(tiny_model, tmp_path_factory, steps) -> Path:
    """Model, problems, reward function and config of a small run: does the response contain the answer?"""
    folder = tmp_path_factory.mktemp("e2e")
    rows = [{"id": f"problem-{i}", "problem": f"Write {a!r}.", "answer": a} for i, a in enumerate(ANSWERS)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "own_reward.py").write_text(
        "import os, time\n"
        "def contains(prompt, response):\n"
        "    if os.path.exists('fail-now'):\n"
        "        raise KeyError('the reward table has no such entry')\n"
        "    time.sleep(0.02)\n"
        "    return float(prompt.answer in response)\n"
    )
    config = {
        "model": {"path": str(tiny_model), "dtype": "float32", "max_length": 256},
        "data": {"source": str(folder / "problems.jsonl"), "batch_prompts": 3, "template": "{prompt}\n"},
        "parallel": {"pp": 2},
        "rollout": {"max_new_tokens": 16, "start_timeout": 400},
        "reward": {"functions": ["own_reward:contains"], "workers": 1},
        "algorithm": {"allocation": {"budget": 24, "rollout_n_min": 2, "rollout_n_max": 15, "variance_floor": 0.0}},
        "optimizer": {"lr": 3e-3, "warmup_steps": 0},
        "trainer": {"steps": steps, "micro_batch_tokens": 256},
        "checkpoint": {"every": 4},
        "output_dir": "unset",
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.fixture(scope="session")
def live(workspace) -> tuple[Path, dict]:
    """A live run with two servers: (output folder, what was seen of it).

    One server is killed while it generates. The run is, too, at 90 % of a step's rollouts, and started again.
    """
    output = workspace / "live"
    command = (workspace / "config.yaml", f"output_dir={output}", "rollout.servers=2")
    first = run = Run(workspace, *command)
    run.wait_until(lambda: len(rollout_lines(output, LOSE_STEP)) >= 2, f"rollouts of step {LOSE_STEP}")
    importing = run.importing("libtorch")
    run.kill_server("server-1")
    run.wait_until(lambda: "server-1 left the rotation" in run.text, "word of the server that was killed")
    run.wait_until(lambda: len(rollout_lines(output, KILL_STEP)) >= 22, f"90 % of the rollouts of step {KILL_STEP}")
    run.kill()
    left, finished = run.left_behind(), rollout_lines(output, KILL_STEP)[:22]
    run = Run(workspace, *command)
    assert run.wait() == 0, run.text[-3000:]
    return output, {"torch": importing, "left": left, "finished": finished, "said": first.text, "ended": run.text}


@pytest.fixture(scope="session")
def start_run():
    """Run(folder, *arguments), ended with the session if the test did not."""
    started = []

    def start(*arguments, **options) -> Run:
        started.append(Run(*arguments, **options))
        return started[-1]

    yield start
    for run in started:
        if run.process.poll() is None:
            run.kill()


@pytest.fixture(scope="session")
def step_lines():
    return metrics


@pytest.fixture(scope="session")
def problems_on_disk():
    """problems_on_disk(output, steps): a line for each step where not every rollout that was allocated is on disk once,
    or where what was not trained is not what the metrics count."""

    def check(output: Path, steps) -> list[str]:
        allocated, rows, found = Counter(), {row["step"]: row for row in metrics(output)}, []
        for line in (output / "allocation.jsonl").read_text().splitlines():
            allocated[json.loads(line)["step"]] += json.loads(line)["n"]
        for step in steps:
            rollouts = list(RolloutStore(output).lines(step))
            final = {r.rollout_id: r.status for r in rollouts}
            twice = max(Counter(r.rollout_id for r in rollouts if r.status != "rejected").values(), default=0) > 1
            lost = sum(status in ("aborted", "failed", "rejected") for status in final.values())
            shares = sum(rows[step][f"rollout/{kind}"] for kind in ("aborted", "failed", "rejected"))
            if len(final) != allocated[step] or twice or lost != round(shares * allocated[step]):
                found.append(f"step {step}: {len(final)} of {allocated[step]} rollouts, {lost} lost, twice: {twice}")
        return found

    return check


@pytest.fixture(scope="session")
def made_rollouts(workspace, tiny_model) -> list[Rollout]:
    """Random responses with the logprobs that the untrained model gives them: the policy's own, to rounding."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model), load_tokenizer(tiny_model)
    rng, made = np.random.default_rng(0), []
    problems = json_lines(workspace / "problems.jsonl")
    for step in range(1, REPLAYED_STEPS + 1):
        for i, problem in enumerate([*problems, *problems]):  # an epoch that ends in the step draws some twice
            prompt = tokenizer.encode(problem["problem"] + "\n")
            responses = rng.integers(5, 100, (REPLAYED_GROUP, REPLAYED_RESPONSE))
            tokens = torch.tensor([prompt + r.tolist() for r in responses])
            with torch.no_grad():
                logprobs = model(tokens).logits.log_softmax(-1)[:, len(prompt) - 1 : -1]
            chosen = logprobs.gather(2, tokens[:, len(prompt) :, None])[..., 0]
            for k in range(REPLAYED_GROUP):
                right = bool(rng.random() < 0.5)
                others = {"engine_logprobs": chosen[k].tolist(), "right": right, "server": f"server-{k % 2}"}
                response = responses[k].tolist()
                made.append(made_rollout(step, 1000 + i, k, problem["id"], prompt, response, **others))
    return made


@pytest.fixture(scope="session")
def replay(workspace, command_line, made_rollouts):
    """replay(name, change, *keys) -> (exit code, output, folder) of a run on the rollouts that `change` has made."""

    def run(name: str, change, *keys: str) -> tuple[int, str, Path]:
        record, output = workspace / f"{name}-record", workspace / name
        store = RolloutStore(record)
        for rollout in made_rollouts:
            store.append(change(rollout))
        store.close()
        keys = (f"trainer.steps={REPLAYED_STEPS}", "optimizer.lr=1e-4", "rollout.engine=recorded", *keys)
        code, text = command_line(
            workspace, "train", workspace / "config.yaml", *keys, f"rollout.recorded={record}", f"output_dir={output}"
        )
        return code, text, output

    return run
