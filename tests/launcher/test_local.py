import os
import signal
import subprocess
import sys
import time

import psutil

CALLS = """
import signal, sys
from pathlib import Path
from dynamo_megatron.launcher.local import run_ranks
before = {number: lambda *_: None for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
for number, handler in before.items():
    signal.signal(number, handler)
assert run_ranks(["report", "--help"], 1, Path(sys.argv[1])) == 0
assert {number: signal.getsignal(number) for number in before} == before
"""


def test_signals_are_the_callers_again_afterwards(tmp_path):
    """In a process of its own: `run_ranks` ends all children that are left, such as another test's server here."""
    command = [sys.executable, "-P", "-c", CALLS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


FROM_STEP_0 = "nothing is saved yet: the same command starts from step 0"
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
    assert process.wait(timeout=120) == 130
    assert log.read_text() == f"interrupted; {FROM_STEP_0}\n"


def test_a_killed_rank_is_named_with_the_next_start(tmp_path):
    killed = "import os\nif os.environ.get('RANK') == '1':\n    os.kill(os.getpid(), 9)\n"
    (tmp_path / "sitecustomize.py").write_text(killed)
    command = [sys.executable, "-P", "-m", "dynamo_megatron.launcher.local", "2", str(tmp_path / "run"), "--help"]
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (1, f"rank 1 was ended by SIGKILL; {FROM_STEP_0}\n")


SENDS = """
import os, time
if "RANK" in os.environ and not os.environ.get("BEGUN"):
    os.environ["BEGUN"] = "yes"
    import psutil, torch
    from pathlib import Path
    from dynamo_megatron.weight_sync.transports.tensor import TensorTransport
    transport = TensorTransport()
    transport.stage(1, {"weight": torch.arange(6, dtype=torch.float32)})
    (manager,) = (child for child in psutil.Process().children() if child.name() == "torch_shm_manager")
    Path("sent.tmp").write_text(f"{manager.pid} {transport._handle()}")
    os.rename("sent.tmp", "sent")
    while not os.path.exists("read"):
        time.sleep(0.05)
    transport.end()
    os._exit(0)
"""
READS = """
import base64, pickle, sys, torch
torch.multiprocessing.set_sharing_strategy("file_system")
bucket = pickle.loads(base64.b64decode(input()))
print(*bucket["flattened_tensor"].view(torch.float32).tolist(), flush=True)
del bucket
input()
"""


LAUNCHES = """
import sys
from pathlib import Path
from dynamo_megatron.launcher import local
local.ORPHANS_GRACE = 3600.0  # else the manager would be ended, too late, like any other process
sys.exit(local.run_ranks(["report"], 1, Path(sys.argv[1])))
"""


def test_a_run_does_not_wait_for_a_server_that_stays_up_after_a_push_by_shared_memory(tmp_path):
    """torch connects the server to the rank's shared-memory manager for as long as the server lives."""
    (tmp_path / "sitecustomize.py").write_text(SENDS)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-P", "-c", LAUNCHES, str(tmp_path / "run")]
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path, stdout=log, stderr=log)
    deadline = time.monotonic() + 120
    while not (tmp_path / "sent").exists():
        assert time.monotonic() < deadline and run.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.05)
    manager, handle = (tmp_path / "sent").read_text().split()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-P", "-c", READS], **pipes) as server:
        server.stdin.write(f"{handle}\n")
        server.stdin.flush()
        assert server.stdout.readline().split() == ["0.0", "1.0", "2.0", "3.0", "4.0", "5.0"]
        (tmp_path / "read").touch()
        try:
            assert run.wait(timeout=120) == 0, (tmp_path / "log").read_text()
        finally:
            server.communicate("\n")
    assert not psutil.pid_exists(int(manager))
