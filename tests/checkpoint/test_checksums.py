"""Checksums of files: the same whether a file is hashed while it is written or read afterwards."""

import io
import random

import pytest
import torch
import xxhash

from dynamo_megatron.checkpoint import checksums
from dynamo_megatron.checkpoint.checksums import ChecksumWriter, file_checksum, file_checksums


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


@pytest.mark.parametrize(("bound_to", "threads"), [(8, 2), (3, 3), (1, 1)])
def test_threads_are_the_cores_of_this_process(tmp_path, monkeypatch, bound_to, threads):
    """Of 8 cores and 4 ranks: a rank that may use all of them takes its share, one that is bound to some takes them."""
    monkeypatch.setattr(checksums.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(checksums.os, "sched_getaffinity", lambda process: set(range(bound_to)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    pools = []

    class Pool(checksums.ThreadPoolExecutor):
        def __init__(self, workers):
            pools.append(workers)
            super().__init__(workers)

    monkeypatch.setattr(checksums, "ThreadPoolExecutor", Pool)
    files = [tmp_path / name for name in "abcd"]
    for file in files:
        file.write_bytes(b"")
    file_checksums(files)
    assert pools == [threads]
