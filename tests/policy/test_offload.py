import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def seen(make_tiny_model, tmp_path_factory) -> dict:
    """What offload_job.py says of a dense and a tied model in bfloat16, a mixture of experts and one in float32."""
    folder, models = tmp_path_factory.mktemp("offload"), {}
    for name, family, dtype in (
        ("dense", "qwen2", "bfloat16"),
        ("tied", "llama", "bfloat16"),
        ("experts", "qwen3_moe", "bfloat16"),
        ("float32", "qwen3", "float32"),
    ):
        path = make_tiny_model(folder / name, family, dtype=dtype, tied=name == "tied")
        fixed = {"data": {"source": "none"}, "output_dir": "none", "trainer": {"micro_batch_tokens": 64}}
        models[name] = {"model": {"path": str(path), "dtype": dtype}, "optimizer": {"warmup_steps": 0}, **fixed}
    (folder / "job.json").write_text(json.dumps({"models": models, "out": str(folder / "out.json")}))
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    with open(folder / "log", "w") as log:
        command = [sys.executable, "-P", str(Path(__file__).with_name("offload_job.py")), str(folder / "job.json")]
        code = subprocess.run(command, env={**os.environ, **ranks}, stdout=log, stderr=log, timeout=240).returncode
    assert code == 0, (folder / "log").read_text()[-4000:]
    return json.loads((folder / "out.json").read_text())


@pytest.mark.parametrize("name", ["dense", "tied", "experts", "float32"])
def test_updates_after_a_release_are_the_same_bits(seen, name):
    got = seen[name]
    assert got["equal"]
    freed, n = got["freed"], got["parameters"]
    size = 4 if name == "float32" else 2
    assert got["resident"] == 0 and got["again"] == 0
    # weights, two moments and, in bfloat16, main weights in float32, gradients in float32; buffers are padded a little
    assert size * n <= freed["weights"] <= 1.1 * size * n
    assert (8 if name == "float32" else 12) * n <= freed["optimizer"] <= 1.1 * 12 * n
    assert 4 * n <= freed["gradients"] <= 1.1 * 4 * n
    assert got["weights first"] == freed["weights"] and got["taken"] == freed["optimizer"] + freed["gradients"]
