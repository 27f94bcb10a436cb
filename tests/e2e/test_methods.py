"""Methods of configs/methods/ train the demo's model from one warm start and one recording."""

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from background_run import json_lines, made_rollout

from dynamo_megatron.data.templates import load_tokenizer
from dynamo_megatron.rollout.store import RolloutStore

ROOT = Path(__file__).parents[2]
METHODS = ("dynamo", "dapo", "spo", "pilot", "reinforce_ada")  # each loops in its own way; tests/policy has them all
STEPS, PROMPTS, GROUP = 3, 120, 24  # so many that dynamic sampling draws none of them twice
SEQUENTIAL = {"pilot": ("algorithm.sequential.round_n=4", "algorithm.allocation.rollout_n_max=12"), "reinforce_ada": ()}
ROUNDS = 4, 8  # groups of a problem, and rollouts of each, for these


def record(folder: Path, model: Path, problems: list[dict], groups: int, size: int) -> None:
    """Groups for every problem in every step: a third always right, a third never, the others by turns."""
    tokenizer, generator, places = load_tokenizer(model), np.random.default_rng(0), itertools.count(1000)
    store = RolloutStore(folder)
    for step in range(1, STEPS + 1):
        for i, problem in [*enumerate(problems)] * groups:
            place, prompt = next(places), tokenizer.encode(problem["problem"])
            for k in range(size):
                right = i % 4 == 0 or bool(i % 2 and generator.random() < 0.5)
                text = problem["answer"] if right else str(generator.integers(200, 1000))
                response = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
                others = {"engine_logprobs": [-1.0] * len(response), "finish_reason": "stop", "right": right}
                others["reward_parts"] = {"math": float(right)}
                store.append(made_rollout(step, place, k, problem["id"], prompt, response, **others))
    store.close()


@pytest.fixture(scope="module")
def warm(tmp_path_factory, command_line) -> Path:
    folder = tmp_path_factory.mktemp("methods")
    task = folder / "task"
    subprocess.run([sys.executable, "-P", ROOT / "tools" / "demo_task.py", task], check=True, capture_output=True)
    start = (ROOT / "configs" / "demo" / "warmup.yaml", f"model.path={task}/model", f"data.source={task}/warmup.jsonl")
    short = ("trainer.steps=20", "optimizer.warmup_steps=0", f"output_dir={folder}/warmup", "--ranks", "2")
    code, text = command_line(folder, "sft", *start, *short)
    assert code == 0, text[-3000:]
    problems = [{"id": f"p{i}", **row} for i, row in enumerate(json_lines(task / "pool.jsonl")[:PROMPTS])]
    (folder / "problems.jsonl").write_text("".join(json.dumps(p) + "\n" for p in problems))
    record(folder / "recording", folder / "warmup" / "hf", problems, 1, GROUP)
    record(folder / "rounds", folder / "warmup" / "hf", problems, *ROUNDS)
    return folder


def train(warm: Path, command_line, method: str, output: Path, *more: str) -> list[dict]:
    """The metrics of a run of `method` from the warm start and the recording."""
    recording = "rounds" if method in SEQUENTIAL else "recording"
    keys = (
        f"model.path={warm}/warmup/hf",
        f"data.source={warm}/problems.jsonl",
        "data.batch_prompts=8",
        "algorithm.allocation.budget=64",
        "algorithm.loss.mini_batches=2",
        "rollout.engine=recorded",
        f"rollout.recorded={warm}/{recording}",
        "rollout.proof.max_mean_gap=null",  # the recording's engine logprobs are made up
        f"trainer.steps={STEPS}",
        "eval.every=null",
        "checkpoint.export_hf=never",
        f"output_dir={output}",
        *SEQUENTIAL.get(method, ()),
        *more,
    )
    configs = (ROOT / "configs" / "demo" / "rl.yaml", ROOT / "configs" / "methods" / f"{method}.yaml")
    code, text = command_line(warm, "train", *configs, *keys)
    assert code == 0, text[-3000:]
    return json_lines(output / "metrics.jsonl")


@pytest.mark.full
@pytest.mark.parametrize("method", METHODS)
def test_it_trains(warm, command_line, method):
    rows = train(warm, command_line, method, warm / method)
    assert [row["step"] for row in rows] == [1, 2, 3]
    first = 1 if method == "spo" else 0  # of a single rollout in the first step nothing is known to compare it with
    assert all((row["policy/grad_norm"] > 0) == (i >= first) for i, row in enumerate(rows))
    assert all(math.isfinite(value) for row in rows for value in row.values())
    if method == "dapo":
        assert all(row["rollout/refill_rounds"] > 0 for row in rows)
    if method in SEQUENTIAL:
        assert all(row["sequential/rounds"] > 1 and row["sequential/trained_share"] < 1 for row in rows)
