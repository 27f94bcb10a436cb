"""How a run ends when something fails: quickly, with the message as the last line, and nothing left behind."""

import contextlib
import re
import signal

import psutil
import pytest
from background_run import FAILS_ON_RANK_1, FROM_STEP_0, runs_first, step_lines

pytestmark = pytest.mark.full

DIES_ON_RANK_1 = FAILS_ON_RANK_1.replace(
    'raise KeyError("this rank has had enough")',
    "import time; time.sleep(2.0); os.kill(os.getpid(), 9)",  # by then rank 0 waits for it in the update
)
FAILS_ON_RANK_0 = FAILS_ON_RANK_1.replace('"1"', '"0"').replace(
    'raise KeyError("this rank has had enough")',
    'import time; time.sleep(2.0); raise OSError(28, "No space left on device")',  # by then rank 1 waits for it
)


@pytest.fixture
def recorded(live, workspace, tmp_path):
    keys = (f"rollout.recorded={live[0]}", "rollout.engine=recorded", f"output_dir={tmp_path / 'run'}")
    return workspace / "config.yaml", *keys


@pytest.mark.parametrize(
    ("code", "last"),
    [
        (FAILS_ON_RANK_1, "rank 1, step 3: KeyError: 'this rank has had enough'"),
        (FAILS_ON_RANK_0, "rank 0, step 3: OSError: [Errno 28] No space left on device"),  # it has the ranks' store
        (DIES_ON_RANK_1, f"rank 1 was ended by SIGKILL; {FROM_STEP_0}"),
    ],
    ids=["rank 1", "rank 0", "kill -9"],
)
def test_a_failed_rank_ends_all_with_its_message(recorded, workspace, start_run, tmp_path, code, last):
    run = start_run(workspace, *recorded, environment=runs_first(tmp_path, code))
    assert run.wait() == 1 and run.text.splitlines()[-1] == last
    if code is FAILS_ON_RANK_0:  # nothing else is said
        assert "rank" not in run.text.splitlines()[-2] and "Traceback" not in run.text
    assert run.left_behind() == []


def test_sigterm_saves_and_the_same_command_goes_on(recorded, workspace, start_run, tmp_path):
    output = tmp_path / "run"
    run = start_run(workspace, *recorded, "checkpoint.every=100", "checkpoint.async=true")
    run.wait_until(lambda: len(step_lines(output)) >= 2, "two steps")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 75
    done = step_lines(output)[-1]["step"]
    assert (output / "checkpoints" / f"step-{done:06d}").is_dir()
    again = start_run(workspace, *recorded, "checkpoint.every=100", f"trainer.steps={done + 1}")
    assert again.wait() == 0
    assert [row["step"] for row in step_lines(output)] == list(range(1, done + 2))


@pytest.mark.timeout(1200)
def test_all_that_listens_is_on_loopback_and_ctrl_c_stops_the_servers_too(workspace, start_run, tmp_path):
    keys = ("trainer.steps=500", "rollout.servers=2", "rollout.sync.transport=gloo", f"output_dir={tmp_path / 'run'}")
    run = start_run(workspace, workspace / "config.yaml", *keys)
    run.wait_until(lambda: step_lines(tmp_path / "run"), "the first step", timeout=600)
    run.look()
    assert len(run.family) >= 8, "launcher's ranks, rollout process, servers and their children"
    listening = []
    for process in (psutil.Process(run.process.pid), *run.family):
        with contextlib.suppress(psutil.Error):  # it has ended
            listening += [c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert set(listening) == {"127.0.0.1"} and len(listening) >= 4, listening
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    says = r"interrupted; (nothing is saved yet: )?the same command \w+ from .*step \d+(; .* are kept)?"
    assert re.fullmatch(says, run.text.splitlines()[-1]) and run.text.count("the same command") == 1
    assert run.left_behind() == []


def test_an_exception_in_the_reward_function_is_the_last_line(workspace, start_run, tmp_path):
    (tmp_path / "own_reward.py").write_text((workspace / "own_reward.py").read_text())
    run = start_run(tmp_path, workspace / "config.yaml", f"output_dir={tmp_path / 'run'}", "trainer.steps=500")
    run.wait_until(lambda: step_lines(tmp_path / "run"), "the first step")
    (tmp_path / "fail-now").touch()
    assert run.wait() == 1
    last = run.text.splitlines()[-1]
    assert "own_reward:contains" in last and "the reward table has no such entry" in last
    assert f'  File "{tmp_path / "own_reward.py"}", line 4, in contains' in run.text.splitlines()
    log = (tmp_path / "run" / "logs" / "rollout.log").read_text()
    assert last.partition("RewardError: ")[2] in log and "nanobind" not in log
    assert run.left_behind() == []
