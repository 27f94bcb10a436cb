"""A run with a real SGLang server: agreement, versions, rewards, and what a kill leaves."""

import pytest
from background_run import LIVE_STEPS, json_lines, step_lines

from dynamo_megatron.data.templates import load_tokenizer
from dynamo_megatron.rollout.store import read_lines, step_file

pytestmark = pytest.mark.full


def test_policy_and_engine_agree_at_every_step(live):
    rows = step_lines(live[0])
    print("largest gap", max(row["rollout/logprob_gap_max"] for row in rows))
    assert [row["step"] for row in rows] == list(range(1, LIVE_STEPS + 1))
    assert any(row["policy/grad_norm"] > 0 for row in rows[:5]), "no update: the weights of all syncs were the same"
    for row in rows:
        assert row["rollout/logprob_gap_max"] <= 1e-4
        assert row["rollout/weight_version_min"] == row["rollout/weight_version_max"] == row["step"] - 1


def test_a_server_killed_while_it_generates_loses_no_rollout(live):
    output, seen = live
    assert "server-1 left the rotation: " in seen["said"]
    for row in step_lines(output):
        assert row["rollout/failed"] == row["rollout/aborted"] == row["rollout/rejected"] == 0, row
        names = [r.rollout_id for r in read_lines(step_file(output, row["step"]))]
        assert len(names) == len(set(names)) == 24


def test_a_kill_regenerates_no_finished_rollout(live):
    output, seen = live
    assert seen["left"] == []
    assert len(seen["finished"]) == 22 and set(seen["finished"]) <= set(seen["now"])
    assert step_lines(output)[seen["step"] - 1]["rollout/reused"] >= 22 / 24


def test_every_rollout_is_scored_against_its_own_answer(live, workspace, tiny_model):
    answers = {row["id"]: row["answer"] for row in json_lines(workspace / "problems.jsonl")}
    tokenizer = load_tokenizer(tiny_model)
    for step in range(1, LIVE_STEPS + 1):
        for r in read_lines(step_file(live[0], step)):
            response = tokenizer.decode(r.response_tokens, skip_special_tokens=True)
            assert r.reward == float(answers[r.prompt_id] in response), r.rollout_id
