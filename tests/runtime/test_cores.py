"""Cores and threads: what limits a process, and whose word OMP_NUM_THREADS is."""

import os

import pytest

from dynamo_megatron.config import RolloutConfig
from dynamo_megatron.rollout.servers import server
from dynamo_megatron.runtime.cores import CHOSEN, choose_threads, usable_cores, users_threads


@pytest.mark.parametrize(
    ("line", "files", "cores"),
    [
        ("0::/job/step", {"job/cpu.max": "250000 100000", "job/step/cpu.max": "max 100000"}, 2),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/", {}, 8),
    ],
)
def test_usable_cores(line, files, cores, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for name, text in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(text + "\n")
    (tmp_path / "own").write_text(f"1:name=systemd:/\n{line}\n")
    assert usable_cores(tmp_path / "cgroup", tmp_path / "own") == cores


def test_threads_of_a_cpu_server(monkeypatch):
    """All idle cores, or what the user says; not what a launcher gives to ranks."""
    for name in ("OMP_NUM_THREADS", CHOSEN, "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(server, "usable_cores", lambda: 8)
    config = RolloutConfig()
    assert server.cpu_threads(config, 1) == 8
    assert server.cpu_threads(config, 3) == 2
    assert server.cpu_threads(config.model_copy(update={"max_staleness": 1}), 1) == 4
    assert server.cpu_threads(config.model_copy(update={"tp": 16}), 1) == 1
    choose_threads(os.environ, 1)
    assert os.environ["OMP_NUM_THREADS"] == "1" and users_threads() is None
    monkeypatch.delenv(CHOSEN)
    assert users_threads() == server.cpu_threads(config, 1) == 1
    choose_threads(os.environ, 3)
    assert os.environ["OMP_NUM_THREADS"] == "1" and CHOSEN not in os.environ
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    assert server.cpu_threads(config, 1) == 8
