"""A chat template of the user's own, for a base model that has none."""

import json
import shutil

import pytest
from transformers import AutoTokenizer

TURNS = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2?"}]


@pytest.mark.full
def test_the_template_goes_with_the_model(tiny_model, tmp_path, command_line):
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    rows = [{"prompt": turns, "answer": "4"} for turns in (TURNS, TURNS[1:])]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}<{{ m['content'] }}>{% endfor %}")
    keys = ["model.path=model", "model.dtype=float32", "data.source=train.jsonl", "data.batch_prompts=2"]
    keys += ["data.chat_template=mine.jinja", "optimizer.warmup_steps=0", "output_dir=run"]
    code, said = command_line(tmp_path, "sft", *keys, "trainer.steps=1", "--ranks", 1)
    assert code == 0, said[-3000:]
    assert command_line(tmp_path, "convert", "mcore2hf", "run", "converted")[0] == 0
    for exported in (tmp_path / "run" / "hf", tmp_path / "converted"):
        tokenizer = AutoTokenizer.from_pretrained(exported)
        assert tokenizer.apply_chat_template(TURNS, tokenize=False) == "<Add.><2+2?>"
