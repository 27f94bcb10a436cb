"""Rows of data of others: each is read as what it says, or is one line that names its place."""

import json
import os
import random
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from alterations import CONTENT, alter

from dynamo_megatron.config import DataConfig
from dynamo_megatron.data import load_prompts, readers

GOOD = b'{"id": "a", "problem": "1+1=", "answer": "2"}'


def load(source, **settings):
    return load_prompts(DataConfig(source=str(source), **settings))


def refused(source, **settings) -> str:
    with pytest.raises(ValueError) as error:
        load(source, **settings)
    assert str(error.value).isprintable() and len(str(error.value)) < 700
    return str(error.value)


def row(value: bytes, column: bytes = b"level") -> bytes:
    return b'{"id": "b", "problem": "1+2=", "answer": "3", "' + column + b'": ' + value + b"}"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (row(b"[" * 200_000), "nested more than 100 deep"),
        (row(b"[" * 300 + b"]" * 300), "nested more than 100 deep"),
        (row(b'{"a":' * 101 + b"1" + b"}" * 101), "nested more than 100 deep"),
        (row(b"9" * 6000), "a number of more than 4,300 digits"),
        (row(b"-" + b"9" * 6000, b"answer"), "a number of more than 4,300 digits"),
        (row(b"1e999"), "the number 1e999, which is too large"),
        (row(b"NaN"), "NaN, which is not JSON"),
        (row(b"[-Infinity]"), "-Infinity, which is not JSON"),
        (row(b'"\\ud800"', b"problem"), "the key 'problem' twice"),
        (row(b'["\\udfff"]'), "half of a surrogate pair"),
        (row(b"1", b"\\ud800"), "half of a surrogate pair"),
        (row(b'"a\0b"'), "not JSON: Invalid control character at column 58"),
        (row(b'"\xff"'), "not UTF-8 text: invalid start byte at byte 56"),
        (row(b'"\xed\xa0\x80"'), "not UTF-8 text: invalid continuation byte"),
        (row(b"1", b"id"), "the key 'id' twice in one object"),
        (b"\xef\xbb\xbf" + GOOD, "not JSON: Unexpected UTF-8 BOM"),
        (GOOD.decode().encode("utf-16"), "not UTF-8 text"),
        (GOOD.decode().encode("utf-16-le"), "not JSON"),
        (b"\x1f\x8b\x08" + GOOD, "not UTF-8 text: invalid start byte at byte 1"),
        (b'{"\\u001b[31m' + b"k" * 1000 + b'": 1}', "no 'problem' or 'question' or 'prompt'; the row has k"),
        (GOOD[:-2], "not JSON: Unterminated string starting at column 42"),
    ],
)
def test_a_row_that_cannot_be_read_names_its_line(tmp_path, line, said):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD + b"\n" + line + b"\n")
    why = refused(path, on_bad_row="error")
    assert why.startswith(f"{path}:2: ") and said in why


def test_a_line_without_end_is_not_read_whole(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD + b"\n")
    os.truncate(path, 1 << 36)
    assert refused(path) == f"{path}:2: a line of more than 64 MiB; write one JSON object a line"
    monkeypatch.setattr(readers, "LONGEST_LINE", 60)
    path.write_bytes(b"\r\n".join([GOOD, GOOD.replace(b"a", b"b", 1) + b" " * 60, b""]))
    assert refused(path).startswith(f"{path}:2: a line of more than")


def test_line_ends_blanks_and_a_first_bom_do_not_matter(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD + b"\r\n \r\n" + row(b'"\\u0000 \\ud83d\\ude00"') + b"\r\n")
    one, two = load(path)
    assert (one.prompt_id, two.prompt_id, two.where) == ("a", "b", f"{path}:3")
    assert two.meta == {"level": "\0 \U0001f600"}


def test_a_parquet_row_is_named(tmp_path):
    path = tmp_path / "rows.parquet"
    texts = pa.array([b"1+1=", b"1+2=", b"\xff", b"1+4="], pa.binary()).cast(pa.string(), safe=False)
    pq.write_table(pa.table({"problem": texts, "answer": ["2", "3", "4", "5"]}), path, row_group_size=4)
    assert refused(path).startswith(f"data.source: cannot read {path} as parquet after row 2: ")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert refused(path).startswith(f"data.source: cannot read {path} as parquet: ")


def test_a_row_of_a_function_is_named(tmp_path, monkeypatch):
    (tmp_path / "hostile_rows.py").write_text(
        "from dynamo_megatron.types import Prompt\n"
        "deep = []\n"
        "for _ in range(5000): deep = [deep]\n"
        "def nested(): yield {'problem': '1', 'answer': deep}\n"
        "def half(): yield Prompt('a', text='\\ud800')\n"
        "def digits(): yield {'id': 10 ** 5000, 'problem': '1', 'answer': 1}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert refused("hostile_rows:nested", limit=1) == "hostile_rows:nested row 1: nested more than 100 deep"
    assert refused("hostile_rows:half", limit=1).startswith("hostile_rows:half row 1: half of a surrogate pair")
    assert refused("hostile_rows:digits", limit=1).startswith("hostile_rows:digits row 1: a number of more than 4,300")


def test_a_repeated_row_with_nan_is_dropped(tmp_path):
    path = tmp_path / "rows.parquet"
    rows = [{"id": "a", "problem": "1+1=", "answer": "2", "level": float("nan")}] * 2
    pq.write_table(pa.Table.from_pylist(rows), path)
    assert len(load(path)) == 1


@pytest.mark.parametrize("count", [150, pytest.param(10_000, marks=[pytest.mark.full, pytest.mark.timeout(1800)])])
def test_altered_rows_are_read_as_what_they_say_or_named(tmp_path, count):
    """Of rows of the usual shapes, by the seeded grammar."""
    rng, path = random.Random(count), tmp_path / "rows.jsonl"
    rows = [
        {"id": 7, "problem": "1+1=", "answer": "2", "level": 0.5, "tags": ["a", "b"]},
        {
            "prompt": [{"role": "user", "content": "1+1?"}],
            "reward_model": {"ground_truth": "2"},
            "extra_info": {"i": 3},
        },
    ]
    outcomes = {"read": 0, "refused": 0}
    for number in range(count):
        alteration = alter(rng, json.dumps(rng.choice(rows)).encode(), kinds=CONTENT)
        path.write_bytes(GOOD + b"\n" + alteration.body + b"\n")
        try:
            prompts = load(path, on_bad_row="error")
        except ValueError as error:
            why = str(error)
            assert re.match(rf"{path}:[23]: ", why) and why.isprintable() and len(why) < 700, f"{number}: {alteration}"
            outcomes["refused"] += 1
        else:
            said = [json.loads(line) for line in alteration.body.split(b"\n") if line.strip()]
            assert len(prompts) == 1 + len(said), f"{number}: {alteration}"
            for prompt, value in zip(prompts[1:], said, strict=True):
                text = value.get("problem", value.get("question", value.get("prompt")))
                assert prompt.text == text or prompt.messages == text, f"{number}: {alteration}"
                if "id" in value:
                    assert prompt.prompt_id == str(value["id"]), f"{number}: {alteration}"
                assert set(prompt.meta) <= set(value), f"{number}: {alteration}"
            outcomes["read"] += 1
    assert min(outcomes.values()) > count // 20, outcomes
