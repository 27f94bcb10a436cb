"""A base model, whose tokenizer has no chat template, with verl's Parquet files, which have chat messages."""

import shutil

import pytest
from transformers import AutoTokenizer

TURNS = [
    [{"role": "user", "content": "1+1?"}],
    [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2?"}],
]


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory):
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = tmp_path_factory.mktemp("base")
    shutil.copytree(tiny_model, folder / "model")
    (folder / "model" / "chat_template.jinja").unlink()
    table = pytest.importorskip("pyarrow").Table.from_pylist(
        [
            {
                "data_source": "sums",
                "prompt": turns,
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(2 + 2 * i)},
                "extra_info": {"split": "train", "index": i},
            }
            for i, turns in enumerate(TURNS)
        ]
    )
    parquet.write_table(table, folder / "train.parquet")
    return folder


@pytest.mark.full
def test_the_template_goes_with_the_model_and_is_not_changed_in_a_run(folder, command_line):
    (folder / "mine.jinja").write_text("{% for m in messages %}<{{ m['content'] }}>{% endfor %}")
    keys = ["model.path=model", "model.dtype=float32", "data.source=train.parquet", "data.batch_prompts=2"]
    keys += ["data.chat_template=mine.jinja", "optimizer.warmup_steps=0", "output_dir=run"]
    code, said = command_line(folder, "sft", *keys, "trainer.steps=1", "--ranks", 1)
    assert code == 0, said[-3000:]
    assert command_line(folder, "convert", "mcore2hf", "run", "converted")[0] == 0
    for exported in (folder / "run" / "hf", folder / "converted"):
        tokenizer = AutoTokenizer.from_pretrained(exported)
        assert tokenizer.apply_chat_template(TURNS[1], tokenize=False) == "<Add.><2+2?>"
    (folder / "mine.jinja").write_text("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    code, said = command_line(folder, "sft", *keys, "trainer.steps=2", "--ranks", 1)
    assert code == 2 and said.splitlines()[-1].startswith("data.chat_template: mine.jinja is not what the run in run")
