"""TransformerEngine itself, on a CPU: its extension for torch, built against the torch of the GPU trainer, under an
interpreter that has the packages of requirements/gpu_trainer.txt (`make te`: TE_PYTHON or .venv-te/bin/python).

Its kernels need a GPU, so that nothing is computed with it. What it builds is compared with the local layers, by which
everything else is tested: in every layout every parameter with its marks, and checkpoints, in both directions.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import layout_guard
import pytest
import te_stand_in

from dynamo_megatron.checkpoint.convert import hf2mcore
from dynamo_megatron.models.published import PUBLISHED

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
TE_PYTHON = os.environ.get("TE_PYTHON", str(ROOT / ".venv-te" / "bin" / "python"))
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not Path(TE_PYTHON).is_file(), reason=f"no {TE_PYTHON} (make te)"),
]
# YaRN's factor of the attention is in the softmax scale, which TransformerEngine gets with its constructor.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 10000.0}
# Of the published models the first and the last rank: where the embedding, the head and the last experts are.
PUBLISHED_LAYOUTS = {
    "Qwen2.5-1.5B": {"tp": 2, "pp": 2, "vpp": 7},
    "Qwen2.5-72B": {"tp": 8, "pp": 8},
    "Qwen3-32B": {"tp": 8, "pp": 4, "vpp": 2},
    "Qwen3-30B-A3B": {"tp": 4, "ep": 8, "pp": 2},
    "Qwen3-235B-A22B": {"ep": 16, "pp": 2},
}


def run(python: str, script: str, job: object, folder: Path, name: str = "job") -> list[dict]:
    """The lines of JSON that a job prints."""
    (folder / f"{name}.json").write_text(json.dumps(job))
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    command = [python, "-P", str(HERE / script), str(folder / f"{name}.json")]
    done = subprocess.run(command, env={**os.environ, **alone}, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """{name: folder} of tiny models of all families, and {name: what hf2mcore writes of them}."""
    folder = tmp_path_factory.mktemp("models")
    folders = layout_guard.make_models(folder)
    del folders["other"]
    config = json.loads((folders["qwen3"] / "config.json").read_text())
    config.pop("rope_theta", None)
    (folder / "yarn").mkdir()
    (folder / "yarn" / "config.json").write_text(json.dumps(config | {"rope_parameters": YARN}))
    converted = {name: folder / f"{name}-mcore" for name in folders}
    for name, path in folders.items():
        hf2mcore(path, converted[name], "bfloat16")
    return {**folders, "yarn": folder / "yarn"}, converted


@pytest.fixture(scope="module")
def compared(models, tmp_path_factory):
    """{case: its line} of transformer_engine_job.py."""
    (folders, converted), cases = models, []

    def add(name: str, folder: Path, parallel: dict, ranks: int, dtype: str = "bfloat16", **more) -> None:
        case = {"name": name, "folder": str(folder), "parallel": parallel, "ranks": ranks, "dtype": dtype}
        cases.append(case | more)

    for family in layout_guard.FAMILIES:
        for layout, (ranks, parallel) in layout_guard.LAYOUTS.items():
            if layout_guard.applies(family, layout):
                add(f"{family} {layout}", folders[family], parallel, ranks, mcore=str(converted[family]))
        add(f"{family} float32", folders[family], {}, 1, "float32", mcore=str(converted[family]))
    add("yarn", folders["yarn"], {"tp": 2}, 2)
    for model, parallel in PUBLISHED_LAYOUTS.items():
        folder = tmp_path_factory.mktemp("published") / model
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(PUBLISHED[model]["config"]))
        tp, pp = parallel.get("tp", 1), parallel["pp"]
        ranks = pp * max(tp, parallel.get("ep", 1))
        sharded = parallel | {"sequence_parallel": tp > 1}
        add(f"published {model}", folder, sharded, ranks, only=[0, ranks - 1])
    lines = run(TE_PYTHON, "transformer_engine_job.py", cases, tmp_path_factory.mktemp("compared"))
    assert [line["name"] for line in lines] == [case["name"] for case in cases]
    return lines


@pytest.mark.parametrize("name", [*layout_guard.FAMILIES, "yarn", "published"])
def test_its_model_is_the_local_one_in_every_layout(compared, name):
    lines = [line for line in compared if line["name"].split()[0] == name]
    assert lines and all(line["parameters"] for line in lines)
    assert {line["name"]: line["differences"][:5] for line in lines if line["differences"]} == {}
    print(f"{name}: {len(lines)} layouts, {sum(line['parameters'] for line in lines):,} parameters")


def config(folder: Path) -> dict:
    return {
        "model": {"path": str(folder), "dtype": "bfloat16"},
        "data": {"source": "none"},
        "output_dir": "none",
        "rollout": {"max_new_tokens": 32},
        "algorithm": {"modulation": None},
        "optimizer": {"warmup_steps": 0},
        "trainer": {"micro_batch_tokens": 200},
    }


@pytest.mark.parametrize("family", layout_guard.FAMILIES)
def test_a_run_goes_on_with_it_and_without_it_again(models, family, tmp_path):
    """A policy that was trained for a step without TransformerEngine, its checkpoint loaded and saved with it, and that
    one loaded without: weights, main weights and moments are bit-equal. The two also have different versions of
    torch."""
    folders, converted = models
    common = {"config": config(folders[family])}
    saved = [str(tmp_path / name) for name in ("trained", "with")]

    def job(python: str, name: str, gpu: bool, **more) -> dict:
        (said,) = run(python, "te_checkpoint_job.py", common | {"gpu": gpu} | more, tmp_path, name)
        assert said["attention"] == ("TEDotProductAttention" if gpu else "PackedAttention"), said["packages"]
        return said

    trained = job(sys.executable, "trained", False, save=saved[0])
    with_it = job(TE_PYTHON, "with", True, load=saved[0], save=saved[1])
    assert "Adam: transformer-engine" in with_it["packages"] and set(with_it["steps"]) == {1}
    without = job(sys.executable, "without", False, load=saved[1])
    assert trained["held"] == with_it["held"] == without["held"]
    assert all(len(set(sums)) == 4 for sums in trained["held"].values())
    from_converter = job(TE_PYTHON, "converted", True, mcore=str(converted[family]))
    assert from_converter["held"].keys() == trained["held"].keys()


OPTIONAL = """
import json
from dynamo_megatron.policy import backend
backend.enable_cpu()
import importlib
from megatron.core.extensions import transformer_engine as found
import transformer_engine
from megatron.core.transformer import attention
names = ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd", "fused_permute", "fused_permute_with_probs",
    "fused_sort_chunks_by_index", "fused_sort_chunks_by_index_with_probs", "fused_unpermute", "TEGroupedLinear",
    "te_general_gemm", "SplitAlongDim")
missing = [name for name in names if getattr(found, name, None) is None]
mine = {module: [name for name in names if not hasattr(importlib.import_module(module), name)]
    for module, names in json.loads(input()).items()}
from megatron.core.optimizer import Adam
print(json.dumps({"missing": missing, "stand-in": {k: v for k, v in mine.items() if v}, "adam": Adam.__module__,
    "version": transformer_engine.__version__}))
"""


def test_megatron_finds_the_fusions_that_a_run_asks_for():
    """Megatron takes a function that it cannot import for one that is not there, and goes on without. The stand-in of
    the other tests has the names that TransformerEngine has."""
    names = {module: list(contents) for module, contents in te_stand_in.MODULES.items()}
    done = subprocess.run(
        [TE_PYTHON, "-P", "-c", OPTIONAL], input=json.dumps(names), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    # megatron-core 0.16.1 asks TransformerEngine 2.11 for names that it has moved. Without the first the router's
    # product, in float32, is torch's; without the second q, k and v are split by torch.
    assert found["missing"] == ["te_general_gemm", "SplitAlongDim"]
    assert found["stand-in"] == {} and found["version"] == te_stand_in.VERSION
    assert found["adam"].startswith("transformer_engine")
