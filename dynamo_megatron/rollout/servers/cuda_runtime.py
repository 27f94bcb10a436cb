"""Finds the CUDA runtime that pip installed for a server's interpreter.

torch finds it by itself. torch_memory_saver's hook, which SGLang preloads into its ranks for `rollout.offload`, needs
the same libcudart but does not say where it is: without a system-wide CUDA the ranks would not even start.
"""

from __future__ import annotations

import json
import os
import subprocess

ASK_TIMEOUT = 60.0  # seconds for an interpreter to start, from a busy network file system
PROGRAM = """
import glob, json, os, sys
files = [file for folder in sys.path for file in sorted(glob.glob(folder + "/nvidia/*/lib/libcudart.so.*"))]
print(json.dumps(list(dict.fromkeys(map(os.path.dirname, files)))))
"""


def library_path(python: str) -> str | None:
    """Returns LD_LIBRARY_PATH for the ranks of a server under the interpreter `python`: the folders that pip made, then
    this process's own value. None: nothing to set."""
    folders = []
    try:
        asked = [python, "-P", "-c", PROGRAM]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=ASK_TIMEOUT, check=True)
        folders = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        pass  # the server's own start says what is wrong with its interpreter
    inherited = os.environ.get("LD_LIBRARY_PATH")
    return os.pathsep.join([*folders, *([inherited] if inherited else [])]) or None
