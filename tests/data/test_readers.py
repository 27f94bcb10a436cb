import datetime
import json
import sys

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dynamo_megatron.config import DataConfig
from dynamo_megatron.data import load_prompts


def load(source, **settings):
    return load_prompts(DataConfig(source=str(source), **settings))


def refused(source, **settings):
    with pytest.raises(ValueError) as error:
        load(source, **settings)
    assert "\n" not in str(error.value)
    return str(error.value)


def verl_row(index):
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{index}+1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(index + 1)},
        "extra_info": {"index": index, "split": "train"},
    }


def parquet(path, rows, **options):
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def test_a_verl_parquet_loads_unchanged(tmp_path):
    rows = [verl_row(i) for i in range(5)]
    path = parquet(tmp_path / "train.parquet", rows, row_group_size=2)
    assert pq.ParquetFile(path).num_row_groups == 3
    prompts = load(path)
    assert [p.messages[0]["content"] for p in prompts] == [f"{i}+1?" for i in range(5)]
    assert prompts[3].messages == [{"role": "user", "content": "3+1?"}] and prompts[3].answer == "4"
    assert prompts[3].meta == {k: v for k, v in rows[3].items() if k != "prompt"}
    (tmp_path / "same.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [p.prompt_id for p in load(tmp_path / "same.jsonl")] == [p.prompt_id for p in prompts]


def test_parquet_values_are_plain_python(tmp_path):
    day = datetime.datetime(2026, 1, 2)
    row = {"id": 7, "question": "q", "answer": 1.5, "tags": ["a"], "deep": {"x": [{"y": 1}]}, "when": day, "raw": b"x"}
    table = pa.Table.from_pylist([row])
    counts = pa.array([[("a", 1), ("b", 2)]], pa.map_(pa.string(), pa.int64()))
    pq.write_table(table.append_column("counts", counts), tmp_path / "a.parquet")
    (prompt,) = load(tmp_path / "a.parquet")
    assert (prompt.prompt_id, prompt.text, prompt.answer) == ("7", "q", 1.5) and type(prompt.answer) is float
    assert prompt.meta == {
        "tags": ["a"],
        "deep": {"x": [{"y": 1}]},
        "when": day,
        "raw": b"x",
        "counts": {"a": 1, "b": 2},
    }
    assert load(tmp_path / "a.parquet", answer_key="counts.b")[0].answer == 2


def test_nulls_that_arrow_fills_in_are_left_out_at_every_depth(tmp_path):
    """Tools of two schemas, calls with arguments of two names, and a message that only calls."""
    calls = [{"function": {"name": name, "arguments": {key: "x"}}} for name, key in [("find", "query"), ("go", "to")]]
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "assistant", "content": "done"},
    ]
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"properties": {key: {"type": "string"}}}}}
        for name, key in [("find", "query"), ("go", "to")]
    ]
    path = parquet(tmp_path / "a.parquet", [{"prompt": messages, "tools": tools, "seen": {"a": None, "b": 1}}])
    (prompt,) = load(path)
    assert prompt.messages == [messages[0], messages[1] | {"content": ""}, messages[2]]
    assert prompt.meta == {"tools": tools, "seen": {"a": None, "b": 1}}
    messages[1]["tool_calls"][0]["function"]["arguments"]["query"] = None  # JSON says null where null is meant
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": messages}) + "\n")
    assert load(tmp_path / "a.jsonl")[0].messages[1] == messages[1] | {"content": ""}


def test_files_that_are_no_parquet(tmp_path):
    assert refused(tmp_path / "none.parquet") == f"data.source: there is no file {tmp_path}/none.parquet"
    rows = [{"id": n, "problem": "q", "answer": float("nan")} for n in (1, 1, 2)]
    whole = parquet(tmp_path / "whole.parquet", rows)
    assert len(load(whole)) == 2  # NaN, which does not equal itself
    (tmp_path / "damaged.parquet").write_bytes(whole.read_bytes()[:-9])
    assert "damaged.parquet as parquet: " in refused(tmp_path / "damaged.parquet")


@pytest.mark.parametrize(
    ("module", "source", "extra"),
    [("datasets", "datasets:json", "datasets"), ("reasoning_gym", "reasoning_gym:chain_sum", "reasoning-gym")],
)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, module, source, extra):
    monkeypatch.setitem(sys.modules, module, None)  # makes its import a ModuleNotFoundError
    assert refused(source).startswith(f"data.source: {source}: ")
    assert refused(source).endswith(f"; pip install 'dynamo-megatron[{extra}]'")


@pytest.fixture
def rows_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": f"{i}+1?", "answer": i + 1}) + "\n" for i in range(4)))
    return path


def test_folders_of_save_to_disk(tmp_path):
    train = datasets.Dataset.from_list([verl_row(i) for i in range(3)])
    test = datasets.Dataset.from_list([verl_row(7)])
    datasets.DatasetDict({"train": train, "test": test, "no": test}).save_to_disk(tmp_path / "both")
    train.save_to_disk(tmp_path / "one")
    assert [p.answer for p in load(f"datasets:{tmp_path}/both")] == ["1", "2", "3"]
    (prompt,) = load(f"datasets:{tmp_path}/both?split=test")
    assert prompt.messages == [{"role": "user", "content": "7+1?"}] and prompt.meta["extra_info"]["index"] == 7
    assert prompt.source == f"datasets:{tmp_path}/both?split=test"
    assert len(load(f"datasets:{tmp_path}/both?split=no")) == 1  # Norwegian, not YAML's False
    assert [p.answer for p in load(f"datasets:{tmp_path}/one")] == ["1", "2", "3"]
    assert "KeyError: 'dev'" in refused(f"datasets:{tmp_path}/both?split=dev")


def test_what_load_dataset_takes(rows_file, tmp_path):
    source = f"datasets:json?data_files={rows_file}&cache_dir={tmp_path}/cache"
    assert [p.text for p in load(source)] == ["0+1?", "1+1?", "2+1?", "3+1?"]
    assert [p.answer for p in load(f"{source}&split=train[1:3]")] == [2, 3]
    listed = f"datasets:json?data_files=['{rows_file}']&cache_dir={tmp_path}/cache&name=main"
    assert len(load(listed)) == 4
    assert "row 1: no 'problem'; the row has question, answer" in refused(source, prompt_key="problem")
    for options, words in [
        ("split=test", "ValueError: Unknown split"),
        ("data_dir=[1", "'data_dir' is not YAML: '[1'"),
    ]:
        assert words in refused(f"{source}&{options}")
