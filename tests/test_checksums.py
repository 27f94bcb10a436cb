"""Checksums of files: the same whether a file is hashed while it is written or read afterwards."""

import io
import random

import pytest
import torch
import xxhash

from dynamo_megatron import checksums
from dynamo_megatron.checksums import ChecksumWriter, file_checksum, file_checksums


def test_a_file_hashed_as_torch_writes_it_in_two_openings(tmp_path):
    file, digest = tmp_path / "data", None
    for mode, size in (("wb", 100_000), ("ab", 7)):
        with ChecksumWriter(file, mode, digest) as stream:
            stream.write(b"head")
            torch.save(torch.rand(size), stream)
            digest = stream.digest
    assert digest.hexdigest() == file_checksum(file) == xxhash.xxh3_128_hexdigest(file.read_bytes())


def test_what_is_hashed_is_written_in_order(tmp_path):
    with ChecksumWriter(tmp_path / "data") as stream, pytest.raises(io.UnsupportedOperation, match="seek"):
        stream.seek(0)


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 5000])
def test_files_of_any_number_of_blocks(tmp_path, monkeypatch, size):
    monkeypatch.setattr(checksums, "BLOCK", 1000)
    dice = random.Random(size)
    files = [tmp_path / name for name in "abc"]
    for file in files:
        file.write_bytes(dice.randbytes(size))
    expected = {file: xxhash.xxh3_128_hexdigest(file.read_bytes()) for file in files}
    assert file_checksums(files) == expected and file_checksums([]) == {}
