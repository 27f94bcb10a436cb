"""A run on problems that are read as it goes on, without an end."""

import json

import pytest

PROBLEMS = """
import itertools
def endless():
    for number in itertools.count():
        with open("taken", "w") as file:
            file.write(str(number))
        yield {"problem": f"{number}+1=", "answer": str(number + 1)}
"""


@pytest.mark.full
def test_an_endless_source_is_read_batch_by_batch_and_resumed_by_count(tiny_model, tmp_path, command_line):
    (tmp_path / "sums.py").write_text(PROBLEMS)
    keys = [f"model.path={tiny_model}", "model.dtype=float32", "data.source=sums:endless", "data.batch_prompts=5"]
    keys += ["--ranks", 1]

    def losses(output, steps):
        code, said = command_line(
            tmp_path, "sft", *keys, f"output_dir={output}", f"trainer.steps={steps}", "--ranks", 1
        )
        assert code == 0, said[-3000:]
        return [json.loads(line)["sft/loss"] for line in (tmp_path / output / "metrics.jsonl").read_text().splitlines()]

    straight = losses("straight", 3)
    assert (tmp_path / "taken").read_text() == "14"
    assert losses("resumed", 1) == straight[:1]
    assert losses("resumed", 3) == straight
