"""Recorded rollouts repeat a run bit for bit, killed or not."""

import json
from pathlib import Path

import pytest
from background_run import HOLDS, LIVE_STEPS, json_lines, runs_first, same_weights, step_lines, timeless

from dynamo_megatron.checkpoint.folder import read_state
from dynamo_megatron.replay.recording import read_run
from dynamo_megatron.replay.what_if import allocator_of, first_difference, replay

pytestmark = pytest.mark.full
KILL_AFTER = 5  # steps, of more


def outcome(output: Path, export: Path | None = None) -> tuple[dict, Path, dict]:
    """(the last metrics line but for times, the folder of the final weights, rank 0's state of the last checkpoint)."""
    last = sorted((output / "checkpoints").glob("step-*"))[-1]
    return timeless(step_lines(output)[-1]), export or output / "hf", read_state(last)


@pytest.fixture(scope="module")
def recorded(live, workspace):
    def command(name: str) -> tuple:
        source = [f"rollout.recorded={live[0]}", "rollout.engine=recorded"]
        return (workspace / "config.yaml", *source, f"output_dir={workspace / name}")

    return command


@pytest.fixture(scope="module")
def straight(recorded, workspace, start_run):
    run = start_run(workspace, *recorded("straight"))
    assert run.wait() == 0, run.text[-3000:]
    return outcome(workspace / "straight")


def same(a, b) -> None:
    assert a[0] == b[0] and same_weights(a[1], b[1]) and a[2] == b[2]


def test_killed_and_resumed_equals_the_straight_run(recorded, straight, workspace, start_run, tmp_path):
    """The straight run saves while the training waits, this one in the background, and more often: the save before the
    last one is complete when the run is killed."""
    output = workspace / "killed"
    command = (*recorded("killed"), "checkpoint.async=true", "checkpoint.every=2")
    (workspace / "hold").write_text(str(KILL_AFTER))
    run = start_run(workspace, *command, environment=runs_first(tmp_path, HOLDS))
    run.wait_until(lambda: len(step_lines(output)) >= KILL_AFTER, f"{KILL_AFTER} steps")
    run.kill()
    assert run.left_behind() == []
    (workspace / "hold").unlink()
    again = start_run(workspace, *command)
    assert again.wait() == 0, again.text[-3000:]
    assert "resumed from" in again.text
    assert [row["step"] for row in step_lines(output)] == list(range(1, LIVE_STEPS + 1))
    same(outcome(output), straight)
    record = read_run(output)
    assert len(record.steps) == LIVE_STEPS
    assert first_difference(record.steps, replay(record.steps, allocator_of(record))) is None


def test_the_live_run_equals_its_replay(live, straight):
    servers = ("fleet/", "weight_sync/", "rollout/reused")  # a replay has none
    (metrics, *rest), (again, *others) = outcome(live[0]), straight
    metrics, again = ({k: v for k, v in m.items() if not k.startswith(servers)} for m in (metrics, again))
    same((metrics, *rest), (again, *others))


@pytest.fixture(scope="module")
def evaluated(recorded, workspace, start_run):
    """The recorded run again, with a server that evaluates every 4 steps."""
    problems = [{"id": f"held-out-{a}", "problem": f"Say {a!r}.", "answer": a} for a in "bdo 3"]
    (workspace / "held-out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    asked = ["eval.data=held-out.jsonl", "eval.every=4", "eval.samples=6", "eval.k=[1,2,6]"]
    asked += ["checkpoint.export_hf=best", "checkpoint.keep_last=9"]
    run = start_run(workspace, *recorded("evaluated"), *asked)
    assert run.wait() == 0, run.text[-3000:]
    return workspace / "evaluated"


def test_evaluating_leaves_the_run_as_it_was(evaluated, straight, workspace, command_line):
    """But for its weight syncs. Its own export is the best step's, which need not be the last."""
    last, checkpoint = workspace / "evaluated-last", evaluated / "checkpoints" / f"step-{LIVE_STEPS:06d}"
    code, text = command_line(workspace, "convert", "mcore2hf", checkpoint, last)
    assert code == 0, text
    (metrics, *rest), (again, *others) = outcome(evaluated, last), straight
    assert metrics["weight_sync/bytes"] > again["weight_sync/bytes"] == 0
    metrics, again = ({k: v for k, v in m.items() if not k.startswith("weight_sync/")} for m in (metrics, again))
    same((metrics, *rest), (again, *others))
    rows = json_lines(evaluated / "evaluations.jsonl")
    assert [row["step"] for row in rows] == list(range(0, LIVE_STEPS + 1, 4))


def test_the_best_export_answers_as_its_checkpoint(evaluated, workspace, tiny_model, command_line):
    """Greedy: the checkpoint through `eval` and the server, against transformers on the run's export."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = json_lines(evaluated / "evaluations.jsonl")
    best = max(rows, key=lambda row: row["eval/pass@1"])["step"]
    assert json.loads((evaluated / "hf" / "export.json").read_text()) == {"step": best}
    checkpoint = evaluated / "checkpoints" / f"step-{best:06d}" if best else tiny_model
    out = workspace / "greedy"
    asked = ("eval.data=held-out.jsonl", "eval.temperature=0", "eval.samples=1", "eval.k=[1]")
    code, text = command_line(workspace, "eval", "--model", checkpoint, "--out", out, *asked)
    assert code == 0, text[-3000:]
    assert "| pass@1, % (95 %) |" in (out / "table.md").read_text()
    model = AutoModelForCausalLM.from_pretrained(evaluated / "hf")  # in the dtype that its config names
    tokenizer = AutoTokenizer.from_pretrained(evaluated / "hf")
    assert tokenizer.chat_template and (evaluated / "hf" / "generation_config.json").is_file()
    for problem in json_lines(out / checkpoint.name / "held-out.jsonl"):
        answer = problem["prompt_id"].removeprefix("held-out-")
        prompt = tokenizer(f"Say {answer!r}.\n", return_tensors="pt")
        tokens = model.generate(**prompt, do_sample=False, max_new_tokens=16)[0, prompt["input_ids"].shape[1] :]
        assert tokenizer.decode(tokens, skip_special_tokens=True) == problem["responses"][0]
