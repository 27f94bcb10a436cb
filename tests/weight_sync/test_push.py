"""Pushes to real servers: after each, checksums and greedy outputs are those of the policy's weights."""

import dataclasses
import json
import os
import threading
import time
import uuid
from pathlib import Path

import psutil
import pytest

from dynamo_megatron.rollout.servers.server_api import call

TRANSPORTS = ("tensor", "gloo", "disk")
LAYOUTS = {"tp2": (2, {"tp": 2}), "pp2": (2, {"pp": 2}), "tp2-pp2": (4, {"tp": 2, "pp": 2})}
MIXTURES = {
    "ep2": (2, {"ep": 2}),
    "tp2-ep2": (2, {"tp": 2, "ep": 2, "sequence_parallel": True}),
    "pp2-ep2": (4, {"pp": 2, "ep": 2}),
}


def proved(push, *names):
    """Proved by the push itself, and against weights that were computed apart from it."""
    for name in names:
        assert push["outcomes"][name] is None, push
        assert push["servers"][name] == {"checksum": None, "greedy": None, "version": str(push["version"])}, push


def check(seen, transports, pushes, servers):
    endpoints = [server.endpoint for server in servers]
    assert [push["transport"] for push in seen] == [t for t in transports for _ in range(pushes)]
    for push in seen:
        proved(push, *(e.name for e in endpoints))
        assert 0 < push["pause_seconds"] <= push["seconds"]
        assert push["buckets"] > 3
        # SGLang's groups give every rank of a server whole tensors (docs/resharding.md).
        copies = max(e.tp for e in endpoints) if push["transport"] == "gloo" else 1
        assert push["bytes"] <= 1.05 * copies * push["floor_bytes"]


def log_of(server) -> str:
    """Up to this call, whose own line is waited for: another process copies the server's output to its log."""
    asked = f"/model_info?{uuid.uuid4().hex}"
    call(server.endpoint, asked, None, 60)
    deadline = time.monotonic() + 60
    while f"GET {asked} " not in (text := server.log.read_text()):
        assert time.monotonic() < deadline, text[-3000:]
        time.sleep(0.05)
    return text


def test_a_tp2_pp2_policy(tiny_model, sglang_server, run_pushes, tmp_path):
    layouts = {"tp2-pp2": LAYOUTS["tp2-pp2"]}
    job = {"model": tiny_model, "dtype": "float32", "servers": [sglang_server], "layouts": layouts}
    before = log_of(sglang_server)
    seen = run_pushes(tmp_path / "job", transports=TRANSPORTS, pushes=2, **job)
    check(seen["tp2-pp2"], TRANSPORTS, 2, [sglang_server])
    # The servers are asked for their device once, each transport being a job of its own to them. A push drops cached
    # prefixes before and after it sends, but for the disk's, whose last call does it; one more push from the disk puts
    # the server's weights back.
    calls = log_of(sglang_server)[len(before) :]
    assert calls.count("GET /server_info ") == len(TRANSPORTS)
    assert calls.count("POST /flush_cache?") == 2 * 2 + 2 * 2 + 2 + 1


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "dtype", "tied"),
    [("qwen2", "float32", False), ("llama", "bfloat16", True), ("qwen3", "bfloat16", False)],
)
def test_three_servers(make_tiny_model, start_servers, run_pushes, tmp_path, family, dtype, tied):
    model = make_tiny_model(tmp_path / "model", family=family, dtype=dtype, tied=tied, vocab=131)
    servers = start_servers(model, dtype, (1, 1, 2), tmp_path)
    job = {"model": model, "dtype": dtype, "servers": servers, "layouts": LAYOUTS}
    seen = run_pushes(tmp_path / "job", transports=TRANSPORTS, pushes=5, **job)
    for name in LAYOUTS:
        check(seen[name], TRANSPORTS, 5, servers)
    for server in servers:
        server.stop()


@pytest.mark.full
def test_experts_of_several_ranks(make_tiny_model, start_servers, run_pushes, tmp_path):
    # SGLang pads experts of other widths on a CPU.
    model = make_tiny_model(tmp_path / "model", family="qwen3_moe", dtype="float32", expert_ffn=64)
    servers = start_servers(model, "float32", (1, 2), tmp_path)
    job = {"model": model, "dtype": "float32", "servers": servers, "layouts": MIXTURES}
    seen = run_pushes(tmp_path / "job", transports=TRANSPORTS, pushes=3, **job)
    for name in MIXTURES:
        check(seen[name], TRANSPORTS, 3, servers)
    for server in servers:
        server.stop()


@pytest.mark.full
@pytest.mark.parametrize("transport", ["tensor", "gloo"])
def test_a_server_killed_in_the_middle_of_a_push(tiny_model, start_servers, run_pushes, tmp_path, transport):
    servers = start_servers(tiny_model, "float32", (1, 1), tmp_path)
    folder = tmp_path / "job"

    def bring_back():
        while not (folder / "killed").exists():
            time.sleep(0.2)
        servers.extend(start_servers(tiny_model, "float32", (1,), tmp_path, name="server-1", incarnation=2))
        (folder / "back.part").write_text(json.dumps(dataclasses.asdict(servers[-1].endpoint)))
        (folder / "back.part").rename(folder / "back.json")

    threading.Thread(target=bring_back, daemon=True).start()
    job = {
        "model": tiny_model,
        "dtype": "float32",
        "servers": servers,
        "layouts": {"tp2-pp2": LAYOUTS["tp2-pp2"]},
    }
    guard = psutil.Process(servers[1]._process.pid)
    kill = [process.pid for process in guard.children(recursive=True)]
    seen = run_pushes(folder, run="kill", transports=(transport,), kill=kill, **job)["tp2-pp2"]
    proved(seen[0], "server-0", "server-1")
    proved(seen[1], "server-0")
    assert "no answer" in seen[1]["outcomes"]["server-1"]
    proved(seen[2], "server-0")
    proved(seen[3], "server-0", "server-1")
    assert all(push["seconds"] < 100 for push in seen)
    for server in servers:
        server.stop()


@pytest.mark.full
def test_a_withheld_tensor_is_caught(tiny_model, start_servers, run_pushes, tmp_path):
    servers = start_servers(tiny_model, "float32", (1,), tmp_path)
    job = {"model": tiny_model, "dtype": "float32", "servers": servers, "layouts": {"tp2": LAYOUTS["tp2"]}}
    withheld = "model.layers.1.self_attn.k_proj.weight"
    first, second = run_pushes(tmp_path / "job", run="withheld", transports=("tensor",), withheld=withheld, **job)[
        "tp2"
    ]
    assert "model.layers.1.self_attn.qkv_proj.weight" in first["outcomes"]["server-0"]
    proved(second, "server-0")
    for server in servers:
        server.stop()


@pytest.mark.full
def test_weights_that_were_replaced_since_the_last_push_are_noticed_before_the_next_one(
    tiny_model, start_servers, run_pushes, tmp_path
):
    servers = start_servers(tiny_model, "float32", (1, 1), tmp_path)
    job = {"model": tiny_model, "dtype": "float32", "servers": servers, "layouts": {"tp2": LAYOUTS["tp2"]}}
    seen = run_pushes(tmp_path / "job", run="replaced", transports=("tensor",), max_staleness=1, **job)["tp2"]
    for push in (*seen[:2], seen[3]):
        proved(push, "server-0", "server-1")
    assert seen[2]["outcomes"]["server-0"].startswith("its weights were no longer those of the last push: ")
    assert seen[2]["distrusted"] == {"server-0": seen[2]["outcomes"]["server-0"]}
    proved(seen[2], "server-1")
    for server in servers:
        server.stop()


@pytest.mark.full
def test_servers_with_fp8_weights(make_tiny_model, start_servers, run_pushes, tmp_path, monkeypatch):
    """SGLang's own loaders and checker; the products of the layers are a stand-in's (fp8_on_cpu)."""
    stand_in = Path(__file__).with_name("fp8_on_cpu")
    inherited = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(stand_in), *([inherited] if inherited else [])]))
    sizes = {"hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 128, "ffn": 256}
    model = make_tiny_model(tmp_path / "model", family="qwen3", dtype="bfloat16", vocab=131, **sizes)
    servers = start_servers(model, "bfloat16", (1, 2), tmp_path, quantization="fp8")
    job = {"model": model, "dtype": "bfloat16", "quantization": "fp8"}
    layouts = {"tp2": LAYOUTS["tp2"]}
    seen = run_pushes(tmp_path / "job", transports=TRANSPORTS, pushes=2, servers=servers, layouts=layouts, **job)
    check(seen["tp2"], TRANSPORTS, 2, servers)
    # A scale that does not arrive is noticed as its weight.
    withheld = "model.layers.1.self_attn.k_proj.weight_scale_inv"
    job |= {"run": "withheld", "withheld": withheld, "transports": ("tensor",), "servers": servers[:1]}
    first, second = run_pushes(tmp_path / "withheld", layouts=layouts, **job)["tp2"]
    assert "1 differing: model.layers.1.self_attn.qkv_proj.weight" in first["outcomes"]["server-0"]
    proved(second, "server-0")
    for server in servers:
        server.stop()
