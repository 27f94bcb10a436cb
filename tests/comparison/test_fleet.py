"""Servers that outlive runs."""

import asyncio
import os
import socket
import time

import psutil
import pytest
from living_processes import living

from dynamo_megatron.comparison import fleet
from dynamo_megatron.comparison.fleet import KEY, keeps_servers, servers
from dynamo_megatron.config import Config
from dynamo_megatron.config.files import ConfigError
from dynamo_megatron.rollout.client import ServerLost, SGLangClient, open_session
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.rollout.servers.endpoint import Endpoint


def config(model, tmp_path, **rollout) -> Config:
    return Config(
        model={"path": str(model), "dtype": "float32"},
        data={"source": "unused"},
        output_dir=str(tmp_path / "run"),
        rollout={"start_timeout": 400, **rollout},
    )


@pytest.mark.parametrize(
    ("rollout", "on_cpu", "on_gpu"),
    [
        ({}, True, False),
        ({"placement": "split"}, True, True),
        ({"placement": "external", "urls": ["http://127.0.0.1:9"]}, False, False),
        ({"engine": "recorded", "recorded": "run"}, False, False),
    ],
)
def test_whose_servers_stay_up(rollout, on_cpu, on_gpu, tmp_path, monkeypatch):
    for cuda, kept in ((False, on_cpu), (True, on_gpu)):
        monkeypatch.setattr(fleet, "cuda_available", lambda cuda=cuda: cuda)
        assert keeps_servers(config("m", tmp_path, **rollout)) is kept


def test_a_port_in_use_is_refused(tmp_path):
    async def work(port: int) -> None:
        async with servers(config("m", tmp_path, port=port), tmp_path, print, lambda: False):
            raise AssertionError("it started")

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"rollout.port: port \d+ of 127.0.0.1 cannot be used"):
            asyncio.run(work(taken.getsockname()[1]))


def test_servers_that_do_not_come_up_end_it(tmp_path):
    async def work() -> None:
        made = servers(config("m", tmp_path, python="/bin/false", start_timeout=2), tmp_path, print, lambda: False)
        async with made:
            raise AssertionError("it started")

    with pytest.raises(RolloutError, match=r"^server-0: .*; see .*/logs$"):
        asyncio.run(work())


@pytest.mark.full
def test_a_server_that_ends_comes_back_at_its_address(tiny_model, tmp_path):
    said = []

    async def answers(url: str, rollout, within: float) -> bool:
        async with open_session() as session:
            client = SGLangClient(session, Endpoint("server-0", 1, url, 1, os.environ[KEY]), rollout, [])
            deadline = time.monotonic() + within
            while time.monotonic() < deadline:
                try:
                    return not (await client.generate("ask", [0, 1], timeout=20.0, max_new_tokens=2)).error
                except ServerLost:
                    await asyncio.sleep(1)
        return False

    async def work() -> list[psutil.Process]:
        made = config(tiny_model, tmp_path)
        async with servers(made, tmp_path, said.append, lambda: False) as keys:
            (url,) = keys["urls"]
            rollout = made.rollout.model_copy(update=keys)
            assert await answers(url, rollout, 20)
            family = psutil.Process().children(recursive=True)
            (http,) = [p for p in family if "sglang.launch_server" in p.cmdline() and "--port" in p.cmdline()][-1:]
            http.kill()
            await asyncio.sleep(3)
            assert await answers(url, rollout, 300), said
            return psutil.Process().children(recursive=True)

    family = asyncio.run(work())
    assert len(said) == 1 and said[0].startswith("server-0 is started again: the SGLang server ended")
    assert living(family) == []
