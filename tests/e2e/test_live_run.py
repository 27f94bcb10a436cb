"""A run with a real SGLang server: agreement, versions, groups, and what a kill leaves."""

import json
import re

import pytest
from background_run import json_lines

from dynamo_megatron.data.templates import load_tokenizer
from dynamo_megatron.rollout.store import read_lines, step_file
from dynamo_megatron.runtime.line_files import read_raw_lines

pytestmark = pytest.mark.full


def test_policy_and_engine_agree_at_every_step(live, steps):
    output, _ = live
    rows = json_lines(output / "metrics.jsonl")
    print("largest gap", max(row["rollout/logprob_gap_max"] for row in rows))
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert max(row["rollout/logprob_gap_max"] for row in rows) <= 1e-4
    assert any(row["policy/grad_norm"] > 0 for row in rows[:5]), "no update: the weights of all syncs were the same"
    for row in rows:
        assert row["rollout/weight_version_min"] == row["rollout/weight_version_max"] == row["step"] - 1


def test_a_log_file_has_the_phases_of_the_start_a_legend_and_what_comes_next(live, steps):
    output, seen = live
    phases = [
        "loading tokenizer",
        "loading data 5 problems",
        "loading packages",
        "joining ranks",
        "starting server",
        "loading model",
        "weight sync",
    ]
    found = re.findall(r"^([a-z0-9 ]+): [0-9.]+ s$", seen["said"], re.MULTILINE)
    assert found == phases
    assert seen["said"].index("\nlegend: reward: ") < seen["said"].index("\nstep  1/" if steps > 9 else "\nstep 1/")
    assert seen["ended"].splitlines()[-1] == f"model: {output}/hf (step {steps})"


def test_a_server_killed_while_it_generates_loses_no_rollout(live, steps):
    output, seen = live
    assert "server-1 left the rotation: " in seen["said"]
    for row in json_lines(output / "metrics.jsonl"):
        assert row["rollout/failed"] == row["rollout/aborted"] == row["rollout/rejected"] == 0, row
        names = [r.rollout_id for r in read_lines(step_file(output, row["step"]))]
        assert len(names) == len(set(names)) == 24


def test_only_ranks_and_servers_import_torch(live):
    """It is 0.2 GB in each process."""
    _, seen = live
    for part, imports in {
        "launcher.local": False,  # waits for the ranks
        "multiprocessing.spawn": False,  # the rollout process
        "reward.worker": False,
        "runtime.guard": False,
        "megatron.cli": True,  # a rank
    }.items():
        found = [torch for command, torch in seen["torch"].items() if part in command]
        assert found and set(found) == {imports}, (part, seen["torch"])


def test_a_kill_regenerates_no_finished_rollout(live):
    output, seen = live
    assert seen["left"] == []
    step = json.loads(seen["finished"][0])["step"]
    now = [line.decode() for line in read_raw_lines(step_file(output, step))]
    assert len(seen["finished"]) == 22 and set(seen["finished"]) <= set(now)
    reused = next(row["rollout/reused"] for row in json_lines(output / "metrics.jsonl") if row["step"] == step)
    assert reused >= 22 / 24


def wrongly_scored(output, answers: dict[str, str], tokenizer, steps) -> list[str]:
    """Rollouts whose reward is not that of their own prompt's answer."""
    wrong = []
    for step in steps:
        for r in read_lines(step_file(output, step)):
            response = tokenizer.decode(r.tokens[r.response_mask.index(1) :], skip_special_tokens=True)
            if r.reward != float(answers[r.prompt_id] in response):
                wrong.append(r.rollout_id)
    return wrong


def test_every_rollout_is_scored_against_its_own_answer(live, workspace, tiny_model, steps):
    output, _ = live
    answers = {row["id"]: row["answer"] for row in json_lines(workspace / "problems.jsonl")}
    tokenizer = load_tokenizer(tiny_model)
    assert wrongly_scored(output, answers, tokenizer, range(1, steps + 1)) == []


def test_groups_have_unequal_sizes_and_a_prompt_may_come_twice(live):
    output, _ = live
    by_step = {}
    for row in json_lines(output / "allocation.jsonl"):
        by_step.setdefault(row["step"], []).append(row)
    assert all(sum(row["n"] for row in rows) == 24 for rows in by_step.values())
    assert all(2 <= row["n"] <= 15 for rows in by_step.values() for row in rows)
    assert any(len({row["n"] for row in rows}) > 1 for rows in by_step.values())
    assert any(len({row["prompt_id"] for row in rows}) < 3 for rows in by_step.values())
