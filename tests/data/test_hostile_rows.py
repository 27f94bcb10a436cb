"""Rows of data of others: each is read as what it says, or is one line that names its place."""

import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

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
        (row(b"[" * 200_000), "not JSON: recursion limit exceeded"),
        (row(b"9" * 6000), "not JSON: number out of range"),
        (row(b"[NaN]"), "not JSON: expected value"),
        (row(b'["\\udfff"]'), "not JSON: "),
        (row(b'"\xff"'), "not UTF-8 text: invalid start byte at byte 56"),
        (GOOD.decode().encode("utf-16"), "not UTF-8 text"),
        (b'{"\\u001b[31m' + b"k" * 1000 + b'": 1}', "no 'problem' or 'question' or 'prompt'; the row has k"),
        (GOOD[:-2], "not JSON: EOF while parsing a string"),
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


def test_a_repeated_row_with_nan_is_dropped(tmp_path):
    path = tmp_path / "rows.parquet"
    rows = [{"id": "a", "problem": "1+1=", "answer": "2", "level": float("nan")}] * 2
    pq.write_table(pa.Table.from_pylist(rows), path)
    assert len(load(path)) == 1
