import os
import signal
import subprocess
import sys

from background_run import FROM_STEP_0, runs_first
from living_processes import wait_until

from dynamo_megatron.runtime.guard import NAME

ENDS_WITHOUT_A_WORD = """
import os, pathlib, signal, time
if "RANK" in os.environ:
    signal.signal(signal.SIGINT, lambda *_: os._exit(1))
    pathlib.Path(os.environ["STARTED"]).touch()
    time.sleep(3600)
"""


def test_an_interrupted_run_says_so_where_rank_0_cannot(tmp_path):
    started, log = tmp_path / "started", tmp_path / "log"
    environment = {**os.environ, **runs_first(tmp_path, ENDS_WITHOUT_A_WORD), "STARTED": str(started)}
    command = [sys.executable, "-P", "-m", "dynamo_megatron.launcher.local", "1", str(tmp_path / "run"), "report"]
    with log.open("w") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
    wait_until(lambda: started.exists() or process.poll() is not None, log)
    assert started.exists(), log.read_text()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 130
    assert log.read_text() == f"interrupted; {FROM_STEP_0}\n"


def test_a_killed_rank_is_named_with_the_next_start(tmp_path):
    killed = "import os\nif os.environ.get('RANK') == '1':\n    os.kill(os.getpid(), 9)\n"
    command = [sys.executable, "-P", "-m", "dynamo_megatron.launcher.local", "2", str(tmp_path / "run"), "--help"]
    environment = {**os.environ, **runs_first(tmp_path, killed)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (1, f"rank 1 was ended by SIGKILL; {FROM_STEP_0}\n")


def test_a_guard_that_a_rank_has_left_removes_its_folder(tmp_path):
    folder, started = tmp_path / "folder", tmp_path / "started"
    folder.mkdir()
    command = [sys.executable, "-P", "-m", NAME, str(folder), "--", "sh", "-c", f"touch {started}; sleep 3600"]
    rank = "import os, subprocess, time\nif os.environ.pop('RANK', None):\n    stdin, held = os.pipe()\n"
    rank += f"    subprocess.Popen({command}, stdin=stdin, pass_fds=[held])\n"  # `sh` holds it open
    rank += f"    while not os.path.exists({str(started)!r}): time.sleep(0.05)\n    os._exit(1)"
    code = "from pathlib import Path\nfrom dynamo_megatron.launcher import local\nlocal.ORPHANS_GRACE = 0.0\n"
    code += "raise SystemExit(local.run_ranks([], 1, Path()))"
    environment = {**os.environ, **runs_first(tmp_path, rank)}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=environment, timeout=120)
    assert done.returncode == 1 and not folder.exists()
