"""The proof of a model of Bridge's before a run starts, in a process of its own on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from dynamo_megatron.bridge.environment import check_versions
from dynamo_megatron.errors import InputError

TIMEOUT = 900  # seconds; a refusal tries one field after the other


def prove_folder(folder: str) -> str:
    """Returns the line that a run prints. Raises InputError, one line that names the field of config.json, unless
    Bridge's model computes what transformers' does (bridge/proof.py)."""
    check_versions()
    command = [sys.executable, "-P", "-m", "dynamo_megatron.bridge.proof", folder]
    own = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    try:
        done = subprocess.run(
            command, env={**own, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        raise InputError(f"{folder}: the proof of Bridge's model took more than {TIMEOUT} seconds") from None
    if done.returncode:
        raise InputError(f"{folder}: the proof of Bridge's model failed: {done.stderr.strip().splitlines()[-1]}")
    outcome = json.loads(done.stdout.splitlines()[-1])
    if "refused" in outcome:
        raise InputError(f"{folder}/config.json: refused with model.source: bridge: {outcome['refused']}")
    return f"Megatron-Bridge: logits of a small model of this config.json are within {outcome['difference']:.1e}"
