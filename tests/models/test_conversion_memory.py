"""Converting a model of more than 1 GB: bounded host memory, and the speed beside a plain copy of the same files."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dynamo_megatron.checkpoint.convert import compare_weights
from dynamo_megatron.checkpoint.safetensors_writer import write_safetensors
from dynamo_megatron.models import load_model_config
from dynamo_megatron.models.mapping import huggingface_shapes
from dynamo_megatron.models.published import PUBLISHED

LIMIT = 1.0e9  # bytes of anonymous memory above an interpreter with torch


def anonymous(pid):
    """Bytes of a process's anonymous memory; 0 once it has ended."""
    try:
        found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def watch(*words):
    """(seconds, peak of anonymous memory in bytes) of a Python process, sampled every 5 ms."""
    start, peak = time.monotonic(), 0
    process = subprocess.Popen([sys.executable, "-P", *map(str, words)], stdout=subprocess.DEVNULL)
    while process.poll() is None:
        peak = max(peak, anonymous(process.pid))
        time.sleep(0.005)
    assert process.returncode == 0
    return time.monotonic() - start, peak


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_memory_and_speed(tmp_path):
    folder = tmp_path / "hf"
    folder.mkdir()
    config = PUBLISHED["Qwen2.5-1.5B"]["config"] | {"num_hidden_layers": 8, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {n: (torch.bfloat16, shape) for n, shape in huggingface_shapes(load_model_config(folder)).items()}
    write_safetensors(folder, tensors, lambda name: torch.rand(tensors[name][1], dtype=torch.float32).bfloat16())
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert size > 1.2e9
    _, base = watch("-c", "import torch, time; time.sleep(0.2)")
    start = time.monotonic()
    shutil.copytree(folder, tmp_path / "copy")
    for file in (tmp_path / "copy").iterdir():
        with open(file, "rb") as stream:
            os.fsync(stream.fileno())
    print(f"{size / 1e9:.2f} GB, largest tensor {1536 * 151936 * 2 / 1e9:.2f} GB")
    print(f"plain copy: {time.monotonic() - start:.1f} s")
    for direction, source, out in (("hf2mcore", "hf", "mcore"), ("mcore2hf", "mcore", "back")):
        words = ("-m", "dynamo_megatron.cli", "convert", direction, tmp_path / source, tmp_path / out)
        seconds, peak = watch(*words)
        print(f"{direction}: {seconds:.1f} s, {(peak - base) / 1e9:.2f} GB above the {base / 1e9:.2f} GB of torch")
        assert peak - base < LIMIT
    assert compare_weights(folder, tmp_path / "back")[1] == []
