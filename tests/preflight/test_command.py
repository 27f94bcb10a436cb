"""The whole command: every check runs whatever the others find, and in a minute."""

import os
import socket
import subprocess
import sys
import time

import pytest

# Rank 0's only check of the job waits until rank 1 is through: for ever, if that needed rank 0 after it.
SLOW = """
import sys, time
from pathlib import Path
from dynamo_megatron.config.files import compose
from dynamo_megatron.preflight import command
from dynamo_megatron.preflight.findings import failed, ok

def slow(subject):
    end = time.monotonic() + 60
    while not Path("through").exists() and time.monotonic() < end:
        time.sleep(0.05)
    yield ok("waited") if Path("through").exists() else failed("rank 1 is not through")

command.OF_THE_JOB, command.OF_A_NODE = (("slow", slow),), ()
sys.exit(command.preflight(compose(["config.yaml"], [])[0], 2, with_server=False))
"""


@pytest.mark.full
def test_a_failing_check_hides_no_other(base, command_line):
    (base / "model" / "tokenizer.json").unlink()
    (base / "problems.jsonl").write_text("no JSON\n")
    keys = ("parallel.ep=2", "--ranks=2", "--no-server")
    code, output = command_line(base, "preflight", base / "config.yaml", *keys)
    assert code == 1
    lines = output.splitlines()
    failed = [line.split()[1].rstrip(":") for line in lines if line.startswith("FAILED")]
    assert failed == ["layout", "vocabulary", "data"], output
    assert any(line.startswith("skipped template") for line in lines), output  # it needs the tokenizer too
    assert any(
        line.startswith("ok      devices: CPU x 2 here: all-reduce over 2 ranks, gloo: 4 MB in ") for line in lines
    )
    assert lines[-1] == "3 of 17 checks failed: layout, vocabulary, data"
    assert not (base / "run").exists()


@pytest.mark.full
def test_the_ranks_of_a_launcher_meet_before_what_rank_0_has_to_itself(base):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1] - 1)
    job = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    first, second = (
        subprocess.Popen([sys.executable, "-P", "-c", SLOW], cwd=base, env={**job, "RANK": rank, "LOCAL_RANK": rank})
        for rank in ("0", "1")
    )
    try:
        assert second.wait(90) == 0
        (base / "through").touch()
        assert first.wait(90) == 0
    finally:
        for process in (first, second):
            process.kill()
            process.wait()


def test_a_config_that_is_refused(base, command_line):
    code, output = command_line(base, "preflight", base / "config.yaml", "rollout.max_tokens=1")
    assert code == 2 and output.count("\n") == 1 and "did you mean rollout.max_new_tokens" in output


@pytest.mark.full
def test_all_of_it_with_a_server(base, command_line):
    start = time.monotonic()
    code, output = command_line(base, "preflight", base / "config.yaml", "parallel.tp=2", "--ranks=2")
    assert code == 0, output
    assert "ok      server: SGLang started with" in output
    assert output.splitlines()[-1] == "all 18 checks passed"
    print(f"{time.monotonic() - start:.1f} s")  # 60 s is the promise on an idle machine
    assert not (base / "run").exists()
