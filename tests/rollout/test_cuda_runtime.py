"""The CUDA runtime that pip has installed, for what SGLang preloads into its ranks: with a library of that name."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from dynamo_megatron.config import ModelConfig, RolloutConfig
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
    return site


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
