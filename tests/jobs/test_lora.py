"""`sft`, `eval` and `dpo` with model.lora."""

import json
import math
from pathlib import Path

import pytest
from background_run import step_lines
from safetensors.torch import load_file

from dynamo_megatron.checkpoint.convert import mcore2hf
from dynamo_megatron.checkpoint.inspection import differences, inspect
from dynamo_megatron.cli import main
from dynamo_megatron.jobs import eval as evaluation
from dynamo_megatron.rollout.result import RolloutError

pytestmark = pytest.mark.full
EXAMPLES = [("2+3=", "5", "6"), ("Say it.", "Abracadabra", "No"), ("x", "yz", "zzzz"), ("Name?", "Ada", "Bob, or so")]


@pytest.fixture(scope="module")
def trained(tiny_model, tmp_path_factory, command_line):
    """(folder, run): `run(command, *keys)` on two tensor-parallel ranks."""
    folder = tmp_path_factory.mktemp("lora")
    rows = [{"id": str(i), "prompt": p, "chosen": a, "rejected": b} for i, (p, a, b) in enumerate(EXAMPLES)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {
        "model.path": tiny_model,
        "model.dtype": "bfloat16",
        "model.lora": "{rank: 4, alpha: 8}",
        "data.source": "rows.jsonl",
        "data.answer_key": "chosen",
        "data.template": "'{prompt}'",
        "data.batch_prompts": 2,
        "optimizer.lr": 1e-2,
        "optimizer.warmup_steps": 0,
        "parallel.tp": 2,
    }

    def run(command: str, *more: str) -> None:
        code, text = command_line(folder, command, *(f"{k}={v}" for k, v in keys.items()), *more, "--ranks", 2)
        assert code == 0, text[-3000:]

    run("sft", "output_dir=straight", "trainer.steps=4")
    return folder, run


def test_it_learns_and_a_checkpoint_converts_to_what_was_exported(trained, command_line):
    folder, _ = trained
    losses = [row["sft/loss"] for row in step_lines(folder / "straight")]
    assert len(losses) == 4 and losses[-1] < losses[0]
    mcore2hf(folder / "straight", folder / "converted")
    assert list(differences(inspect(folder / "straight" / "hf"), inspect(folder / "converted"))) == []
    assert command_line(folder, "convert", "mcore2peft", "straight", "peft")[0] == 0
    tensors = load_file(folder / "peft" / "adapter_model.safetensors")
    config = json.loads((folder / "peft" / "adapter_config.json").read_text())
    assert len(tensors) == 2 * 2 * 7 and (config["r"], config["lora_alpha"]) == (4, 8.0)


def test_eval_gives_the_servers_the_merged_model(trained, monkeypatch):
    folder, _ = trained
    monkeypatch.chdir(folder)
    found = []

    class Servers:
        def __init__(self, config, *_):
            self.model = Path(config.model.path)  # a folder that is removed after the evaluation

        def start(self):
            found.append(list(differences(inspect(Path("straight/hf")), inspect(self.model))))
            raise RolloutError("that was all")

        def close(self): ...

    monkeypatch.setattr(evaluation, "RolloutWorker", Servers)
    assert main(["eval", "--model", "straight", "--out", "scores", "eval.max_new_tokens=8"]) == 1 and found == [[]]


def test_the_reference_of_dpo_is_the_policy_without_adapters(trained):
    folder, run = trained
    run("dpo", "output_dir=preferred", "trainer.steps=3", "data.batch_prompts=4")
    first, *_, last = step_lines(folder / "preferred")
    assert first["dpo/loss"] == pytest.approx(math.log(2)) and first["dpo/margin"] == 0
    assert last["dpo/margin"] > 0
