"""Cores and threads: what limits a process, and whose word OMP_NUM_THREADS is."""

import os

import pytest

from dynamo_megatron.config import RolloutConfig
from dynamo_megatron.rollout.servers import server
from dynamo_megatron.runtime.cores import CHOSEN, choose_threads, memory_room, usable_cores, users_threads


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


def test_the_job_s_memory_limit(tmp_path):
    """Pages of files that the job has read are given back: 1000 - 700 + 500."""
    (tmp_path / "job").mkdir()
    texts = {"memory.max": "1000\n", "memory.current": "700\n", "memory.stat": "anon 9\ninactive_file 500\n"}
    for name, text in texts.items():
        (tmp_path / "job" / name).write_text(text)
    (tmp_path / "own").write_text("12:pids:/job\n0::/job\n")
    assert memory_room(tmp_path, tmp_path / "own") == 800
    old = tmp_path / "memory" / "slurm" / "job_7"
    (old / "step_0").mkdir(parents=True)  # no limit of its own
    texts = {"memory.limit_in_bytes": "900\n", "memory.usage_in_bytes": "700\n"}
    for name, text in {**texts, "memory.stat": "inactive_file 1\ntotal_inactive_file 400\n"}.items():
        (old / name).write_text(text)
    (tmp_path / "own").write_text("9:cpu,memory:/slurm/job_7/step_0\n1:name=systemd:/job\n0::/other\n")
    assert memory_room(tmp_path, tmp_path / "own") == 600
    (tmp_path / "own").write_text("12:pids:/job\n0::/other\n")
    for own in ("own", "none"):  # some kernels have none
        assert memory_room(tmp_path, tmp_path / own) == float("inf")
