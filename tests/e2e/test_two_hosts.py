"""A run over two hosts, which are two network namespaces: each host's own name means loopback there."""

import json
import re
import sys

import pytest
from two_hosts import ADDRESSES, INTERFACE, NAMES, two_hosts

pytestmark = pytest.mark.full
PORT = "29617"


@pytest.fixture
def hosts(tmp_path):
    with two_hosts(tmp_path) as made:
        if isinstance(made, str):
            pytest.skip(made)
        yield made


@pytest.fixture
def on_both(hosts, workspace, tmp_path):
    """on_both(*words) -> (exit code, output) of `dynamo-megatron WORDS` as a rank on each host."""

    def run(*words, timeout=500):
        command = [sys.executable, "-P", "-m", "dynamo_megatron.cli", *map(str, words)]
        job = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
        job |= {"MASTER_ADDR": NAMES[0], "MASTER_PORT": PORT}
        logs = [tmp_path / f"{words[0]}-{rank}.log" for rank in range(2)]
        started = [
            hosts.start(rank, ["env", "-C", str(workspace), *command], {**job, "RANK": str(rank)}, log)
            for rank, log in enumerate(logs)
        ]
        return [(p.wait(timeout), log.read_text()) for p, log in zip(started, logs, strict=True)]

    return run


def test_a_live_run_with_a_server_on_each_host(hosts, on_both, workspace, tmp_path):
    hosts.route()
    output = tmp_path / "run"
    keys = (f"rollout.host={INTERFACE}", "rollout.servers=2", "rollout.sync.transport=gloo", "trainer.steps=3")
    config = (workspace / "config.yaml", *keys, f"output_dir={output}")
    (code, said), _ = on_both("preflight", *config, "--no-server")
    assert code == 0, said
    assert "all-reduce over 2 ranks, gloo" in said
    found = on_both("train", *config)
    assert [code for code, _ in found] == [0, 0], "\n".join(text[-3000:] for _, text in found)
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["rollout/logprob_gap_max"] <= 1e-4 and row["rollout/failed"] == row["fleet/restarts"] == 0
    for server, address in enumerate(ADDRESSES):
        log = (output / "logs" / f"sglang-server-{server}.log").read_text()
        assert re.search(r"'host': '([\d.]+)'", log)[1] == address
        # Both ranks, each a pipeline stage, have sent to it over the link.
        assert set(re.findall(r"init custom process group: master_address=([\d.]+)", log)) == set(ADDRESSES)
