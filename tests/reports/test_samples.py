import dataclasses
import itertools
import json
import re

import pytest
from background_run import new_rollout

from dynamo_megatron.reports.samples import read_pairs, read_samples
from dynamo_megatron.rollout.store import RolloutStore, step_file
from dynamo_megatron.runtime.line_files import compressed
from dynamo_megatron.types import EpisodeRecord

ATTACK = "\x1b]0;owned\x07\x1b[2J\r\u009b31m\u202egnp.exe\u2028\b"


@pytest.fixture
def make_run(folders):
    """make_run(*rollouts, **rollout section): the folder of a run with these rollouts."""
    numbers = itertools.count()

    def make(*rollouts, **section):
        folder = folders.run(f"run{next(numbers)}", rollout=section)
        for r in rollouts:
            RolloutStore(folder).append(r)
        return folder

    return make


@pytest.fixture
def two_steps():
    return [new_rollout(s, g, k, reward=(s + 2 * g + 4 * k) / 10) for s in (1, 2) for g in (1, 0) for k in (0, 1)]


def ids(folder, **choice) -> list[str]:
    return [json.loads(text)["rollout_id"] for text in read_samples(folder, **choice, as_json=True)]


def test_a_rollout_is_readable_by_itself(make_run, two_steps):
    text = "\n".join(read_samples(make_run(*two_steps), step=1, best=1))
    for part in (
        "step 1, prompt p1, rollout 000001-0001-001",
        "reward 0.7 (success) from math 0.7\n",
        "finish: stop, 2 tokens",
        "prompt:\n  What is 1?",
        "response:\n  I say 1.\n  No more.",
        "answer:\n  1",
        "1 of 4 rollouts of step 1; --help",
    ):
        assert part in text


def test_what_is_chosen(make_run, two_steps):
    run = make_run(*two_steps)
    newest = [f"000002-000{g}-00{k}" for g in (0, 1) for k in (0, 1)]
    assert ids(run) == newest and ids(run, limit=3) == newest[:3]
    many = make_run(*(new_rollout(3, 0, k) for k in range(9)))
    assert [len([*read_samples(many, as_json=as_json)]) for as_json in (True, False)] == [9, 8 + 1]
    assert ids(run, step=1, limit=1) == ["000001-0000-000"]
    assert ids(run, best=2) == [newest[3], newest[1]] and ids(run, worst=1) == newest[:1]
    late = make_run(new_rollout(3, 0, 0, reward=0.0, status="reward_timeout"), new_rollout(3, 0, 1, reward=-1.0))
    assert ids(late, best=2) == ["000003-0000-001"]
    assert ids(run, best=1, worst=4) == [newest[3], newest[0], newest[2], newest[1]]  # none of them twice
    both = ["000001-0001-000", "000001-0001-001", "000002-0001-000", "000002-0001-001"]
    assert ids(run, prompt_id="p1") == both and ids(run, prompt_id="p1", step=2) == both[2:]
    assert len(ids(make_run(engine="recorded", recorded=str(run)))) == 4


def test_the_pairs_of_a_run_are_the_best_and_the_worst_of_each_group(make_run, two_steps):
    alike = [new_rollout(3, 0, k, reward=1.0) for k in (0, 1)]
    lost = [new_rollout(3, 1, k, reward=float(k), status="rejected") for k in (0, 1)]
    cut = [new_rollout(3, 2, k, reward=float(k), finish_reason="length" if k else "stop") for k in (0, 1)]
    texts = [dataclasses.replace(r, response=f"r{r.reward:g}") for r in (*two_steps, *alike, *lost, *cut)]
    pairs = [json.loads(line) for line in read_pairs(make_run(*texts))]
    assert [p["id"] for p in pairs] == ["000001-0001", "000001-0000", "000002-0001", "000002-0000"]
    assert (pairs[0]["chosen"], pairs[0]["rejected"], pairs[0]["prompt"]) == ("r0.7", "r0.3", two_steps[0].prompt)


def test_a_run_under_way(make_run, two_steps):
    """The last line is being written; the newest file has no line yet; a line came twice."""
    run = make_run(*two_steps, dataclasses.replace(two_steps[-1], status="rejected"))
    file = step_file(run, 2)
    file.write_bytes(file.read_bytes() + compressed(new_rollout(2, 3, 0, 1.0).to_json().encode() + b"\n")[:-9])
    step_file(run, 3).write_bytes(compressed(b"{}\n")[:-1])
    shown = [json.loads(t) for t in read_samples(run, limit=9, as_json=True)]
    assert len(shown) == 4
    assert [s["status"] for s in shown if s["rollout_id"] == two_steps[-1].rollout_id] == ["rejected"]


def test_model_output_cannot_drive_the_terminal(make_run):
    fields = {
        "prompt": ATTACK,
        "response": ATTACK + "\ta\nb é 漢 👩‍👩‍👧",
        "answer": {"x": ATTACK},
        "reward_parts": {"f" + ATTACK: 1.0},
        "reward_failures": {"g" + ATTACK: "timed_out" + ATTACK},
    }
    messages = [{"role": ATTACK, "content": ATTACK}]
    episode = EpisodeRecord([0], {ATTACK: 1}, messages, reason="the agent failed" + ATTACK)
    run = make_run(
        new_rollout(1, 0, 0, 1.0, prompt_id=ATTACK + "\n", **fields), new_rollout(1, 1, 0, episode=episode, **fields)
    )
    for as_json in (False, True):
        text = "\n".join(read_samples(run, as_json=as_json))
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029]", text)
    text = "\n".join(read_samples(run))
    assert "\n  \\x1b]0;owned" in text and "\ta\n  b é 漢 👩‍👩‍👧" in text


def test_what_is_not_there_is_named(make_run, two_steps, tmp_path):
    run = make_run(*two_steps)
    with pytest.raises(ValueError, match=r"--step: .* has no rollouts of step 7, only of 1 to 2"):
        list(read_samples(run, step=7))
    with pytest.raises(ValueError, match="has generated nothing yet"):
        list(read_samples(make_run()))
    with pytest.raises(ValueError, match="no run's folder"):
        list(read_samples(tmp_path))


def test_an_episode_is_shown_as_a_conversation(make_run):
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "It is\n2."},
    ]
    episode = EpisodeRecord([0], {"turns": 2, "segments": 1}, messages, reason="the agent failed")
    folder = make_run(new_rollout(1, 0, 0, 1.0, episode=episode))
    text = "\n".join(read_samples(folder))
    assert "failed: the agent failed\nepisode: turns 2, segments 1; its last conversation:" in text
    assert 'assistant:\n  {"name": "add", "arguments": {"a": 1}}\ntool:\n  2' in text
    shown = json.loads(next(iter(read_samples(folder, as_json=True))))
    call["function"]["arguments"] = '{"a": 1}'
    assert shown["messages"] == messages and shown["counts"]["turns"] == 2 and shown["reason"] == "the agent failed"
