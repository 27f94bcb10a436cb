"""Rows of data of others: each is read as what it says, or is one line that names its place."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dynamo_megatron.config import DataConfig
from dynamo_megatron.data import load_prompts

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
        (row(b"9" * 6000), "a number of more than 4,300 digits"),
        (row(b"1e999"), "the number 1e999, which is too large"),
        (row(b"NaN"), "NaN, which is not JSON"),
        (row(b"1", b"\\ud800"), "half of a surrogate pair"),
        (row(b'"\xff"'), "not UTF-8 text: invalid start byte at byte 56"),
        (row(b"1", b"id"), "the key 'id' twice in one object"),
        (GOOD[:-2], "not JSON: Unterminated string starting at column 42"),
    ],
)
def test_a_row_that_cannot_be_read_names_its_line(tmp_path, line, said):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD + b"\n" + line + b"\n")
    why = refused(path, on_bad_row="error")
    assert why.startswith(f"{path}:2: ") and said in why


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
