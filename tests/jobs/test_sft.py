"""`dynamo-megatron sft`: the cross-entropy of completions, converted, cut off, and found finished again."""

import json
import shutil

import pytest
import torch
from background_run import step_lines
from transformers import AutoModelForCausalLM, AutoTokenizer

from dynamo_megatron.checkpoint.convert import mcore2hf
from dynamo_megatron.checkpoint.inspection import differences, inspect
from dynamo_megatron.config import DataConfig
from dynamo_megatron.data.templates import end_token_ids, load_tokenizer
from dynamo_megatron.jobs.sft import Answers
from dynamo_megatron.types import Prompt

pytestmark = pytest.mark.full
EXAMPLES = [("2+3=", "5"), ("Say it.", "Abracadabra"), ("x", "yz"), ("Name?", "Ada")]


@pytest.fixture(scope="module")
def sft(tiny_model, tmp_path_factory, command_line):
    """(output folder, run it again): two ranks, ten steps."""
    folder = tmp_path_factory.mktemp("sft")
    rows = [{"id": str(i), "problem": p, "answer": a} for i, (p, a) in enumerate(EXAMPLES)]
    (folder / "examples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {
        "model.path": tiny_model,
        "model.dtype": "float32",
        "data.source": "examples.jsonl",
        "data.template": "'{prompt}'",
        "data.batch_prompts": len(EXAMPLES),
        "optimizer.lr": 3e-3,
        "optimizer.warmup_steps": 0,
        "trainer.steps": 10,
        "output_dir": "run",
    }

    def run(*more: str) -> tuple[int, str]:
        return command_line(folder, "sft", *(f"{k}={v}" for k, v in keys.items()), *more, "--ranks", 2)

    code, text = run()
    assert code == 0, text[-3000:]
    return folder / "run", run


def losses(output) -> list[float]:
    return [row["sft/loss"] for row in step_lines(output)]


def test_the_loss_of_conversations_is_of_all_their_answers(tiny_model, tmp_path, command_line):
    """Under a template of the user's own, for a base model that has none; it goes with the model."""
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    template = tmp_path / "mine.jinja"
    template.write_text("{% for m in messages %}<{{ m['content'] }}<|im_end|>{% endfor %}")
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    tokenizer = load_tokenizer(tiny_model, str(template))
    roles = ("user", "assistant", "user", "assistant")
    texts = [("2+3=", "5", "and 4?", "9"), ("Say it.", "Abracadabra", "Again!", "Abra")]
    rows = [[{"role": r, "content": t} for r, t in zip(roles, row, strict=True)] for row in texts]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    keys = {
        "model.path": tmp_path / "model",
        "model.dtype": "float32",
        "data.source": "talks.jsonl",
        "data.prompt_key": "messages",
        "data.chat_template": "mine.jinja",
        "data.batch_prompts": 2,
        "trainer.steps": 1,
        "output_dir": "run",
    }
    code, text = command_line(tmp_path, "sft", *(f"{k}={v}" for k, v in keys.items()), "--ranks", 2)
    assert code == 0, text[-3000:]
    total, count = 0.0, 0
    for number, row in enumerate(rows):
        prompt, ends = Prompt(str(number), row), end_token_ids(tiny_model, tokenizer)
        (example,) = Answers(tokenizer, DataConfig(source="x"), ends).examples(prompt)
        ids, wanted = torch.tensor(example.tokens), torch.tensor(example.trained)[1:]
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1)
        total -= float(logprobs[torch.arange(len(ids) - 1), ids[1:]][wanted].sum())
        count += int(wanted.sum())
    assert count > len(tokenizer.encode("".join(t for row in texts for t in row[1::2]))) > 0
    assert losses(tmp_path / "run")[0] == pytest.approx(total / count, abs=1e-5)
    mcore2hf(tmp_path / "run", tmp_path / "converted")
    assert list(differences(inspect(tmp_path / "run" / "hf"), inspect(tmp_path / "converted"))) == []
    for exported in (tmp_path / "run" / "hf", tmp_path / "converted"):
        shown = AutoTokenizer.from_pretrained(exported).apply_chat_template(rows[0][:2], tokenize=False)
        assert shown == "<2+3=<|im_end|><5<|im_end|>"


def test_it_learns_and_is_found_finished(sft):
    output, run = sft
    seen = losses(output)
    assert len(seen) == 10 and seen[-1] < 0.8 * seen[0]
    before = (output / "metrics.jsonl").read_text()
    (checkpoint,) = (output / "checkpoints").glob("step-*")
    assert checkpoint.name == "step-000010" and (output / "hf" / "config.json").is_file()
    code, text = run()
    assert code == 0
    assert text.startswith("run: already at step 10 of 10")
    assert (output / "metrics.jsonl").read_text() == before


def test_an_export_that_a_kill_cut_off_is_made_up_for(sft):
    output, run = sft
    keys = ("output_dir=every", "trainer.steps=4", "checkpoint.every=2", "checkpoint.export_hf=every")
    assert run(*keys)[0] == 0
    exports = sorted((output.parent / "every").glob("hf-step-*"))
    assert [folder.name for folder in exports] == ["hf-step-000002", "hf-step-000004"]
    weights = {file.name: file.read_bytes() for file in exports[1].iterdir()}
    shutil.rmtree(exports[1])
    (output.parent / "every" / "ended.json").unlink()  # comes after the exports
    code, text = run(*keys)
    assert code == 0 and "resumed from" in text, text[-3000:]
    assert {file.name: file.read_bytes() for file in exports[1].iterdir()} == weights
    assert len(losses(output.parent / "every")) == 4
