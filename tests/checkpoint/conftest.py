"""Tiny models, what `convert` makes of one, and the command itself."""

import functools

import pytest

from dynamo_megatron import cli
from dynamo_megatron.checkpoint.convert import hf2mcore

SIZES = {"vocab": 104, "hidden": 32, "ffn": 64}


@pytest.fixture(scope="session")
def model_of(model_of):
    return functools.partial(model_of, **SIZES)


@pytest.fixture(scope="session")
def converted(model_of, tmp_path_factory):
    """(Hugging Face folder, what hf2mcore made of it). Do not change them."""
    mcore = tmp_path_factory.mktemp("converted") / "mcore"
    hf2mcore(model_of(), mcore)
    return model_of(), mcore


@pytest.fixture
def flip():
    """flip(file) changes one bit in its middle."""

    def flip_bit(file):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 4
        file.write_bytes(content)

    return flip_bit


@pytest.fixture
def convert(capsys):
    """convert(*words) -> (exit code, stderr) of `dynamo-megatron convert`."""

    def run(*words):
        capsys.readouterr()
        return cli.main(["convert", *map(str, words)]), capsys.readouterr().err.rstrip("\n")

    return run


@pytest.fixture
def refused(convert, tmp_path):
    """refused(direction, source, *words) -> the one line of a conversion into tmp_path/out, which leaves nothing."""

    def run(direction, source, *words):
        before = sorted(tmp_path.iterdir())
        code, line = convert(direction, source, tmp_path / "out", *words)
        assert code == 2 and line and sorted(tmp_path.iterdir()) == before, line
        return line.splitlines()[-1]

    return run
