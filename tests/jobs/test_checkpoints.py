"""A run whose disk is full when it saves: one line, and the same command goes on from the checkpoint before."""

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.full
def test_a_save_onto_a_full_disk_is_one_line_and_loses_that_save(tiny_model, tmp_path):
    """A limit on a file's size stands in for the disk's end: the system refuses the write in the same place."""
    rows = [{"id": str(i), "problem": p, "answer": a} for i, (p, a) in enumerate([("2+3=", "5"), ("x", "yz")])]
    (tmp_path / "examples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {
        "model.path": tiny_model,
        "model.dtype": "float32",
        "data.source": "examples.jsonl",
        "data.template": "'{prompt}'",
        "data.batch_prompts": 2,
        "checkpoint.every": 2,
        "checkpoint.async": "true",
        "checkpoint.export_hf": "never",
        "output_dir": "run",
    }
    words = " ".join(f'"{key}={value}"' for key, value in keys.items())

    def run(steps: int, limit: str) -> tuple[int, list[str]]:
        command = f"ulimit -f {limit}; exec {sys.executable} -P -m dynamo_megatron.cli sft {words} --ranks 2"
        with open(tmp_path / "err", "w") as err:
            code = subprocess.run(
                ["bash", "-c", f"{command} trainer.steps={steps}"],
                cwd=tmp_path,
                stdout=subprocess.DEVNULL,
                stderr=err,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                timeout=240,
            ).returncode
        return code, (tmp_path / "err").read_text().splitlines()

    assert run(2, "unlimited") == (0, [])
    code, said = run(6, "64")
    assert code == 1 and len(said) == 1, said
    assert "run/checkpoints: the checkpoint of step 4 was not saved: " in said[0] and "File too large" in said[0]
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000002"]
    assert run(6, "unlimited") == (0, [])
    assert [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()] == [
        *range(1, 7)
    ]
