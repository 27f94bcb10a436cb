"""`report`: the page beside the text, its size, and --watch."""

import fcntl
import json
import re
import sys
import threading
import time
from pathlib import Path

import pytest

from dynamo_megatron.cli import main
from dynamo_megatron.errors import InputError
from dynamo_megatron.evaluation.results import summarise
from dynamo_megatron.reports.page import data as page
from dynamo_megatron.reports.page.command import watch
from dynamo_megatron.reports.page.data import page_data
from dynamo_megatron.reports.page.render import as_json
from dynamo_megatron.rollout.store import tokens_file
from dynamo_megatron.tracking.token_rows import response_hash, write_token_rows
from dynamo_megatron.types import ProblemResult


def data_of(html: Path) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', html.read_text(), re.S)[1])


@pytest.fixture
def two_steps(make_run, new_rollout):
    return make_run("run", [new_rollout(s, g, k, reward=float(k)) for s in (1, 2) for g in (0, 1) for k in (0, 1)])


def test_the_page_is_written_beside_the_text(two_steps, tmp_path, no_charts, capsys):
    assert main(["report", str(two_steps), "--out", str(tmp_path / "out"), "--rollout", "000001-0001-001"]) == 0
    assert f"is {tmp_path / 'out' / 'report.html'}." in capsys.readouterr().out
    data = data_of(tmp_path / "out" / "report.html")
    (run,) = data["runs"]
    shown = run["rollouts"]["shown"]
    assert (run["name"], run["step"], run["steps"], run["ended"], data["refresh"]) == ("run", 2, 4, False, None)
    assert shown[0]["id"] == "000001-0001-001" and shown[0]["ids"] == [30, 31] and len(shown) > 4
    assert run["curves"]["values"]["reward/mean"] == [0.5, 0.5]
    assert any("gone and" in note for note in run["rollouts"]["notes"])  # no tokenizer
    assert any("tracking.token_rollouts" in note for note in run["rollouts"]["notes"])


def test_without_the_library_one_line_says_so(two_steps, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert main(["report", str(two_steps), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "no plotly" in said and (tmp_path / "out" / "report.md").is_file()
    assert not (tmp_path / "out" / "report.html").exists()
    assert main(["report", str(two_steps), "--watch"]) == 2 and "no plotly" in capsys.readouterr().err


def test_several_runs_are_in_one_page(make_run, new_rollout, two_steps, no_charts, tmp_path):
    other = make_run("other", [new_rollout(3, 0, 0, response="something else", prompt="What is 0?")])
    assert main(["report", str(two_steps), str(other), "--out", str(tmp_path)]) == 0
    data = data_of(tmp_path / "report.html")
    assert [run["name"] for run in data["runs"]] == ["run", "other"]
    (pair,) = data["pairs"]["shown"]
    assert pair["prompt"] == "What is 0?" and [s["run"] for s in pair["sides"]] == ["run", "other"]


def test_what_is_asked_for_and_not_there(two_steps, no_charts, capsys):
    assert main(["report", str(two_steps), "--rollout", "000001-0009-000"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "no rollout '000001-0009-000'" in said


def test_nine_runs_are_compared_and_the_page_has_eight(make_run, new_rollout, no_charts, tmp_path, capsys):
    runs = [make_run(f"run{i}", [new_rollout(1, 0, 0)]) for i in range(9)]
    assert main(["report", *map(str, runs), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    assert said.err == "report.html has the first 8 of the 9 runs\n" and "run8" in said.out
    data = data_of(tmp_path / "out" / "report.html")
    assert [run["name"] for run in data["runs"]] == [f"run{i}" for i in range(8)] and data["left_out"] == [str(runs[8])]


def test_a_fault_of_the_page_alone_is_a_warning(two_steps, no_charts, tmp_path, capsys):
    out, file = tmp_path / "out", tokens_file(two_steps, 2)
    file.parent.mkdir()
    file.write_bytes(b"no frame begins with this")
    assert main(["report", str(two_steps), "--out", str(out)]) == 0
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith(f"warning: report.html is not written: {file}: damaged")
    assert (out / "report.md").is_file() and not (out / "report.html").exists()
    assert main(["report", str(two_steps), "--out", str(out), "--rollout", "000002-0000-000"]) == 2
    assert str(file) in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_a_warning(two_steps, no_charts, tmp_path, capsys):
    (tmp_path / "out" / "report.html").mkdir(parents=True)
    assert main(["report", str(two_steps), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "Is a directory" in said


def test_a_tokenizer_that_comes_later_is_found(two_steps, tiny_model):
    decoders = {}
    (before,) = page_data([two_steps], decoders=decoders)["runs"]
    (two_steps / "hf").symlink_to(tiny_model)
    (after,) = page_data([two_steps], decoders=decoders)["runs"]
    assert before["rollouts"]["shown"][0]["texts"] is None and len(after["rollouts"]["shown"][0]["texts"]) == 2


@pytest.mark.parametrize(
    ("stop_when", "evaluated", "ended"),
    [
        (None, True, False),
        ({"metric": "reward/mean", "above": 0.5}, True, True),
        ({"metric": "reward/mean", "above": 0.5}, False, False),
        ({"metric": "reward/mean", "above": 0.6}, True, False),
        ({"metric": "no/such", "above": 0.5}, True, False),
    ],
)
def test_a_run_that_its_rule_has_stopped_has_ended(make_run, new_rollout, stop_when, evaluated, ended):
    """Two of four steps, with rewards of 0.5."""
    trainer, evaluation = {"stop_when": stop_when}, {"data": "d", "every": 2}
    run = make_run("run", [new_rollout(s, 0, 0) for s in (1, 2)], trainer=trainer, eval=evaluation)
    if evaluated:
        summary = summarise([ProblemResult("p", "d", [0.5], [False], [3], ["stop"], ["ok"], ["r"])], [1])
        (run / "evaluations.jsonl").write_text(json.dumps({"step": 2, **summary}) + "\n")
    assert page_data([run])["runs"][0]["ended"] is ended


def test_the_size_is_bounded(make_run, new_rollout, monkeypatch):
    n = 2000
    long = {"tokens": [1] + [7] * n, "response_mask": [0] + [1] * n, "engine_logprobs": [-0.123456] * n}
    run = make_run("run", [new_rollout(1, g, 0, reward=g / 10, weight_versions=[(0, 0, n)], **long) for g in range(9)])
    monkeypatch.setattr(page, "ROLLOUT_BYTES", 60_000)
    rollouts = page_data([run])["runs"][0]["rollouts"]
    assert len(as_json(rollouts)) < 61_000 and rollouts["left_out"] > 0 and rollouts["shown"]
    names = [f"000001-{g:04d}-000" for g in (7, 8, 2)]
    asked = page_data([run], names[:2])["runs"][0]["rollouts"]["shown"]
    assert [view["id"] for view in asked] == names[:2]
    with pytest.raises(InputError, match="--rollout: those named take more than"):
        page_data([run], names)


def test_a_rollout_that_does_not_fit_is_left_out_alone(make_run, new_rollout, monkeypatch):
    """The best one is long and comes first."""
    n = 2000
    long = {"tokens": [1] + [7] * n, "response_mask": [0] + [1] * n, "engine_logprobs": [-0.123456] * n}
    run = make_run("run", [new_rollout(1, 0, 0, reward=1.0, weight_versions=[(0, 0, n)], **long), new_rollout(1, 1, 0)])
    monkeypatch.setattr(page, "ROLLOUT_BYTES", 10_000)
    rollouts = page_data([run])["runs"][0]["rollouts"]
    assert [view["id"] for view in rollouts["shown"]] == ["000001-0001-000"] and rollouts["left_out"] == 1


def test_a_watch_follows_the_run_to_its_end(make_run, new_rollout, add_step, no_charts, monkeypatch):
    for name, value in {"POLL": 0.01, "SHARE": 1}.items():  # a page that took 3 s is not followed by a pause of 30 s
        monkeypatch.setattr(f"dynamo_megatron.reports.page.command.{name}", value)
    run, said = make_run("run", []), []
    thread = threading.Thread(target=watch, args=([run], run, 0.02, (), said.append))
    thread.start()
    time.sleep(0.1)
    assert not (run / "report.html").exists()  # no step yet
    for step in range(1, 5):
        add_step(run, step, [new_rollout(step, 0, 0)])
        deadline = time.monotonic() + 60
        while not (run / "report.html").exists() or data_of(run / "report.html")["runs"][0]["step"] < step:
            assert time.monotonic() < deadline, f"step {step} did not come into report.html"
            time.sleep(0.01)
        assert data_of(run / "report.html")["refresh"] == (0.02 if step < 4 else None)
    thread.join(60)
    assert not thread.is_alive() and len(said) == 2 and said[-1].endswith("the last step is in it")


def test_a_watch_of_a_run_that_was_killed_ends(make_run, new_rollout, no_charts, monkeypatch):
    """The lock of the second run, of the same steps, is held for a while."""
    for name, value in {"POLL": 0.01, "LOOK_EVERY": 0.3}.items():
        monkeypatch.setattr(f"dynamo_megatron.reports.page.command.{name}", value)
    killed, alive = (make_run(name, [new_rollout(1, 0, 0)]) for name in ("killed", "alive"))
    (killed / ".lock").touch()
    with open(alive / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InputError, match=r"no step in .*alive for"):
            watch([killed, alive], alive, 0.02, say=lambda line: None, stalled=1.5)
    for folders in ([killed], [killed, alive]):
        names = ", ".join(map(str, folders))
        with pytest.raises(InputError, match=f"no process trains in {names}, and the last step is not made; call it"):
            watch(folders, killed, 0.02, say=lambda line: None, stalled=20)


def test_a_watch_of_a_run_that_stands_still_ends(two_steps, no_charts, monkeypatch, tmp_path):
    monkeypatch.setattr("dynamo_megatron.reports.page.command.POLL", 0.01)
    with pytest.raises(InputError, match=r"no step in .*run for"):
        watch([two_steps], two_steps, 0.02, say=lambda line: None, stalled=0.3)
    with pytest.raises(InputError, match=r"no config\.yaml"):
        watch([tmp_path / "none"], tmp_path, 0.02)


def test_missing_advantages_have_their_reason(make_run, new_rollout):
    run = make_run("run", [new_rollout(1, 0, 0, step_rewards=[(0, 2, 0.5)]), new_rollout(1, 0, 1, reward=1.0)])
    rollouts = page_data([run])["runs"][0]["rollouts"]
    assert not any("advantage" in shown["values"] for shown in rollouts["shown"])
    (note,) = (note for note in rollouts["notes"] if note.startswith("Advantages "))
    assert note.startswith("Advantages with process rewards cannot be computed")


def test_advantages_that_were_recorded_are_not_said_to_be_missing(make_run, new_rollout):
    run = make_run("run", [new_rollout(1, 0, k) for k in (0, 1)], algorithm={"advantage": {"kind": "history"}})
    row = {"rollout_id": "000001-0000-000", "response": response_hash([30, 31]), "advantage": [0.5, 0.5]}
    write_token_rows(tokens_file(run, 1), [row])
    rollouts = page_data([run])["runs"][0]["rollouts"]
    assert sum("advantage" in shown["values"] for shown in rollouts["shown"]) == 1
    (note,) = (note for note in rollouts["notes"] if note.startswith("Advantages "))
    assert note.endswith("those shown were recorded in training (tokens/).")
