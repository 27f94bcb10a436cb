"""Processes of a comparison: its runs one after the other and side by side, signals, servers that outlive runs."""

import asyncio
import os
import sys

import pytest

from dynamo_megatron.cli import main
from dynamo_megatron.comparison import runs
from dynamo_megatron.comparison.runs import Stop, carry_out, keeps_servers, servers, side_by_side
from dynamo_megatron.comparison.spec import planned_runs, read_outcome
from dynamo_megatron.config import Config
from dynamo_megatron.config.files import ConfigError
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.rollout.servers import supervisor

# In place of train: it says what it was given, and ends as its folder's name says.
TRAIN = """
import os, pathlib, signal, sys
words = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
folder = pathlib.Path(words["output_dir"])
folder.mkdir(parents=True, exist_ok=True)
print("trained", words["seed"], flush=True)
if "stops" in folder.name:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    os.kill(os.getppid(), signal.SIGTERM)
    signal.pause()
sys.exit(1 if "fails" in folder.name else 2 if "refused" in folder.name else 0)
"""
PART = """
import os, pathlib, signal, sys
folder, waits = sys.argv[1:]
part = os.environ["DYNAMO_MEGATRON_COMPARE_PART"].split()[0]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
(pathlib.Path(folder) / part).write_text(" ".join(map(str, sorted(os.sched_getaffinity(0)))))
if waits == "True":
    os.kill(os.getppid(), signal.SIGTERM)
    signal.pause()
if part == "1":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def planned(spec, tmp_path, monkeypatch):
    """planned(arm, ...) -> runs of one seed that `TRAIN` carries out."""
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.setattr(runs, "program", lambda python, command, words: [python, "-P", "train.py", *words])
    base = ["base.yaml", "rollout={engine: recorded, recorded: run}"]

    def plan(*arms):
        own = {"arms": {arm: [] for arm in arms}, "control": arms[0], "seeds": [7], "learning_rates": [1e-6]}
        return planned_runs(spec(base=base, **own))

    return plan


def test_runs_one_after_the_other_and_again_those_that_failed(planned, tmp_path, capsys):
    made = planned("fails", "well", "refused")
    assert asyncio.run(carry_out(made[:2], tmp_path, Stop())) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "run 1 of 2, fails-lr1e-06-seed7: failed (exit code 1): trained 7" in lines
    assert [read_outcome(run).code for run in made[:2]] == [1, 0]
    with pytest.raises(ConfigError, match=r"refused-lr1e-06-seed7: trained 7 \(more in "):
        asyncio.run(carry_out(made, tmp_path, Stop()))
    out = capsys.readouterr().out
    assert out.startswith("run 2 of 3, fails") and read_outcome(made[2]) is None


def test_a_signal_stops_the_run_and_the_comparison_which_says_what_is_left(planned, capsys):
    made = planned("stops", "well")
    assert main(["compare", "spec.yaml"]) == 75
    left = "0 of 2 runs have ended; left: 2"
    assert capsys.readouterr().out.splitlines() == [left, "run 1 of 2, stops-lr1e-06-seed7: started", left]
    assert [read_outcome(run) for run in made] == [None, None] and not made[1].folder.exists()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
@pytest.mark.parametrize(("waits", "code"), [(False, 1), (True, 75)])
def test_parts_have_cores_of_their_own_the_worst_exit_code_counts_and_a_signal_reaches_all(
    tmp_path, waits, code, monkeypatch
):
    monkeypatch.setenv("PATH", "")  # no program of the system is needed
    (tmp_path / "part.py").write_text(PART)
    command = [sys.executable, "-P", str(tmp_path / "part.py"), str(tmp_path), str(waits)]
    assert asyncio.run(side_by_side(command, 2, Stop())) == code
    if not waits:
        first, second = (set((tmp_path / part).read_text().split()) for part in ("0", "1"))
        assert first and second and not first & second
    with pytest.raises(ConfigError, match=r"--jobs: 9999 for \d+ cores; give fewer"):
        asyncio.run(side_by_side(command, 9999, Stop()))


def config(tmp_path, **rollout) -> Config:
    return Config(model={"path": "m"}, data={"source": "d"}, output_dir=str(tmp_path / "run"), rollout=rollout)


@pytest.mark.parametrize(
    ("rollout", "on_cpu", "on_gpu"),
    [
        ({}, True, False),
        ({"placement": "split"}, True, True),
        ({"placement": "external", "urls": ["http://127.0.0.1:9"]}, False, False),
        ({"engine": "recorded", "recorded": "run"}, False, False),
    ],
)
def test_whose_servers_stay_up(rollout, on_cpu, on_gpu, tmp_path, monkeypatch):
    for cuda, kept in ((False, on_cpu), (True, on_gpu)):
        monkeypatch.setattr(runs, "cuda_available", lambda cuda=cuda: cuda)
        assert keeps_servers(config(tmp_path, **rollout)) is kept


def test_servers_that_cannot_start_end_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(supervisor, "PAUSE", 0.0)

    async def start(**rollout) -> None:
        async with servers(config(tmp_path, **rollout), tmp_path, Stop()):
            raise AssertionError("it started")

    with pytest.raises(RolloutError, match=r"^server-0: .*; see .*/logs$"):
        asyncio.run(start(python="/bin/false"))
    assert capsys.readouterr().out.count("server-0 is started again: ") == supervisor.FAILED_STARTS - 1
