"""`dynamo-megatron serve` and the run that it serves; real servers: tests/launcher/test_slurm.py."""

import asyncio
import os
import signal
import socket

import pytest
from living_processes import wait_until
from stand_ins import VOCABULARY, Recorder, external, until

from dynamo_megatron.config import Config
from dynamo_megatron.rollout.servers import announcements, supervisor
from dynamo_megatron.rollout.servers.announcements import Announced, NodeSide
from dynamo_megatron.rollout.servers.serve import NodeServers, _serve
from dynamo_megatron.rollout.servers.supervisor import Supervisor
from dynamo_megatron.rollout.worker import RolloutWorker


def config_of(folder, model: str = "none", **rollout) -> Config:
    return Config(
        model={"path": model},
        data={"source": "unused"},
        output_dir=str(folder),
        rollout=rollout,
        reward={"functions": ["math"], "workers": 1},
    )


def test_the_run_hears_of_servers_that_are_down_for_good(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(supervisor, "PAUSE", 0.0)
    monkeypatch.setattr(announcements, "BEAT_EVERY", 0.05)
    (tmp_path / "file").touch()  # in the way of the servers' logs
    config, fleet = external(["http://unused"], output=tmp_path / "file"), Recorder()

    async def work():
        running = asyncio.create_task(Announced(tmp_path, ["server-0"], fleet).run())
        side = NodeSide(tmp_path, ["server-0"])
        serving = asyncio.create_task(_serve(side, Supervisor(config, ["server-0"], side), config.trainer.timeout))
        await until(lambda: any(final for *_, final in fleet.heard))
        assert not serving.done()
        running.cancel()
        await asyncio.wait_for(serving, 60)

    asyncio.run(work())
    (why,) = (why for _, _, why, final in fleet.heard if final)
    said = capsys.readouterr().out  # the process's log
    assert "Not a directory" in why and f"server-0, start 1: {why}\n" in said
    assert said.count("server-0, start ") == supervisor.FAILED_STARTS == 4


def test_the_nodes_of_a_killed_rollout_process_are_told_to_end(tiny_model, tmp_path):
    config = config_of(tmp_path, str(tiny_model), placement="split")
    file = announcements.servers_folder(tmp_path) / announcements.RUN
    worker = RolloutWorker(config, [3], VOCABULARY)
    worker.start()
    try:
        wait_until(file.exists, worker.log, 120)
        os.kill(worker._process.pid, signal.SIGKILL)
    finally:
        worker.close()
    assert not file.exists()


def test_a_node_that_is_not_there_is_refused(tiny_model, command_line, tmp_path):
    words = [f"model.path={tiny_model}", "data.source=x", "output_dir=run", "rollout.servers=3"]
    code, said = command_line(tmp_path, "serve", *words, "--nodes", 3, "--node", 3)
    assert code == 2 and said == "--node: 3 is not one of 0 to 2\n"


def test_a_port_in_use_on_a_training_node_is_refused_there(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match="cannot be used"):
            NodeServers(config_of(tmp_path, servers=2, port=taken.getsockname()[1]), nodes=2, node=1)
