"""Whether SGLang's ranks can start with what servers that release memory preload into them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

from dynamo_megatron.errors import InputError
from dynamo_megatron.preflight.findings import Finding, ok, skipped
from dynamo_megatron.preflight.subject import Subject
from dynamo_megatron.rollout.servers.server import cuda_available, library_path, shares_memory

ASK_TIMEOUT = 120.0  # seconds for the server's interpreter to import torch
HOOK = """
from torch_memory_saver.utils import get_binary_path_from_package
print(get_binary_path_from_package("torch_memory_saver_hook_mode_preload"))
"""


def memory_saver(subject: Subject) -> Iterator[Finding]:
    """torch_memory_saver's hook is loaded into a process, with the libraries that a server's ranks find."""
    config = subject.config.rollout
    if not (shares_memory(config) and cuda_available()):
        yield skipped("servers and ranks do not take turns with a GPU's memory here")
        return
    python = config.python or sys.executable
    asked = subprocess.run([python, "-P", "-c", HOOK], capture_output=True, text=True, timeout=ASK_TIMEOUT)
    if asked.returncode:
        why = (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]
        raise InputError(
            f"memory saver: {python} does not find torch_memory_saver's hook ({why}); {python} -m pip install "
            "torch_memory_saver, or set rollout.offload: false"
        )
    environment = {**os.environ, "LD_PRELOAD": (hook := asked.stdout.strip().splitlines()[-1])}
    if (folders := library_path(python)) is not None:
        environment["LD_LIBRARY_PATH"] = folders
    tried = subprocess.run(["/bin/cat", "/proc/self/maps"], env=environment, capture_output=True, text=True)
    if tried.returncode or os.path.realpath(hook) not in tried.stdout:  # a process also starts without the hook
        why = tried.stderr.strip() or "the hook is not among the files that it maps"
        raise InputError(
            f"memory saver: no process starts with {hook} preloaded ({why}); SGLang's ranks would not "
            "either: put the folder of the library that it lacks into LD_LIBRARY_PATH, or set rollout.offload: false"
        )
    yield ok(f"a process starts with {os.path.basename(hook)} preloaded")
