"""Who of a server's processes hears of a signal that SLURM sends to every process of a job."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from living_processes import living, wait_until

from dynamo_megatron.config import ModelConfig, RolloutConfig
from dynamo_megatron.rollout.servers.server import SGLangServer
from dynamo_megatron.runtime.process_signals import ASK_TO_STOP, keeping

# Starts processes as SGLang does: a scheduler, which starts one of its own.
FAKE = """
import multiprocessing, os, pathlib, sys, time

def write(name):
    path = pathlib.Path(os.environ["SAID"]) / name
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)
    time.sleep(300)

def scheduler():
    multiprocessing.get_context("spawn").Process(target=write, args=("worker",)).start()
    write("scheduler")

if __name__ == "__main__":
    assert sys.modules["__main__"].scheduler is scheduler and "--host" in sys.argv[1:]
    multiprocessing.get_context("spawn").Process(target=scheduler).start()
    write("server")
"""
# The run's side of a split fleet, without servers' names: nobody listens.
RUN = """
import asyncio, sys
from dynamo_megatron.rollout.servers.announcements import Announced
asyncio.run(Announced(sys.argv[1], [], None).run())
"""
NAMES = ("server", "scheduler", "worker")


@pytest.fixture
def said(tmp_path, monkeypatch):
    """A folder where the processes of a fake sglang.launch_server write their pids."""
    package = tmp_path / "fake" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(FAKE)
    said = tmp_path / "said"
    said.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setenv("SAID", str(said))
    return said


def pids(said: Path, log: Path) -> list[int]:
    wait_until(lambda: all((said / name).exists() for name in NAMES), log)
    return [int((said / name).read_text()) for name in NAMES]


def signals(pid: int, field: str) -> set[int]:
    """The signals that a process blocks ("SigBlk") or ignores ("SigIgn")."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (mask,) = [int(line.split()[1], 16) for line in lines if line.startswith(f"{field}:")]
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


def test_the_processes_that_a_server_starts_block_what_asks_the_ranks_to_stop(said, tmp_path):
    """multiprocessing unblocks SIGTERM as it starts a process's first child."""
    log = tmp_path / "sglang.log"
    server = SGLangServer(RolloutConfig(), ModelConfig(path=str(tmp_path)), log)
    with keeping(*ASK_TO_STOP):
        server.start()
    try:
        family = pids(said, log)
        processes = [psutil.Process(pid) for pid in family]
        assert [signals(pid, "SigBlk") for pid in family] == [set(ASK_TO_STOP)] * 3
        assert "sglang.launch_server" in psutil.Process(family[0]).cmdline()
    finally:
        server.stop()
    assert living(processes) == []


def test_a_node_of_servers_goes_on_when_the_ranks_are_asked_to_stop(said, tmp_path):
    python, output, log = [sys.executable, "-P"], tmp_path / "run", tmp_path / "node.log"
    keys = [f"model.path={tmp_path}", "data.source=unused", f"output_dir={output}", "rollout.placement=split"]
    command = ["-m", "dynamo_megatron.cli", "serve", *keys, "--nodes", "1", "--node", "0"]
    with log.open("w") as file:
        run = subprocess.Popen([*python, "-c", RUN, str(output)], stdout=file, stderr=file)
        node = subprocess.Popen([*python, *command], cwd=tmp_path, stdout=file, stderr=file)
    try:
        family = [psutil.Process(pid) for pid in (node.pid, *pids(said, log))]
        assert [signal.SIGUSR1 in signals(process.pid, "SigIgn") for process in family] == [True] * 4
        node.terminate()
        assert node.wait(120) == 0 and log.read_text() == "stopped\n"
        assert living(family) == []
    finally:
        for process in (node, run):
            process.kill()
            process.wait()
