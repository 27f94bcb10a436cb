"""Faults that are seeded into runs of `train` are found and named, and clean runs have none."""

import json
import shutil
from pathlib import Path

import pytest

from dynamo_megatron.errors import InputError
from dynamo_megatron.verification.checks import verify_step

FAULTS = {  # -> (family, tensor-parallel ranks, what the table says of it)
    "lost_micro_batch": ("llama", 1, "rollouts are missing"),
    "double_counted_gradient": ("qwen2", 1, "model.norm.weight: 2 times what is expected"),
    "swapped_slices": ("qwen3", 2, "o_proj.weight: the slices of tensor-parallel ranks 0 and 1 are exchanged"),
    "stale_server": ("llama", 1, "stale"),
    "wrong_divisor": ("qwen2", 1, "every rollout counts 3 times"),
    "new_optimizer": ("qwen3", 1, "the optimizer began anew"),
    "late_learning_rate": ("llama", 1, "that of step 2"),
    "wrong_pairing": ("qwen2", 1, "have another weight or advantage"),
}


@pytest.fixture(scope="module")
def finished(make_tiny_model, tmp_path_factory, run_script):
    """finished({name: (family, tensor-parallel ranks, fault)}) -> {name: the run's folder}."""

    def made(wanted: dict[str, tuple[str, int, str | None]], end: int = 3) -> dict[str, Path]:
        folder = tmp_path_factory.mktemp("finished")
        rows = [{"id": f"p{a}", "problem": f"Write {a!r}.", "answer": a} for a in "aei7"]
        (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        made, outputs = [], {}
        for name, (family, tp, fault) in wanted.items():
            if not (model := folder / family).is_dir():
                make_tiny_model(model, family=family, dtype="float32", tied=family == "llama")
            outputs[name] = folder / name / "run"
            (folder / name / "record" / "rollouts").mkdir(parents=True)
            config = {
                "model": {"path": str(model), "dtype": "float32", "max_length": 256},
                "data": {"source": str(folder / "problems.jsonl"), "batch_prompts": 3, "template": "{prompt}\n"},
                "rollout": {"max_new_tokens": 16, "engine": "recorded", "recorded": str(folder / name / "record")},
                "algorithm": {
                    "allocation": {"budget": 24, "rollout_n_min": 2, "rollout_n_max": 15},
                    "advantage": {"kind": "history"},
                },
                "optimizer": {"lr": 1e-4, "warmup_steps": 4},
                "trainer": {"micro_batch_tokens": 256},
                "checkpoint": {"every": 1, "keep_last": 3, "export_hf": "never"},
                "parallel": {"tp": tp},
                "output_dir": str(outputs[name]),
            }
            steps = [2, 3] if fault == "new_optimizer" else [end]
            made.append({"folder": str(outputs[name]), "config": config, "fault": fault, "steps": steps})
        run_script(Path(__file__).with_name("finished_runs.py"), made, folder, 240)
        return outputs

    return made


def test_the_first_step_and_what_its_files_lack(finished):
    run = finished({"first": ("llama", 1, None)}, end=1)["first"]
    text, code = verify_step(run, None)
    assert code == 0 and "all 11 checks hold" in text, text
    metrics = json.loads((run / "metrics.jsonl").read_text())
    (run / "metrics.jsonl").write_text(json.dumps({**metrics, "policy/loss": metrics["policy/loss"] + 1}) + "\n")
    shutil.rmtree(run / "checkpoints" / "step-000001")
    text, code = verify_step(run, 1)
    assert code == 1 and "not checked: optimizer and weights" in text and "1 of 5 checks differ" in text, text
    with pytest.raises(InputError, match="has no finished step 2; it has 1 to 1"):
        verify_step(run, 2)


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_clean_run_holds_and_every_fault_is_named(finished, family):
    seeded = {name: (tp, said) for name, (of, tp, said) in FAULTS.items() if of == family}
    runs = finished({"clean": (family, 1, None)} | {name: (family, tp, name) for name, (tp, _) in seeded.items()})
    text, code = verify_step(runs["clean"], None)
    assert code == 0 and "all 11 checks hold" in text, text
    for name, (_, said) in seeded.items():
        text, code = verify_step(runs[name], 3)
        assert code == 1 and said in text, text
