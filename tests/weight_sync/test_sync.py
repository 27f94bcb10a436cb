"""Weight syncs with real servers: after each, their checksums are those of the policy's weights."""

import dataclasses
import json
import os
import re
import threading
import time
from pathlib import Path

import psutil
import pytest
from layout_cases import FAMILIES, LAYOUTS
from safetensors.torch import load_file

TRANSPORTS = ("tensor", "gloo", "disk")
TP2_PP2 = {"tp2-pp2": (4, {"tp": 2, "pp": 2})}
ADAPTERS = {  # family: layout and targets
    "qwen3": ("TP2", ["attention"]),
    "mistral": ("PP2", ["attention", "mlp"]),
    "qwen3_moe": ("EP2", ["attention"]),
}
LINEARS = {"attention": r"self_attn\.[qkvo]_proj\.weight", "mlp": r"mlp\.(gate|up|down)_proj\.weight"}


def proved(sync, *names):
    """Proved by the sync itself, and against weights that were computed apart from it."""
    for name in names:
        assert sync["outcomes"][name] is None, sync
        assert sync["servers"][name] == {"checksum": None, "version": str(sync["version"])}, sync


def check(seen, syncs, servers):
    endpoints = [server.endpoint for server in servers]
    assert [sync["transport"] for sync in seen] == [t for t in TRANSPORTS for _ in range(syncs)]
    for sync in seen:
        proved(sync, *(e.name for e in endpoints))
        assert 0 < sync["pause_seconds"] <= sync["seconds"]
        assert sync["buckets"] > 3
        # SGLang's groups give every rank of a server whole tensors.
        copies = max(e.tp for e in endpoints) if sync["transport"] == "gloo" else 1
        assert sync["bytes"] <= 1.05 * copies * sync["floor_bytes"]


def test_a_tp2_pp2_policy(tiny_model, sglang_server, run_syncs, tmp_path):
    job = {"model": tiny_model, "dtype": "float32", "servers": [sglang_server], "layouts": TP2_PP2}
    seen = run_syncs(tmp_path / "job", transports=TRANSPORTS, syncs=2, **job)
    check(seen["tp2-pp2"], 2, [sglang_server])


def test_after_the_first_sync_only_what_adapters_change_is_sent(tiny_model, sglang_server, run_syncs, tmp_path):
    job = {"model": tiny_model, "dtype": "float32", "servers": [sglang_server], "layouts": {"tp2": (2, {"tp": 2})}}
    job["lora"] = {"rank": 4, "targets": ["attention"]}
    first, second = run_syncs(tmp_path / "job", transports=("tensor",), syncs=2, **job)["tp2"]
    for sync in (first, second):
        proved(sync, sglang_server.endpoint.name)
        assert sync["floor_bytes"] <= sync["bytes"] <= 1.1 * sync["floor_bytes"]
    attention = 2 * 4 * (64 * (64 + 2 * 32) + 64 * 64)  # of two layers, four bytes each
    assert first["floor_bytes"] > 3 * attention and second["floor_bytes"] == attention


def check_adapters(seen, targets, model, servers):
    """The second sync through each transport, but for the files, sends what adapters change and no more."""
    check(seen, 2, servers)
    sizes = {name: tensor.nbytes for name, tensor in load_file(model / "model.safetensors").items()}
    wanted, whole = "|".join(LINEARS[target] for target in targets), sum(sizes.values())
    some = sum(size for name, size in sizes.items() if re.search(wanted, name))
    ranks = sum(server.endpoint.tp for server in servers)
    for transport, first, second in zip(TRANSPORTS, seen[::2], seen[1::2], strict=True):
        copies, handles = ranks if transport == "gloo" else 1, 2000 * ranks if transport == "tensor" else 0
        for sync, size in ((first, whole), (second, whole if transport == "disk" else some)):
            assert 0 <= sync["bytes"] - copies * size <= handles * sync["buckets"], sync


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_two_servers(make_tiny_model, start_servers, run_syncs, tmp_path, family):
    dtype, names = FAMILIES[family]["sync"]
    layouts = {name: LAYOUTS[name] for name in names.split()}
    tied = FAMILIES[family]["model"].get("tied", False)
    model = make_tiny_model(tmp_path / "model", family=family, dtype=dtype, tied=tied, vocab=131)
    servers = start_servers(model, dtype, (1, 2), tmp_path)
    job = {"model": model, "dtype": dtype, "servers": servers, "layouts": layouts}
    seen = run_syncs(tmp_path / "job", transports=TRANSPORTS, syncs=1, **job)
    for name in layouts:
        check(seen[name], 1, servers)
    if family in ADAPTERS:
        layout, targets = ADAPTERS[family]
        job |= {"layouts": {layout: LAYOUTS[layout]}, "lora": {"rank": 4, "targets": targets}}
        seen = run_syncs(tmp_path / "adapters", transports=TRANSPORTS, syncs=2, **job)
        check_adapters(seen[layout], targets, model, servers)


@pytest.mark.full
def test_a_server_killed_in_the_middle_of_a_sync(tiny_model, start_servers, run_syncs, tmp_path):
    servers = start_servers(tiny_model, "float32", (1, 1), tmp_path)
    folder = tmp_path / "job"

    def bring_back():
        while not (folder / "killed").exists():
            time.sleep(0.2)
        servers.extend(start_servers(tiny_model, "float32", (1,), tmp_path, name="server-1", incarnation=2))
        (folder / "back.part").write_text(json.dumps(dataclasses.asdict(servers[-1].endpoint)))
        (folder / "back.part").rename(folder / "back.json")

    threading.Thread(target=bring_back, daemon=True).start()
    guard = psutil.Process(servers[1]._process.pid)
    kill = [process.pid for process in guard.children(recursive=True)]
    job = {"model": tiny_model, "dtype": "float32", "servers": servers, "layouts": TP2_PP2}
    seen = run_syncs(folder, run="kill", transports=("gloo",), kill=kill, **job)["tp2-pp2"]
    proved(seen[0], "server-0", "server-1")
    proved(seen[1], "server-0")
    assert "no answer" in seen[1]["outcomes"]["server-1"]
    proved(seen[2], "server-0")
    proved(seen[3], "server-0", "server-1")


@pytest.mark.full
def test_servers_with_fp8_weights(make_tiny_model, start_servers, run_syncs, tmp_path, monkeypatch):
    """SGLang's own loaders and checker; the products of the layers are a stand-in's (fp8_on_cpu)."""
    stand_in = Path(__file__).with_name("fp8_on_cpu")
    inherited = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(stand_in), *([inherited] if inherited else [])]))
    sizes = {"hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 128, "ffn": 256}
    model = make_tiny_model(tmp_path / "model", family="qwen3", dtype="bfloat16", vocab=131, **sizes)
    servers = start_servers(model, "bfloat16", (2,), tmp_path, quantization="fp8")
    job = {"model": model, "dtype": "bfloat16", "quantization": "fp8", "servers": servers}
    job["layouts"] = {"tp2": (2, {"tp": 2})}
    check(run_syncs(tmp_path / "job", transports=TRANSPORTS, syncs=1, **job)["tp2"], 1, servers)
    # A scale that does not arrive is noticed as its weight.
    withheld = "model.layers.1.self_attn.k_proj.weight_scale_inv"
    job |= {"run": "withheld", "withheld": withheld, "transports": ("tensor",)}
    first, second = run_syncs(tmp_path / "withheld", **job)["tp2"]
    assert (
        "1 parameters are not those that were sent: model.layers.1.self_attn.qkv_proj.weight"
        in first["outcomes"]["server-0"]
    )
    proved(second, "server-0")
