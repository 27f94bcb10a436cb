import datetime
import json
import sys
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dynamo_megatron.config import DataConfig
from dynamo_megatron.data import sources
from dynamo_megatron.data.sources import load_prompts


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def load(source, needs_answer=False, conversations=False, **settings):
    return load_prompts(
        DataConfig(source=str(source), **settings), needs_answer=needs_answer, conversations=conversations
    )


def refused(source, **settings):
    with pytest.raises(ValueError) as error:
        load(source, **settings)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_rows_keep_id_answer_and_the_other_columns(tmp_path):
    path = write(tmp_path / "a.jsonl", {"id": 7, "problem": "1+1?", "answer": 2, "level": "easy"}, "")
    (prompt,) = load(path)
    assert (prompt.prompt_id, prompt.text, prompt.answer, prompt.source) == ("7", "1+1?", 2, path)
    assert prompt.meta == {"level": "easy"} and prompt.messages is None and prompt.tokens is None


def test_a_conversation_that_ends_with_an_answer_needs_no_column_for_it(tmp_path):
    messages = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    path = write(tmp_path / "a.jsonl", {"id": "a", "x": {"messages": messages}, "n": 1})
    (prompt,) = load(path, prompt_key="x.messages", conversations=True)
    assert prompt.messages == messages and prompt.answer is None and prompt.meta["n"] == 1
    assert "data.template: chat" in refused(path, conversations=True, prompt_key="x.messages", template="{prompt}")
    path = write(tmp_path / "b.jsonl", {"id": "a", "messages": messages, "answer": "3"})
    assert load(path, prompt_key="messages", conversations=True)[0].answer == "3"
    assert "the last message is the assistant's; leave it out" in refused(path, prompt_key="messages")
    assert "no 'solution'" in refused(path, prompt_key="messages", answer_key="solution")
    path = write(tmp_path / "c.jsonl", {"id": "a", "messages": messages[:1]})
    assert "no 'answer' or 'reward_model.ground_truth'" in refused(path, prompt_key="messages")


def test_an_answer_at_the_end_of_a_conversation_is_for_training_on_it_alone(tmp_path, caplog):
    row = {"id": "b", "problem": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "2"}]}
    path = write(tmp_path / "a.jsonl", GOOD, row)
    assert [prompt.prompt_id for prompt in load(path, needs_answer=True)] == ["a"]
    assert "1 of 2 rows cannot be used and are skipped" in caplog.text
    both = load_prompts(DataConfig(source=path), needs_answer=True, conversations=True)
    assert [prompt.prompt_id for prompt in both] == ["a", "b"]


GOOD = {"id": "a", "problem": "q", "answer": "1"}


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ('{"id": "b", "problem": "caf\\udfff"}', "not JSON"),
        ("[" * 200_000, "not JSON: recursion limit exceeded"),
        ("[1, 2]", "JSON object, not list"),
        ({"id": "b", "answer": "1"}, "or 'question' or 'prompt'; the row has id, answer (set data.prompt_key)"),
        ({"id": "b", "problem": "q"}, "no 'answer' or 'reward_model.ground_truth'; the row has id, problem"),
        ({"id": "b", "problem": None, "answer": "1"}, "'problem' must be text or a list of messages, not null"),
        ({"id": "b", "problem": " \n", "answer": "1"}, "the prompt is empty"),
        ({"id": "b", "problem": [{"role": "user"}], "answer": "1"}, "needs 'role' and 'content'"),
        ({"id": None, "problem": "q", "answer": "1"}, "must be text or a whole number, not None"),
        ({"id": "a", "problem": "other", "answer": "1"}, "'a' is taken by"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, bad, words):
    path = write(tmp_path / "a.jsonl", GOOD, "", bad, bad)
    message = refused(path)  # most rows are bad
    assert message.startswith(f"{path}:3: ") and words in message


@pytest.mark.parametrize(
    "bad",
    [
        {"problem": "q", "answer": " "},
        {"problem": "q", "answer": None, "reward_model": {"ground_truth": None}},
        {"problem": None, "answer": "1"},
    ],
)
def test_a_row_that_is_no_problem_is_skipped_and_counted(tmp_path, caplog, bad):
    path = write(tmp_path / "a.jsonl", GOOD, bad, bad)
    assert refused(path, needs_answer=True).startswith(f"{path}:2: ")  # most rows are bad
    path = write(tmp_path / "b.jsonl", GOOD, bad, GOOD)
    assert [p.prompt_id for p in load(path, needs_answer=True)] == ["a"]
    counted = "1 of 3 rows cannot be used and are skipped, the first: "
    assert f"data.source: {path}: {counted}{path}:2: " in caplog.text


def test_keys_that_are_not_set_are_looked_for_in_each_row(tmp_path):
    in_verl = {"prompt": "c", "reward_model": {"ground_truth": 3}}
    rows = [{"prompt": "c", "question": "b", "problem": "a", "answer": 1}, {**in_verl, "question": "b", "answer": 2}]
    path = write(tmp_path / "a.jsonl", *rows, in_verl)
    prompts = load(path)
    assert [(p.text, p.answer) for p in prompts] == [("a", 1), ("b", 2), ("c", 3)]
    assert prompts[0].meta == {"prompt": "c", "question": "b"}
    empty = write(
        tmp_path / "empty.jsonl",
        {"problem": None, "question": "2+2?", "answer": None, "reward_model": {"ground_truth": "4"}},
        {"problem": " ", "prompt": "2+3?", "answer": "", "reward_model": {"ground_truth": "5"}},
    )
    assert [(p.text, p.answer) for p in load(empty, needs_answer=True)] == [("2+2?", "4"), ("2+3?", "5")]
    assert ":2: no 'problem'" in refused(path, prompt_key="problem")


def test_other_encodings_missing_and_empty_files(tmp_path):
    (tmp_path / "latin.jsonl").write_bytes(b'{"problem": "caf\xe9", "answer": 1}\n')
    assert "latin.jsonl:1: not UTF-8" in refused(str(tmp_path / "latin.jsonl"))
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode())
    assert len(load(str(tmp_path / "bom.jsonl"))) == 1
    (tmp_path / "empty.jsonl").write_text("\n\n")
    assert "has no prompts" in refused(str(tmp_path / "empty.jsonl"))
    assert "there is no file" in refused(str(tmp_path / "none.jsonl"))
    assert "is no known source" in refused("gsm8k")


@pytest.mark.parametrize("source", ["use_cases/json.jsonl", "configs/use_cases/json.jsonl"])
def test_shipped_problems_are_named_in_any_folder_and_a_file_of_ones_own_comes_first(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    assert len(load(source)) == 20
    assert "there is no file use_cases/jsn.jsonl" in refused("use_cases/jsn.jsonl")
    Path(source).parent.mkdir(parents=True)
    write(Path(source), GOOD)
    assert len(load(source)) == 1


def test_content_ids_do_not_depend_on_place_and_repeats_are_dropped(tmp_path, caplog):
    rows = [{"problem": f"{i}+1?", "answer": i + 1} for i in range(5)]
    first = {p.text: p.prompt_id for p in load(write(tmp_path / "a.jsonl", *rows))}
    second = {p.text: p.prompt_id for p in load(write(tmp_path / "b.jsonl", *rows[::-1], rows[2]))}
    assert first == second and len(set(first.values())) == 5
    assert "dropped 1 rows" in caplog.text
    assert load(write(tmp_path / "c.jsonl", {"problem": "0+1?", "answer": "1"}))[0].prompt_id != first["0+1?"]
    numbered = [{"problem": "q", "answer": 1, "index": i} for i in range(3)]
    (kept,) = load(write(tmp_path / "d.jsonl", *numbered))
    assert kept.meta == {"index": 0} and "dropped 2 rows that repeat another one; 2 of them have other" in caplog.text
    assert "is taken by" in refused(write(tmp_path / "e.jsonl", *({"id": "a"} | row for row in numbered)))


def test_reasoning_gym_is_reproducible_and_its_meta_is_plain_data():
    source = "reasoning_gym:chain_sum?size=5&seed=3&min_terms=2&max_terms=3"
    prompts = load(source)
    assert prompts == load(source) and len({p.prompt_id for p in prompts}) == 5
    entry = prompts[0].meta["reasoning_gym"]["entry"]
    assert entry["question"] == prompts[0].text and entry["answer"] == prompts[0].answer
    assert json.loads(json.dumps(prompts[0].meta))["reasoning_gym"]["options"]["min_terms"] == 2
    ids = [[p.prompt_id for p in load(f"reasoning_gym:chain_sum?size=2{more}")] for more in ("", "&seed=0&min_terms=2")]
    assert ids[0] == ids[1]  # defaults written out
    assert {p.prompt_id for p in load(source.replace("seed=3", "seed=4"))}.isdisjoint(p.prompt_id for p in prompts)
    assert "refuses" in refused("reasoning_gym:chainsum")
    assert "unexpected keyword argument 'min_term'" in refused("reasoning_gym:chain_sum?min_term=2")
    assert "refuses {'seed': 0, 'size': '[1'}" in refused("reasoning_gym:chain_sum?size=[1")  # text if not YAML


def test_the_users_iterator(tmp_path, monkeypatch):
    (tmp_path / "my_data_c1.py").write_text(
        "from dynamo_megatron.types import Prompt\n"
        "def rows():\n"
        "    yield {'problem': '1+1?', 'answer': 2}\n"
        "    yield Prompt('p', text='2+2?', answer=4)\n"
        "def bad_rows():\n    return [{'problem': 'q', 'answer': 1}, {'problem': ''}, {'problem': ''}]\n"
        "def numbered():\n    return [Prompt(n, text=str(n), answer=n) for n in range(3)]\n"
        "def none():\n    return None\n"
        "def odd():\n    return [{'problem': 'q', 'answer': a} for a in ({'a', 'b'}, {'b', 'a'}, {(0, 1): 2})]\n"
        "def fails():\n    yield {'problem': 'q', 'answer': 1}\n    yield {}['absent']\n"
        "def ends():\n    yield {'problem': 'q', 'answer': 1}\n    raise SystemExit(0)\n"
        "def again():\n    while True:\n        yield {'problem': 'q', 'answer': 1}\n        yield {'problem': ''}\n"
        "def endless():\n    n = 0\n    while True:\n        yield {'problem': str(n), 'answer': n}\n        n += 1\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    assert [p.text for p in load("my_data_c1:rows")] == ["1+1?", "2+2?"]
    ids = ["21b2064913fd3d05", "c82effc70b2cc62a"]
    assert [p.prompt_id for p in load("my_data_c1:odd")] == ids  # in every process
    assert "my_data_c1:numbered row 1: the id 0 must be a str" in refused("my_data_c1:numbered")
    assert "my_data_c1:bad_rows row 2: no 'answer'" in refused("my_data_c1:bad_rows")
    assert "my_data_c1:fails after row 1: KeyError: 'absent' (" in refused("my_data_c1:fails")
    assert "my_data_c1:ends after row 1: SystemExit: 0 (" in refused("my_data_c1:ends")
    assert [p.answer for p in load("my_data_c1:endless", limit=3)] == [0, 1, 2]
    monkeypatch.setattr(sources, "MOST_ROWS", 5)
    assert refused("my_data_c1:endless").endswith("my_data_c1:endless yields more than 5 rows; set data.limit")
    monkeypatch.setattr(sources, "MOST_OLD", 3)
    refusal = refused("my_data_c1:again", limit=2)
    assert "my_data_c1:again: no new problem in 3 rows after row 1 (the first row that cannot be used: " in refusal
    assert len(load(write(tmp_path / "a.jsonl", *[{"problem": "q", "answer": 1}] * 9))) == 1  # a file has an end
    assert "'NoneType' object is not iterable" in refused("my_data_c1:none")
    assert "has no 'nothing'" in refused("my_data_c1:nothing")


# Parquet files and the libraries of data sets


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
    assert [p.prompt_id for p in load(write(tmp_path / "same.jsonl", *rows))] == [p.prompt_id for p in prompts]


def test_parquet_values_are_plain_python(tmp_path):
    others = {"tags": ["a"], "deep": {"x": [{"y": 1}]}, "when": datetime.datetime(2026, 1, 2), "raw": b"x"}
    table = pa.Table.from_pylist([{"id": 7, "question": "q", "answer": 1.5, **others}])
    counts = pa.array([[("a", 1), ("b", 2)]], pa.map_(pa.string(), pa.int64()))
    pq.write_table(table.append_column("counts", counts), tmp_path / "a.parquet")
    (prompt,) = load(tmp_path / "a.parquet")
    assert (prompt.prompt_id, prompt.text, prompt.answer) == ("7", "q", 1.5) and type(prompt.answer) is float
    assert prompt.meta == others | {"counts": {"a": 1, "b": 2}}
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
    (prompt,) = load(path, conversations=True)
    assert prompt.messages == [messages[0], messages[1] | {"content": ""}, messages[2]]
    assert prompt.meta == {"tools": tools, "seen": {"a": None, "b": 1}}
    messages[1]["tool_calls"][0]["function"]["arguments"]["query"] = None  # JSON says null where null is meant
    (prompt,) = load(write(tmp_path / "a.jsonl", {"prompt": messages}), conversations=True)
    assert prompt.messages[1] == messages[1] | {"content": ""}


def test_files_that_are_no_parquet(tmp_path):
    assert refused(tmp_path / "none.parquet") == f"data.source: there is no file {tmp_path}/none.parquet"
    rows = [{"id": n, "problem": "q", "answer": float("nan")} for n in (1, 1, 2)]
    whole = parquet(tmp_path / "whole.parquet", rows)
    assert len(load(whole)) == 2  # NaN, which does not equal itself
    (tmp_path / "damaged.parquet").write_bytes(whole.read_bytes()[:-9])
    assert "damaged.parquet: " in refused(tmp_path / "damaged.parquet")


@pytest.mark.parametrize(
    ("module", "source", "extra"),
    [("datasets", "datasets:json", "datasets"), ("reasoning_gym", "reasoning_gym:chain_sum", "reasoning-gym")],
)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, module, source, extra):
    monkeypatch.setitem(sys.modules, module, None)  # makes its import a ModuleNotFoundError
    assert refused(source).startswith(f"data.source: {source}: ")
    assert refused(source).endswith(f"; pip install 'dynamo-megatron[{extra}]'")


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
    for option, has in (
        ("one?split=test", "train"),
        ("both?split=train[:5]", "train, test, no"),
        ("both?x=1", "train"),
    ):
        assert f"takes no option but split, and {tmp_path}/{option[:4].rstrip('?')} has {has}" in refused(
            f"datasets:{tmp_path}/{option}"
        )


def test_what_load_dataset_takes(tmp_path):
    rows_file = write(tmp_path / "rows.jsonl", *({"question": f"{i}+1?", "answer": i + 1} for i in range(4)))
    source = f"datasets:json?data_files={rows_file}&cache_dir={tmp_path}/cache"
    assert [p.text for p in load(source)] == ["0+1?", "1+1?", "2+1?", "3+1?"]
    assert [p.answer for p in load(f"{source}&split=train[1:3]")] == [2, 3]
    listed = f"datasets:json?data_files=['{rows_file}']&cache_dir={tmp_path}/cache&name=main"
    assert len(load(listed)) == 4
    assert "row 1: no 'problem'; the row has question, answer" in refused(source, prompt_key="problem")
    assert "ValueError: Unknown split" in refused(f"{source}&split=test")
