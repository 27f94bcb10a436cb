"""The CUDA runtime that pip has installed, for what SGLang preloads into its ranks: with a library of that name."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from dynamo_megatron.config import ModelConfig, RolloutConfig
from dynamo_megatron.preflight import memory_saver_check
from dynamo_megatron.preflight.findings import run_checks
from dynamo_megatron.rollout.servers import server
from dynamo_megatron.rollout.servers.server import SGLangServer

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="compiles a library")
# As SGLang's engine: its ranks are started with the hook preloaded.
LAUNCH_SERVER = """
import os, subprocess
from torch_memory_saver.utils import get_binary_path_from_package
hook = get_binary_path_from_package("torch_memory_saver_hook_mode_preload")
rank = subprocess.run(["/bin/true"], env={**os.environ, "LD_PRELOAD": hook}, capture_output=True, text=True)
print("rank:", rank.returncode, rank.stderr, "end", flush=True)
"""


@pytest.fixture
def site(tmp_path, monkeypatch) -> Path:
    """A folder of packages: nvidia/cu99, a torch_memory_saver whose hook needs it, and an SGLang that starts a rank."""
    site, runtime = tmp_path / "site", tmp_path / "site" / "nvidia" / "cu99" / "lib"
    for folder in (runtime, site / "sglang", site / "torch_memory_saver"):
        folder.mkdir(parents=True)
    gcc, no_code = ["gcc", "-shared", "-fPIC", "-xc", "/dev/null"], ["-Wl,--no-as-needed"]
    subprocess.run([*gcc, "-Wl,-soname,libcudart.so.99", "-o", runtime / "libcudart.so.99"], check=True)
    hook = site / "hook.so"
    subprocess.run([*gcc, "-o", hook, *no_code, f"-L{runtime}", "-l:libcudart.so.99"], check=True)
    for package in ("sglang", "torch_memory_saver"):
        (site / package / "__init__.py").touch()
    utils = f"def get_binary_path_from_package(stem):\n    return {str(hook)!r}\n"
    (site / "torch_memory_saver" / "utils.py").write_text(utils)
    (site / "sglang" / "launch_server.py").write_text(LAUNCH_SERVER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(server, "cuda_available", lambda: True)
    monkeypatch.setattr(memory_saver_check, "cuda_available", lambda: True)
    return site


def preflight(rollout: RolloutConfig) -> list[tuple[str, str]]:
    subject, found = SimpleNamespace(config=SimpleNamespace(rollout=rollout)), []
    checks = [("memory saver", lambda: memory_saver_check.memory_saver(subject))]
    run_checks(checks, lambda _, finding, seconds: found.append((finding.level, finding.text)))
    return found


def test_the_ranks_of_a_server_start_with_the_hook(site, tmp_path):
    log = tmp_path / "sglang.log"
    started = SGLangServer(RolloutConfig(), ModelConfig(path="unused"), log)
    started.start()
    try:
        deadline = time.monotonic() + 60
        while " end" not in (said := log.read_text()):
            assert time.monotonic() < deadline, said
            time.sleep(0.1)
    finally:
        started.stop()
    assert said.startswith("rank: 0 "), said


def test_a_hook_that_writes_to_stderr_is_loaded_all_the_same(site):
    code = '#include <stdio.h>\n__attribute__((constructor)) void say(void) { fputs("hook: loaded\\n", stderr); }\n'
    subprocess.run(["gcc", "-shared", "-fPIC", "-xc", "-", "-o", site / "hook.so"], input=code, text=True, check=True)
    assert preflight(RolloutConfig()) == [("ok", "a process starts with hook.so preloaded")]


def test_preflight_tries_it(site):
    assert preflight(RolloutConfig()) == [("ok", "a process starts with hook.so preloaded")]
    assert preflight(RolloutConfig(offload=False))[0][0] == "skipped"
    shutil.rmtree(site / "nvidia")
    ((level, text),) = preflight(RolloutConfig())
    assert level == "FAILED" and "libcudart.so.99: cannot open shared object" in text and "LD_LIBRARY_PATH" in text
    (site / "hook.so").unlink()
    ((level, text),) = preflight(RolloutConfig())
    assert level == "FAILED" and "cannot be preloaded" in text
    (site / "torch_memory_saver" / "utils.py").unlink()
    ((level, text),) = preflight(RolloutConfig())
    assert level == "FAILED" and f"{sys.executable} -m pip install torch_memory_saver" in text
