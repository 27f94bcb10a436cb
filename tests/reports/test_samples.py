import dataclasses
import json
import re
import subprocess
import sys

import pytest
import yaml

from dynamo_megatron.config import Config
from dynamo_megatron.config.files import to_plain
from dynamo_megatron.reports.samples import Choice, read_samples
from dynamo_megatron.rollout.store import RolloutStore, step_file
from dynamo_megatron.runtime.line_files import compressed, read_raw_lines
from dynamo_megatron.types import EpisodeRecord, Prompt, Rollout, plain_data

ATTACK = "\x1b]0;owned\x07\x1b[2J\r\u009b31m\u202egnp.exe\u2028\b"


def rollout(step: int, group: int, k: int, reward: float, **fields) -> Rollout:
    name = f"{step:06d}-{group:04d}"
    defaults = {
        "tokens": [20, 21, 30 + group, 40 + k],
        "response_mask": [0, 0, 1, 1],
        "engine_logprobs": [-1.0, -2.0],
        "weight_versions": [(step - 1, 0, 2)],
        "finish_reason": "length",
        "success": reward > 0.5,
        "reward_parts": {"math": reward, "own:brevity": 0.25},
        "prompt": f"<user>What is {group}?",
        "response": f"I say {k}.\nNo more.",
        "answer": str(group),
    }
    ids = (f"{name}-{k:03d}", name, f"problem-{group}", step)
    return Rollout(*ids, reward=reward, **{**defaults, **fields})


@pytest.fixture
def make_run(tmp_path):
    """make_run(*rollouts, model=..., recorded=...): the folder of a run with these rollouts."""

    def make(*rollouts, model="models/gone", recorded=None):
        config = Config(
            model={"path": str(model)},
            data={"source": "x"},
            output_dir="runs/x",
            rollout={"engine": "recorded", "recorded": str(recorded)} if recorded else {},
        )
        folder = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / "config.yaml").write_text(yaml.safe_dump(to_plain(config)))
        for r in rollouts:
            RolloutStore(folder).append(r)
        return folder

    return make


def ids(folder, **choice) -> list[str]:
    return [json.loads(text)["rollout_id"] for text in read_samples(folder, Choice(**choice), as_json=True)]


TWO_STEPS = [rollout(s, g, k, reward=(s + 2 * g + 4 * k) / 10) for s in (1, 2) for g in (1, 0) for k in (0, 1)]


def test_a_rollout_is_readable_by_itself(make_run):
    text = "\n".join(read_samples(make_run(*TWO_STEPS), Choice(step=1, best=1)))
    for part in (
        "step 1, prompt problem-1, rollout 000001-0001-001",
        "reward 0.7 (success) from math 0.7, own:brevity 0.25",
        "finish: length, 2 tokens",
        "prompt:\n  <user>What is 1?",
        "response:\n  I say 1.\n  No more.",
        "answer:\n  1",
        "1 of 4 rollouts of step 1; --help",
    ):
        assert part in text


def test_a_reward_function_without_a_score_is_named_with_its_state(make_run):
    fields = {"reward_parts": {"math": 1.0}, "reward_failures": {"judge": "timed_out"}, "status": "reward_timeout"}
    run = make_run(rollout(1, 0, 0, 0.0, **fields))
    text = "\n".join(read_samples(run, Choice()))
    assert "reward 0 (no success, reward_timeout) from math 1, judge timed_out\n" in text
    line = next(iter(read_samples(run, Choice(), as_json=True)))
    assert json.loads(line)["reward_failures"] == {"judge": "timed_out"}


def test_what_is_chosen(make_run):
    run = make_run(*TWO_STEPS)
    newest = [f"000002-000{g}-00{k}" for g in (0, 1) for k in (0, 1)]
    assert ids(run) == newest and ids(run, limit=3) == newest[:3]
    assert ids(run, step=1, limit=1) == ["000001-0000-000"]
    assert ids(run, best=2) == [newest[3], newest[1]] and ids(run, worst=1) == newest[:1]
    assert ids(run, best=1, worst=4) == [newest[3], newest[0], newest[2], newest[1]]  # none of them twice
    alike = make_run(*(rollout(1, g, k, reward=1.0 - g / 10) for g in (0, 1) for k in (0, 1)))
    assert ids(alike, best=2) == ["000001-0000-000", "000001-0001-000"]  # of different prompts
    assert ids(alike, best=3)[2] == "000001-0000-001" and ids(alike, worst=2) == ids(alike, best=2)[::-1]
    both = ["000001-0001-000", "000001-0001-001", "000002-0001-000", "000002-0001-001"]
    assert ids(run, prompt_id="problem-1") == both and ids(run, prompt_id="problem-1", step=2) == both[2:]


def test_a_run_under_way(make_run):
    """The last line is being written; the newest file has no line yet; a line came twice."""
    run = make_run(*TWO_STEPS, dataclasses.replace(TWO_STEPS[-1], status="rejected"))
    file = step_file(run, 2)
    file.write_bytes(file.read_bytes() + compressed(rollout(2, 3, 0, 1.0).to_json().encode() + b"\n")[:-9])
    step_file(run, 3).write_bytes(compressed(b"{}\n")[:-1])
    shown = [json.loads(t) for t in read_samples(run, Choice(best=9), as_json=True)]
    assert len(shown) == 4 and [s["status"] for s in shown if s["rollout_id"] == TWO_STEPS[-1].rollout_id] == [
        "rejected"
    ]


def test_model_output_cannot_drive_the_terminal(make_run):
    fields = {
        "prompt": ATTACK,
        "response": ATTACK + "\ta\nb é 漢 👩‍👩‍👧",
        "answer": {"x": ATTACK},
        "reward_parts": {"f" + ATTACK: 1.0},
        "reward_failures": {"g" + ATTACK: "timed_out" + ATTACK},
    }
    evil = dataclasses.replace(rollout(1, 0, 0, 1.0, **fields), prompt_id=ATTACK + "\n")
    for as_json in (False, True):
        text = "\n".join(read_samples(make_run(evil), Choice(), as_json=as_json))
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029]", text)
    assert "\n  \\x1b]0;owned" in "\n".join(read_samples(make_run(evil), Choice()))
    assert "\ta\n  b é 漢 👩‍👩‍👧" in "\n".join(read_samples(make_run(evil), Choice()))


def without_texts(r: Rollout) -> Rollout:
    return dataclasses.replace(r, prompt=None, response=None, answer=None)


def test_a_run_from_before_texts_were_stored_is_decoded(make_run, tiny_model):
    old = make_run(*map(without_texts, TWO_STEPS[:1]), model=tiny_model)
    file = step_file(old, 1)
    (line,) = read_raw_lines(file)
    fields = {k: v for k, v in json.loads(line).items() if k not in ("prompt", "response", "answer")}
    file.unlink()
    file.with_suffix("").write_text(json.dumps(fields) + "\n")  # nor were they compressed
    (shown,) = (json.loads(text) for text in read_samples(old, Choice(), as_json=True))
    assert len(shown["prompt"]) == len(shown["response"]) == 2  # a token a character
    gone = make_run(*map(without_texts, TWO_STEPS[:1]))
    with pytest.raises(
        ValueError, match=r"stored token ids without texts.*models/gone has no tokenizer.*run this where"
    ):
        list(read_samples(gone, Choice()))


def test_a_replay_of_recorded_rollouts_shows_those(make_run):
    assert len(ids(make_run(recorded=make_run(*TWO_STEPS)))) == 4


def test_what_is_not_there_is_named(make_run, tmp_path):
    run = make_run(*TWO_STEPS)
    for choice, message in (
        ({"step": 7}, "--step: .* has no rollouts of step 7, only of 1 to 2"),
        ({"prompt_id": "x"}, "--prompt: no rollout of 'x' there; there are those of 'problem-1', 'problem-0'"),
    ):
        with pytest.raises(ValueError, match=message):
            list(read_samples(run, Choice(**choice)))
    with pytest.raises(ValueError, match="has generated nothing yet"):
        list(read_samples(make_run(), Choice()))
    with pytest.raises(ValueError, match="no run's folder"):
        list(read_samples(tmp_path, Choice()))
    step_file(run, 2).write_bytes(compressed(b"{}\n"))
    with pytest.raises(ValueError, match=r"step-000002\.jsonl\.zst:1: not a rollout"):
        list(read_samples(run, Choice()))


@pytest.mark.parametrize(
    "field",
    [
        {"reward": "1"},
        {"reward_parts": [1]},
        {"reward_failures": {"f": 1}},
        {"prompt_id": 5},
        {"tokens": 5},
        {"prompt": ["x"]},
        {"status": {}},
    ],
)
def test_a_field_of_another_type_is_named_with_its_place(make_run, field):
    run = make_run(rollout(1, 0, 0, 0.5), dataclasses.replace(rollout(1, 0, 1, 0.5), **field))
    with pytest.raises(ValueError, match=rf"step-000001\.jsonl\.zst:2: {next(iter(field))} .* of another type"):
        list(read_samples(run, Choice(best=1)))


def test_the_command_in_a_pipe_that_closes_and_a_terminal_without_unicode(make_run):
    run = make_run(*[rollout(1, g, k, 0.1, response="é 漢\n" * 2000) for g in range(8) for k in range(8)])
    command = [sys.executable, "-P", "-m", "dynamo_megatron.cli", "samples", run, "--limit", "64"]
    environment = {"PYTHONIOENCODING": "ascii", "PATH": "/usr/bin:/bin"}
    pipe = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    pipe.stdout.readline()
    pipe.stdout.close()
    assert (pipe.wait(60), pipe.stderr.read()) == (0, b"")
    pipe.stderr.close()
    whole = subprocess.run(command, capture_output=True, env=environment, timeout=60)
    assert whole.returncode == 0 and whole.stdout.count(b"\\xe9 \\u6f22") == 64 * 2000
    missing = subprocess.run([*command, "--step", "5"], capture_output=True, text=True, timeout=60)
    assert missing.returncode == 2 and missing.stderr.count("\n") == 1 and "no rollouts of step 5" in missing.stderr


def test_answers_become_plain_data():
    answers = {"a": ("x", 1.5, None), "b": "half \ud800 a pair", "c": {3}, 4: Prompt}
    plain = plain_data(answers)
    assert plain["a"] == ["x", 1.5, None] and plain["b"] == "half ? a pair" and plain["c"] == "{3}"
    Rollout.from_json(dataclasses.replace(TWO_STEPS[0], answer=plain).to_json())


def test_an_episode_is_shown_as_a_conversation(make_run):
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "1+1?" + ATTACK},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "It is\n2."},
    ]
    episode = EpisodeRecord([0], {"turns": 2, "segments": 1}, messages)
    folder = make_run(rollout(1, 0, 0, 1.0, episode=episode))
    text = "\n".join(read_samples(folder, Choice()))
    for part in (
        "episode: turns 2, segments 1; its last conversation:",
        'assistant:\n  {"name": "add", "arguments": {"a": 1}}\ntool:\n  2',
        "assistant:\n  It is\n  2.",
    ):
        assert part in text, part
    assert "\x1b" not in text and "response:" not in text
    (line,) = read_samples(folder, Choice(), as_json=True)
    shown, call["function"]["arguments"] = json.loads(line), '{"a": 1}'
    assert shown["messages"] == messages and shown["counts"]["turns"] == 2 and shown["reason"] == ""


def test_a_failed_episode_is_shown_with_its_reason(make_run):
    episode = EpisodeRecord([0], {"turns": 0}, reason="the agent failed: KeyError" + ATTACK)
    folder = make_run(rollout(1, 0, 0, 0.0, status="failed", episode=episode))
    text = "\n".join(read_samples(folder, Choice()))
    assert "failed: the agent failed: KeyError" in text and "\x1b" not in text
    (line,) = read_samples(folder, Choice(), as_json=True)
    assert json.loads(line)["reason"] == episode.reason


def test_an_episode_from_before_reasons_were_stored_is_read():
    old = json.loads(rollout(1, 0, 0, 1.0, episode=EpisodeRecord([0], {"turns": 1})).to_json())
    del old["episode"]["reason"]
    assert Rollout.from_json(json.dumps(old)).episode.reason == ""
