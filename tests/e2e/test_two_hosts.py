"""A run over two hosts, which are network namespaces on this machine with a link between them. Each has a host name of
its own that its /etc/hosts takes for loopback, as Debian's installer writes it. What makes them needs root."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from background_run import step_lines

pytestmark = pytest.mark.full
INTERFACE, NAMES, ADDRESSES = "lan", ("first-host", "second-host"), ("10.213.77.1", "10.213.77.2")
# In namespaces of its own: the host's name, what it and the other's mean there, then the command.
ENTER = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
RANKS = {"MASTER_ADDR": NAMES[0], "MASTER_PORT": "29617", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def shell(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=60)


def make_hosts(spaces: list[str], folder: Path, started: ExitStack) -> None:
    """Two linked namespaces, which are deleted with `started`, and the hosts' tables in `folder`."""
    shell("unshare", "--net", "--uts", "--mount", "true")
    for space in spaces:
        shell("ip", "netns", "add", space)
        started.callback(shell, "ip", "netns", "del", space)
    link = ["type", "veth", "peer", "name", INTERFACE, "netns", spaces[1]]
    shell("ip", "link", "add", INTERFACE, "netns", spaces[0], *link)
    for space, own, address in zip(spaces, NAMES, ADDRESSES, strict=True):
        shell("ip", "-n", space, "address", "add", f"{address}/24", "dev", INTERFACE)
        for each in ("lo", INTERFACE):
            shell("ip", "-n", space, "link", "set", each, "up")
        shell("ip", "-n", space, "route", "add", "default", "dev", INTERFACE)
        rows = [f"{'127.0.1.1' if name == own else at} {name}\n" for name, at in zip(NAMES, ADDRESSES, strict=True)]
        (folder / own).write_text("127.0.0.1 localhost\n" + "".join(rows))


@pytest.fixture
def on_both(workspace, tmp_path):
    """on_both(*words) -> (exit code, output) of `dynamo-megatron WORDS` as a rank on each host."""
    if missing := [program for program in ("ip", "unshare") if shutil.which(program) is None]:
        pytest.skip(f"there is no {missing[0]} (iproute2, util-linux)")
    spaces = [f"dm{os.getpid()}-{i}" for i in range(2)]
    with ExitStack() as started:
        try:
            make_hosts(spaces, tmp_path, started)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces: {error.stderr.strip()}")

        def run(*words: object) -> list[tuple[int, str]]:
            logs, processes = [tmp_path / f"{words[0]}-{rank}.log" for rank in range(2)], []
            for rank, (space, name, log) in enumerate(zip(spaces, NAMES, logs, strict=True)):
                command = ["ip", "netns", "exec", space, "unshare", "--uts", "--mount", "sh", "-c", ENTER]
                command += [name, tmp_path / name, sys.executable, "-P", "-m", "dynamo_megatron.cli", *words]
                with open(log, "w") as file:
                    process = subprocess.Popen(
                        [*map(str, command)],
                        cwd=workspace,
                        env={**os.environ, "OMP_NUM_THREADS": "1", **RANKS, "RANK": str(rank)},
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                started.callback(process.wait)
                started.callback(process.kill)
                processes.append(process)
            return [(process.wait(500), log.read_text()) for process, log in zip(processes, logs, strict=True)]

        yield run


def test_a_live_run_with_a_server_on_each_host(on_both, workspace, tmp_path):
    output = tmp_path / "run"
    keys = (f"rollout.host={INTERFACE}", "rollout.servers=2", "rollout.sync.transport=gloo", "trainer.steps=3")
    config = (workspace / "config.yaml", *keys, f"output_dir={output}")
    (code, said), _ = on_both("preflight", *config, "--no-server")
    assert code == 0, said
    found = on_both("train", *config)
    assert [code for code, _ in found] == [0, 0], "\n".join(text[-3000:] for _, text in found)
    rows = step_lines(output)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["rollout/logprob_gap_max"] <= 1e-4 and row["rollout/failed"] == row["fleet/restarts"] == 0
    for server, address in enumerate(ADDRESSES):
        log = (output / "logs" / f"sglang-server-{server}.log").read_text()
        assert re.search(r"'host': '([\d.]+)'", log)[1] == address
        # Both ranks, each a pipeline stage, have sent to it over the link.
        assert set(re.findall(r"init custom process group: master_address=([\d.]+)", log)) == set(ADDRESSES)
