"""A tracker's library may raise, hang, ask for a key or be signalled: the run neither waits nor ends.

The library is a stand-in for trackio, which the tracker's process imports in its place.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from dynamo_megatron.config import Config
from dynamo_megatron.tracking import tracker_process
from dynamo_megatron.tracking.tracker_process import TrackerProcess
from dynamo_megatron.tracking.trackers import close_trackers

LIBRARY = """
import json, os, time

def init(**settings):
    INIT
    return Run()

class Run:
    name = "a name"

    def log(self, row, step):
        LOG
        with open(os.environ["ROWS"], "ab", buffering=0) as file:  # one write, whole beside those of other processes
            file.write(json.dumps({**row, "step": step}).encode() + b"\\n")

    def finish(self):
        FINISH
"""
HANGS = "time.sleep(1000)"
RAISES = 'raise RuntimeError("the service said no")'
PATIENCE = 60.0  # seconds for what takes few, on a machine that may hold a process up


@pytest.fixture
def started(tmp_path, monkeypatch):
    """started(init=, log=, finish=) -> (tracker, what the user is told) with that library, each in a run of its own."""
    folders = (f"run{number or ''}" for number in itertools.count())

    def start(init="pass", log="pass", finish="pass"):
        text = LIBRARY.replace("INIT", init).replace("LOG", log).replace("FINISH", finish)
        (tmp_path / "trackio.py").write_text(text)
        paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        monkeypatch.setenv("ROWS", str(tmp_path / "rows"))
        config = Config(model={"path": "m"}, data={"source": "s"}, output_dir=str(tmp_path / next(folders)))
        said: list[str] = []
        return TrackerProcess("trackio", config, said.append), said

    yield start
    for process in (left := processes()):
        process.kill()
    psutil.wait_procs(left, PATIENCE)  # the next test counts its own


def processes() -> list[psutil.Process]:
    return [process for process in psutil.Process().children() if "trackio" in words_of(process)]


def words_of(process: psutil.Process) -> list[str]:
    """Its command line; empty where it has ended, or ends now."""
    try:
        return process.cmdline()
    except (psutil.ZombieProcess, psutil.NoSuchProcess):
        return []


def rows(tmp_path) -> list[dict]:
    file = tmp_path / "rows"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def wait_until(condition) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_all_rows_arrive_in_order_before_close_returns(started, tmp_path):
    tracker, said = started()
    for step in range(1, 101):
        tracker.write({"step": step, "reward/mean": step / 2})
    close_trackers([tracker], 60)
    assert rows(tmp_path) == [{"step": step, "reward/mean": step / 2} for step in range(1, 101)]
    assert said == [] and processes() == []


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_one_that_raises_is_told_once_and_the_run_goes_on(started, tmp_path, where):
    tracker, said = started(**{where: RAISES})
    for step in range(1, 4):
        tracker.write({"step": step, "reward/mean": 0.5})
        if where != "finish":
            wait_until(lambda: processes() == [])
    close_trackers([tracker], 60)
    log = tmp_path / "run" / "logs" / "tracker-trackio.log"
    line = "warning: trackio failed (RuntimeError: the service said no)"
    assert said == [f"{line}; metrics.jsonl has all metrics; its log is {log}"]
    assert "Traceback" in log.read_text() and log.read_text().endswith(f"{line}\n")


def test_one_that_raises_while_it_is_written_to_has_said_why(started, tmp_path, monkeypatch):
    """The pipe is closed before Python prints the traceback."""
    monkeypatch.setattr(tracker_process, "LAST_WORDS", PATIENCE)
    monkeypatch.setattr(tracker_process, "LARGEST_BACKLOG", 1 << 30)  # not reached before a slow process raises
    tracker, said = started(init='open(os.environ["ROWS"], "w").close()', log=RAISES)
    wait_until((tmp_path / "rows").is_file)
    while not said:
        tracker.write({"step": 1, "reward/mean": 0.5})
    assert said[0].startswith("warning: trackio failed (RuntimeError: the service said no);")


def test_what_an_earlier_start_has_left_in_the_log_is_no_reason(started, tmp_path):
    log = tmp_path / "run" / "logs" / "tracker-trackio.log"
    log.parent.mkdir(parents=True)
    log.write_text("RuntimeError: of the day before\n")
    tracker, said = started(init="os._exit(3)")
    close_trackers([tracker], 60)
    assert said == [f"warning: trackio failed; metrics.jsonl has all metrics; its log is {log}"]


@pytest.mark.parametrize("where", ["log", "finish"])
def test_all_trackers_have_one_deadline_and_none_waits_for_another(started, tmp_path, monkeypatch, where):
    library = {where: f'if "HANG" in os.environ: {HANGS}'}
    monkeypatch.setenv("HANG", "")
    hanging = [started(**library) for _ in range(3)]
    monkeypatch.delenv("HANG")
    sent, said = started(**library)
    trackers, writing = [*(tracker for tracker, _ in hanging), sent], 4 if where == "finish" else 1
    row = {"reward/mean": 0.5, "long": list(range(2000))}
    for tracker in trackers:
        tracker.write({"step": 1, **row})
    wait_until(lambda: len(rows(tmp_path)) == writing)  # a busy machine takes long to start them
    for step in range(2, 50):  # more than the pipe holds
        for tracker in trackers:
            tracker.write({"step": step, **row})
    start = time.monotonic()
    close_trackers(trackers, 10.0)
    assert time.monotonic() - start < 25 and processes() == []  # 30 s if each of the three had its own deadline
    assert said == [] and len(rows(tmp_path)) == 49 * writing
    assert all(len(told) == 1 and told[0].startswith("warning: trackio did not ") for _, told in hanging)


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_one_that_hangs_holds_neither_the_steps_nor_the_end(started, where):
    tracker, said = started(**{where: HANGS})
    start = time.monotonic()
    row = {"reward/mean": 0.5, "long": list(range(2000))}
    for step in range(1, 50):  # more than the pipe holds
        tracker.write({"step": step, **row})
    assert time.monotonic() - start < PATIENCE  # one that waited would wait for 1000 s
    close_trackers([tracker], 3.0)
    assert time.monotonic() - start < 2 * PATIENCE and processes() == []
    (line,) = said
    assert line.startswith("warning: trackio did not ")


def test_what_is_kept_for_one_that_hangs_is_bounded(started):
    tracker, said = started(log=HANGS)
    row = {"reward/mean": 0.5, "long": "x" * (1 << 20)}
    for step in range(1, 40):
        tracker.write({"step": step, **row})
    assert [line.partition(";")[0] for line in said] == ["warning: trackio has taken nothing for 16 MiB of metrics"]
    assert processes() == []


def test_signals_that_ask_the_ranks_to_stop_do_not_end_it(started, tmp_path):
    tracker, said = started()
    tracker.write({"step": 1, "reward/mean": 0.5})
    wait_until(lambda: rows(tmp_path))
    (process,) = processes()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        process.send_signal(number)
    tracker.write({"step": 2, "reward/mean": 0.5})
    close_trackers([tracker], 60)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2] and said == []


def test_a_library_that_asks_for_a_key_gets_none(started):
    tracker, said = started(init="input('key: ')")
    close_trackers([tracker], 60)
    (line,) = said
    assert "EOFError" in line


def test_it_ends_with_a_run_that_is_killed(started, tmp_path):
    started(log=HANGS)  # writes the library
    program = (
        "import os\n"
        "from dynamo_megatron.config import Config\n"
        "from dynamo_megatron.tracking.tracker_process import TrackerProcess\n"
        f"config = Config(model={{'path': 'm'}}, data={{'source': 's'}}, output_dir={str(tmp_path / 'other')!r})\n"
        "tracker = TrackerProcess('trackio', config, print)\n"
        "tracker.write({'step': 1})\n"
        "import psutil\n"
        "print(psutil.Process().children()[0].pid, flush=True)\n"
        "import time; time.sleep(1000)\n"
    )
    parent = subprocess.Popen([sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(parent.stdout.readline()))
    wait_until((tmp_path / "other" / "logs" / "tracker-trackio.log").is_file)  # by then it dies with its parent
    parent.kill()
    parent.wait()
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
