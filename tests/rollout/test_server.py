import asyncio
import json
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
import torch
from living_processes import wait_until
from transformers import AutoModelForCausalLM

from dynamo_megatron.config import ModelConfig, RolloutConfig
from dynamo_megatron.config.rollout import FP8_CONFIG
from dynamo_megatron.rollout.client import SGLangClient, open_session
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.rollout.servers import server as server_module
from dynamo_megatron.rollout.servers.server import LONGER_CONTEXT, SGLangServer, check_reachable, library_path
from dynamo_megatron.rollout.servers.server_api import call

END = 3  # <|im_end|>


@pytest.mark.parametrize("host", ["127.0.0.1", "lo", "localhost"])
def test_servers_beside_ranks_of_several_hosts_are_not_each_hosts_own(host):
    with pytest.raises(ValueError, match=f"rollout.host: '{host}' .*on 2 \\(node-a, node-b...\\)"):
        check_reachable(RolloutConfig(host=host), ["node-a", "node-b", "node-a"])
    check_reachable(RolloutConfig(host=host), ["node-a", "node-a"])  # virtual nodes of one machine
    check_reachable(RolloutConfig(host=host, placement="split"), ["node-a", "node-b"])
    check_reachable(RolloutConfig(host="192.0.2.7"), ["node-a", "node-b"])


def program(folder: Path, text: str) -> str:
    """An interpreter for a server."""
    (folder / "program").write_text(text)
    (folder / "program").chmod(0o755)
    return str(folder / "program")


def started_with(folder, model, cached_tokens=None, **config) -> list[str]:
    """The words that a server is started with, and two variables."""
    words, log = f'"$@" longer=${LONGER_CONTEXT} "path $PYTHONPATH" end', folder / "sglang.log"
    python = program(folder, f'#!/bin/sh\nprintf "%s\\n" {words}\nexec sleep 100\n')
    log.unlink(missing_ok=True)
    server = SGLangServer(RolloutConfig(python=python, **config), model, log, cached_tokens=cached_tokens)
    server.start()
    try:
        wait_until(lambda: "\nend\n" in log.read_text(), log)
    finally:
        server.stop()
    return log.read_text().splitlines()


@pytest.mark.parametrize(
    ("longest", "given", "context"),
    [(None, [], "2054"), (2044, [], "2050"), (1024, [], None), (None, ["--context-length=512"], None)],
)
def test_a_server_has_room_for_sequences_of_the_models_length(tmp_path, monkeypatch, longest, given, context):
    monkeypatch.delenv(LONGER_CONTEXT, raising=False)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 2048}')
    words = started_with(tmp_path, ModelConfig(path=str(tmp_path), max_length=longest), server_args=given)
    assert f"longer={'1' if context else ''}" in words and set(given) <= set(words)
    assert (words[words.index("--context-length") + 1] if "--context-length" in words else None) == context


def test_a_server_that_is_restarted_beside_ranks_has_the_cache_that_it_had(tmp_path, monkeypatch, sglang_server):
    monkeypatch.setattr(server_module, "cuda_available", lambda: True)
    words = started_with(tmp_path, ModelConfig(path=str(tmp_path)), 500, memory_fraction=0.3, offload=False)
    fraction, tokens = (words[words.index(f"--{name}") + 1] for name in ("mem-fraction-static", "max-total-tokens"))
    assert float(fraction) > 0.3 and int(tokens) == 500 and sglang_server.cached_tokens >= 16384


@pytest.mark.parametrize("looks_for_text", [{}, {"stop": ["\n"]}, {"agent": "my_agent:run"}], ids=str)
def test_a_server_has_a_tokenizer_if_text_is_looked_for_in_what_it_samples(tmp_path, looks_for_text):
    words = started_with(tmp_path, ModelConfig(path=str(tmp_path)), **looks_for_text)
    assert ("--skip-tokenizer-init" in words) == (not looks_for_text)


def test_a_server_runs_without_megatron(tmp_path):
    words = started_with(tmp_path, ModelConfig(path=str(tmp_path)))
    (path,) = (word.removeprefix("path ") for word in words if word.startswith("path "))
    command = [sys.executable, "-P", "-c", "import megatron.core"]
    tried = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert "ImportError: a server runs without Megatron" in tried.stderr


def test_the_key_of_a_server_that_never_started_or_whose_guard_was_killed_goes(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config = RolloutConfig(python=program(tmp_path, "#!/bin/sh\nexec sleep 100\n"))
    server = SGLangServer(config, ModelConfig(path=str(tmp_path)), tmp_path / "sglang.log")
    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(server_module.subprocess, "Popen", Mock(side_effect=OSError))
        server.start()
    left, server._folders = [Path(folder) for folder in server._folders], []
    assert len(left) == 2 and not any(folder.exists() for folder in left)
    server.start()
    folders = [Path(folder) for folder in server._folders]
    assert (folders[0] / "server.yaml").stat().st_mode & 0o777 == 0o600
    server._process.kill()
    server._process.wait()
    server.stop()
    assert not any(folder.exists() for folder in folders)


def test_the_cuda_runtime_of_pip_is_found(tmp_path, monkeypatch):
    library = tmp_path / "nvidia" / "cu99" / "lib" / "libcudart.so.99"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/own")
    folders = library_path(sys.executable).split(":")
    assert folders[0] == str(library.parent) and folders[-1] == "/own"


FALLS = f"""#!{sys.executable}
import http.server, json, os, sys
word = lambda name: sys.argv[sys.argv.index(name) + 1]
class Falls(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({{"served_model_name": word("--served-model-name"), "max_total_num_tokens": 9}}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        os._exit(9)
http.server.HTTPServer((word("--host"), int(word("--port"))), Falls).serve_forever()
"""
BAD_OPTION = "#!/bin/sh\necho 'launch_server.py: error: unrecognized arguments: --no'\necho bye\nexit 2\n"


@pytest.mark.parametrize(
    ("text", "timeout", "why"),
    [
        (BAD_OPTION, 120, r"ended \(exit code 2\): .*unrecognized arguments: --no;"),
        ("#!/bin/sh\nexec sleep 100\n", 1, r"did not answer within rollout.start_timeout \(1 s\)"),
        (FALLS, 120, "does not answer"),  # it falls in its first request
        # somebody else's at the port: needs no key, answers anything
        (FALLS.replace('word("--served-model-name")', '"server-0"'), 120, "answered by another server"),
    ],
    ids=["ends", "silent", "falls", "another"],
)
def test_a_start_that_failed_is_an_error_after_which_another_follows(tmp_path, text, timeout, why):
    log = tmp_path / "sglang.log"
    log.write_text("OldError: of an earlier start\n")
    config = RolloutConfig(python=program(tmp_path, text), start_timeout=timeout)
    server = SGLangServer(config, ModelConfig(path=str(tmp_path)), log)
    server.start()
    try:
        with pytest.raises(RolloutError, match=why):
            asyncio.run(server.wait_ready())
    finally:
        server.stop()


def test_nobody_else_can_use_or_reach_a_server(sglang_server):
    log, key = sglang_server.log, sglang_server.endpoint.api_key
    assert stat.S_IMODE(log.stat().st_mode) == 0o600 and len(key) == 64
    family = psutil.Process(sglang_server._process.pid).children(recursive=True)
    assert len(family) >= 3 and all(key not in " ".join(p.cmdline()) for p in family)
    listening = [c.laddr for p in family for c in p.net_connections("inet") if c.status == "LISTEN"]
    assert {address.ip for address in listening} == {"127.0.0.1"}


def test_a_server_freezes_its_heap_after_its_first_request(sglang_server):
    calls = sglang_server.log.read_text()
    assert calls.index("POST /generate ") < calls.rfind("POST /freeze_gc ")


@pytest.mark.full
def test_the_logits_of_a_bfloat16_server_are_float32(make_tiny_model, tmp_path, monkeypatch):
    for name, value in {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": "1", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)  # as under torchrun
    model = make_tiny_model(tmp_path / "model", family="qwen3", dtype="bfloat16", seed=5)
    config = RolloutConfig(max_new_tokens=64, start_timeout=400)
    server = SGLangServer(config, ModelConfig(path=str(model), dtype="bfloat16"), tmp_path / "sglang.log")

    async def respond():
        await server.wait_ready()
        async with open_session() as session:
            response = await SGLangClient(session, server.endpoint, config, [END]).generate("one", [20, 30, 40])
        sampling = {"temperature": 1.0, "max_new_tokens": 8, "ignore_eos": True}
        payload = {"input_ids": [20], "return_logprob": True, "top_logprobs_num": 4, "sampling_params": sampling}
        reply = await asyncio.to_thread(call, server.endpoint, "/generate", payload, 60.0)
        return response, reply["meta_info"]["output_top_logprobs"]

    server.start()
    try:
        response, top_logprobs = asyncio.run(respond())
    finally:
        server.stop()
    assert len(response.tokens) == len(response.logprobs) > 0
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    tokens = torch.tensor([[20, 30, 40, *response.tokens]])
    with torch.no_grad():
        hidden = policy.model(tokens).last_hidden_state
        logprobs = (hidden.float() @ policy.lm_head.weight.float().T).log_softmax(-1)[0, 2:-1]
    expected = logprobs.gather(-1, tokens[0, 3:, None])[:, 0]
    assert (expected - torch.tensor(response.logprobs)).abs().mean() < 0.03  # bfloat16 hidden states
    # Logits of a bfloat16 head are multiples of 2^-9 where they are above 1/2, and so are their differences.
    best = torch.tensor([[logprob for logprob, *_ in position] for position in top_logprobs], dtype=torch.float64)
    steps = (best[:, :1] - best[:, 1:]) * 2**9
    assert (steps - steps.round()).abs().mean() > 0.1


@pytest.mark.parametrize("quantization", ["fp8", None])
def test_a_server_with_fp8_weights_is_told_their_form_and_waits_for_them(tmp_path, quantization):
    given = ["--json-model-override-args", '{"num_hidden_layers": 2}', "--log-level", "info"]
    words = started_with(tmp_path, ModelConfig(path="unused"), quantization=quantization, server_args=given)
    assert words.count("--json-model-override-args") == 1 and words[words.index("--log-level") + 1] == "info"
    override = json.loads(words[words.index("--json-model-override-args") + 1])
    plugins = next(word for word in words if word.startswith("path "))
    if quantization is None:
        assert override == {"num_hidden_layers": 2} and "--load-format" not in words and "sglang_fp8" not in plugins
    else:
        assert override == {"num_hidden_layers": 2, "quantization_config": FP8_CONFIG}
        assert words[words.index("--load-format") + 1] == "dummy" and "sglang_fp8" in plugins
