import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for modules that several files share


@pytest.fixture(scope="session")
def gpu_branch(make_tiny_model, tmp_path_factory):
    """gpu_branch(family, changes, **job) -> what gpu_branch_job.py found with these settings, by default on a Hopper
    GPU with TransformerEngine; `changes`: sections of the configuration."""
    folder = tmp_path_factory.mktemp("gpu_branch")
    shape = {"layers": 2, "hidden": 64, "heads": 8, "kv_heads": 4, "dtype": "bfloat16"}
    models = {family: make_tiny_model(folder / family, family=family, **shape) for family in ("qwen3", "qwen3_moe")}

    def run(family: str = "qwen3", changes: dict | None = None, **job) -> dict:
        config = {
            "model": {"path": str(models[family]), "dtype": "bfloat16"},
            "data": {"source": "none"},
            "output_dir": "none",
            "rollout": {"max_new_tokens": 32},
            "algorithm": {"modulation": None},
            "optimizer": {"warmup_steps": 0},
            "trainer": {"micro_batch_tokens": 80},
        }
        settings = {"gpu": True, "capability": (9, 0), "transformer_engine": True, **job}
        settings["config"] = config | (changes or {})
        alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-P", str(Path(__file__).with_name("gpu_branch_job.py")), json.dumps(settings)]
        ran = subprocess.run(command, env={**os.environ, **alone}, capture_output=True, text=True, timeout=240)
        assert ran.returncode == 0, ran.stderr[-3000:]
        return json.loads(ran.stdout.splitlines()[-1])

    return run
