"""TransformerEngine itself, on a CPU: its extension for torch, built against the torch of the GPU trainer, under an
interpreter that has the packages of requirements/gpu_trainer.txt (`make te`: TE_PYTHON or .venv-te/bin/python).

Its kernels need a GPU, so that nothing is computed with it. What it builds is compared with the local layers, by which
everything else is tested: every parameter with its marks, and what a checkpoint has of it.
"""

import json
import os
import subprocess
from pathlib import Path

import layout_cases
import pytest

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
TE_PYTHON = os.environ.get("TE_PYTHON", str(ROOT / ".venv-te" / "bin" / "python"))
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not Path(TE_PYTHON).is_file(), reason=f"no {TE_PYTHON} (make te)"),
]
# YaRN's factor of the attention is in the softmax scale, which TransformerEngine gets with its constructor.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 10000.0}
LAYOUTS = ("1", "TP2+SP", "TP2xPP2+SP", "VPP2xPP2", "CP2xTP2", "EP2xPP2", "EP2xTP2+SP")


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> list[dict]:
    """The lines of transformer_engine_job.py."""
    folder, cases = tmp_path_factory.mktemp("models"), []
    models = layout_cases.make_models(folder)
    config = json.loads((models["qwen3"] / "config.json").read_text())
    config.pop("rope_theta", None)
    models["yarn"] = folder / "yarn"
    models["yarn"].mkdir()
    (models["yarn"] / "config.json").write_text(json.dumps(config | {"rope_parameters": YARN}))
    for family in (*layout_cases.FAMILIES, "yarn"):
        for layout in LAYOUTS:
            ranks, parallel = layout_cases.LAYOUTS[layout]
            experts = family == "qwen3_moe"  # under tensor parallelism with sequence parallelism alone
            if ("ep" in parallel and not experts) or (experts and layout == "CP2xTP2"):
                continue
            case = {"name": f"{family} {layout}", "folder": str(models[family]), "parallel": parallel, "ranks": ranks}
            cases.append(case | {"dtype": "float32" if layout == "1" else "bfloat16"})
    (folder / "cases.json").write_text(json.dumps(cases))
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    command = [TE_PYTHON, "-P", str(HERE / "transformer_engine_job.py"), str(folder / "cases.json")]
    done = subprocess.run(command, env={**os.environ, **alone}, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("name", [*layout_cases.FAMILIES, "yarn"])
def test_its_model_is_the_local_one_in_every_layout(compared, name):
    lines = [line for line in compared if line["name"].split()[0] == name]
    assert lines and all(line["parameters"] for line in lines)
    assert {line["name"]: line["differences"][:5] for line in lines if line["differences"]} == {}
    print(f"{name}: {len(lines)} layouts, {sum(line['parameters'] for line in lines):,} parameters")
