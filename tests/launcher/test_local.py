import os
import signal
import subprocess
import sys
import time

from dynamo_megatron.launcher.local import run_ranks


def test_signals_are_the_callers_again_afterwards(tmp_path):
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    assert run_ranks(["report", "--help"], 1, tmp_path) == 0
    assert [signal.getsignal(number) for number in numbers] == before


ENDS_WITHOUT_A_WORD = """
import os, pathlib, signal, time
if "RANK" in os.environ:
    signal.signal(signal.SIGINT, lambda *_: os._exit(1))
    pathlib.Path(os.environ["STARTED"]).touch()
    time.sleep(60)
"""


def test_an_interrupted_run_says_so_where_rank_0_cannot(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(ENDS_WITHOUT_A_WORD)
    started, log = tmp_path / "started", tmp_path / "log"
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "STARTED": str(started)}
    command = [sys.executable, "-P", "-m", "dynamo_megatron.launcher.local", "1", str(tmp_path / "run"), "report"]
    with log.open("w") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 60
    while not started.exists():
        assert time.monotonic() < deadline and process.poll() is None, log.read_text()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130
    assert log.read_text() == "interrupted; nothing is saved yet: the same command starts from step 0\n"
