"""`dynamo-megatron serve` and a run that finds its server by files; two real servers on one machine."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
import yaml
from living_processes import living
from stand_ins import VOCABULARY, external, sampled

from dynamo_megatron.config import Config
from dynamo_megatron.config.files import to_plain
from dynamo_megatron.errors import InputError
from dynamo_megatron.rollout.servers import announcements, supervisor
from dynamo_megatron.rollout.servers.announcements import Announced, NodeSide
from dynamo_megatron.rollout.servers.serve import NodeServers, _serve
from dynamo_megatron.rollout.servers.supervisor import Supervisor
from dynamo_megatron.rollout.worker import RolloutWorker
from dynamo_megatron.types import Prompt

END = 3  # <|im_end|>
PROMPTS = [Prompt(f"p{i}", text="?", tokens=[20 + i, 30, 40]) for i in range(2)]


@pytest.mark.full
def test_a_split_fleet_answers_restarts_and_ends_with_the_run(tiny_model, tmp_path, monkeypatch):
    (tmp_path / "serve_rewards.py").write_text("def length(prompt, response):\n    return float(len(response))\n")
    monkeypatch.chdir(tmp_path)
    config = Config(
        model={"path": str(tiny_model), "dtype": "float32"},
        data={"source": "unused"},
        output_dir=str(tmp_path / "run"),
        rollout={"placement": "split", "servers": 2, "max_new_tokens": 40, "start_timeout": 400},
        reward={"functions": ["serve_rewards:length"], "workers": 1},
    )
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(to_plain(config)))
    nodes = []
    for node in range(2):
        words = ["serve", "config.yaml", "--nodes", "2", "--node", str(node)]
        with open(tmp_path / f"node-{node}.log", "w") as log:
            command = [sys.executable, "-P", "-m", "dynamo_megatron.cli", *words]
            nodes.append(subprocess.Popen(command, stdout=log, stderr=log))
    worker = RolloutWorker(config, [END], VOCABULARY)
    worker.start()
    try:
        worker.wait_ready()
        result = sampled(worker, 1, PROMPTS, [8, 8])
        result.check_accounts(16)
        assert set(result.counts_by_server) == {"server-0", "server-1"} and result.counts["failed"] == 0
        before = {e.name: e for e in worker.begin_sync(2)}
        worker.end_sync(2, {before["server-0"]: "nothing came", before["server-1"]: None})
        deadline = time.monotonic() + 120
        while set(before) != {e.name for e in worker.begin_sync(3)}:
            assert time.monotonic() < deadline, "server-0 did not come back"
            time.sleep(1)
        after = {e.name: e for e in worker.begin_sync(3)}
        assert after["server-0"].incarnation > before["server-0"].incarnation
        assert after["server-1"] == before["server-1"]
        family = [p for node in nodes for p in psutil.Process(node.pid).children(recursive=True)]
        # kill -9 of the rollout process: once rank 0 has closed it, its nodes' servers go.
        os.kill(worker._process.pid, signal.SIGKILL)
        worker.close()
        for node in nodes:
            assert node.wait(120) == 0, (tmp_path / "node-0.log").read_text()
        left = living(family)
        assert left == []
    finally:
        worker.close()
        for node in nodes:
            node.kill()
            node.wait()


def test_the_run_hears_of_servers_that_are_down_for_good(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "PAUSE", 0.0)
    monkeypatch.setattr(announcements, "BEAT_EVERY", 0.05)
    (tmp_path / "logs").touch()  # in the way of the servers' logs
    config, heard = external(["http://unused"], output=tmp_path), []

    class Fleet:
        def down(self, name, why, final):
            heard.append(final)

    async def work():
        running = asyncio.create_task(Announced(tmp_path, ["server-0"], Fleet()).run())
        side = NodeSide(tmp_path, ["server-0"])
        serving = asyncio.create_task(_serve(side, Supervisor(config, ["server-0"], side), config.trainer.timeout))
        async with asyncio.timeout(60):
            while not heard or not heard[-1]:
                await asyncio.sleep(0.02)
            assert not serving.done()
            running.cancel()
            await serving

    asyncio.run(work())


def test_an_error_of_a_node_s_servers_leaves_its_task_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(announcements, "BEAT_EVERY", 0.05)

    async def run():
        raise ExceptionGroup("of a server's task", [InputError("rollout.port: taken")])

    async def work():
        running = asyncio.create_task(Announced(tmp_path, [], None).run())
        try:
            with pytest.raises(InputError, match="taken"):
                await _serve(NodeSide(tmp_path, []), SimpleNamespace(run=run, allow_starts=bool), 60.0)
        finally:
            running.cancel()

    asyncio.run(work())


def test_the_nodes_of_a_killed_rollout_process_are_told_to_end(tiny_model, tmp_path):
    config = Config(
        model={"path": str(tiny_model), "dtype": "float32"},
        data={"source": "unused"},
        output_dir=str(tmp_path),
        rollout={"placement": "split"},
        reward={"functions": ["math"], "workers": 1},
    )
    file = announcements.servers_folder(tmp_path) / announcements.RUN
    worker = RolloutWorker(config, [END], VOCABULARY)
    worker.start()
    try:
        deadline = time.monotonic() + 120
        while not file.exists():
            assert time.monotonic() < deadline, worker.log.read_text()
            time.sleep(0.1)
        os.kill(worker._process.pid, signal.SIGKILL)
    finally:
        worker.close()
    assert not file.exists()


def test_servers_that_are_no_equal_share_are_refused(tiny_model, command_line, tmp_path):
    words = [f"model.path={tiny_model}", "data.source=x", "output_dir=run", "rollout.servers=3"]
    code, said = command_line(tmp_path, "serve", *words, "--nodes", 2, "--node", 0)
    assert code == 2 and said == "rollout.servers: 3 servers are not an equal share for each of 2 nodes\n"
    code, said = command_line(tmp_path, "serve", *words, "--nodes", 3, "--node", 3)
    assert code == 2 and said == "--node: 3 is not one of 0 to 2\n"


def test_a_port_in_use_on_a_training_node_is_refused_there(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = Config(
            model={"path": "none"},
            data={"source": "unused"},
            output_dir=str(tmp_path),
            rollout={"servers": 2, "port": taken.getsockname()[1]},
        )
        with pytest.raises(ValueError, match="cannot be used"):
            NodeServers(config, nodes=2, node=1)
