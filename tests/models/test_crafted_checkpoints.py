"""Checkpoints of others: what a crafted file names is neither imported nor called, and the refusal says what it was."""

import os
import pickle
import re
import runpy
import sys
from pathlib import Path

import crafted_pickles
import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from dynamo_megatron.checkpoint.convert import hf2mcore
from dynamo_megatron.checkpoint.torch_dist import TorchDistReader, TorchDistWriter
from dynamo_megatron.checkpoint.weights import open_weights
from dynamo_megatron.cli import main
from dynamo_megatron.models import load_model_config

RUNNING = ("reduce", "protocol 0", "protocol 2", "protocol 5", "in a list", "as a key", "eval", "a state on the list")
UNNAMED = ("protocol 5", "a dotted name", "__setstate__ of a listed class", "INST", "persistent id")  # by torch.load


@pytest.fixture
def folder(tmp_path) -> Path:
    """One tensor of four values."""
    made = tmp_path / "made"
    made.mkdir()
    writer = TorchDistWriter(made)
    writer.add("w", torch.ones(4), (4,), (0,))
    writer.close()
    return made


@pytest.fixture
def ran(tmp_path) -> Path:
    """The file that the crafted command leaves."""
    return tmp_path / "ran"


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError) as error:
        reader = TorchDistReader(folder)
        for key, stored in reader.tensors.items():
            reader.read(key, (0,) * len(stored.shape), stored.shape)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500
    return str(error.value)


def test_the_crafted_pickles_run_their_command_where_nothing_hinders(ran):
    made = crafted_pickles.running(f"touch {ran}")
    assert all(crafted_pickles.runs_it(made[kind][0], ran) for kind in RUNNING)


def test_metadata_that_names_a_function_is_refused_by_name(folder, ran):
    for crafted, named in crafted_pickles.running(f"touch {ran}").values():
        (folder / ".metadata").write_bytes(crafted)
        line = refusal(folder)
        assert line.startswith(f"{folder / '.metadata'}: ") and named in line
        assert not ran.exists()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_torch_and_megatron_write_is_read(folder, protocol):
    """Megatron adds the plans of the ranks, Python 3.14 writes protocol 5."""
    written = pickle.loads((folder / ".metadata").read_bytes())
    index, part = MetadataIndex("w", (0,), 0), ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
    data = TensorWriteData(part, TensorProperties(torch.float32), torch.Size([4]))
    written.all_local_plans = [SavePlan([WriteItem(index, WriteItemType.SHARD, tensor_data=data)], planner_data={})]
    written.planner_data, written.mcore_data = {"w": ("w", 0)}, {"w": {"shape": (4,)}}
    (folder / ".metadata").write_bytes(pickle.dumps(written, protocol))
    assert torch.equal(TorchDistReader(folder).read("w", (0,), (4,)), torch.ones(4))


def test_metadata_that_exhausts_the_reader_is_one_line(folder):
    for kind, crafted in crafted_pickles.exhausting().items():
        (folder / ".metadata").write_bytes(crafted)
        assert refusal(folder).startswith(f"{folder / '.metadata'}: "), kind


def test_a_tensor_whose_file_names_a_function_is_refused_by_name(folder, ran):
    for kind, (crafted, _) in crafted_pickles.torch_files(f"touch {ran}").items():
        (folder / "__0_0.distcp").write_bytes(crafted)
        (folder / ".metadata").write_bytes(crafted_pickles.metadata_of(length=len(crafted)))
        line = refusal(folder)
        assert line.startswith(f"{folder / '__0_0.distcp'}: w cannot be read (")
        assert "names " in line or ("Unsupported operand" in line and kind in UNNAMED), f"{kind}: {line}"
        assert not ran.exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"relative_path": "../made/__0_0.distcp"}, "is not in the folder"),
        ({"relative_path": "/etc/passwd"}, "is not in the folder"),
        ({"relative_path": "a\0b"}, "is not in the folder"),
        ({"relative_path": 3}, "is not in the folder"),
        ({"offset": -1}, "a value of type int in place of an offset in a file"),
        ({"offset": 1 << 70}, "a value of type int in place of an offset in a file"),
        ({"length": True}, "a value of type bool in place of a length in a file"),
        ({"length": 15}, r"tensor w: a part of \[4\] torch.float32 in 15 bytes"),
        ({"transform_descriptors": ["zstd"]}, "are transformed"),
    ],
)
def test_a_place_that_is_none_is_refused(folder, change, said):
    (folder / ".metadata").write_bytes(crafted_pickles.metadata_of(**change))
    assert re.search(said, refusal(folder))


def test_a_tensor_of_less_memory_than_values_is_refused(folder):
    """A few bytes of a file that would be copied to as many as the checkpoint says."""
    with open(folder / "__0_0.distcp", "wb") as stream:
        torch.save(torch.ones(1).expand(4), stream)
        size = stream.tell()
    (folder / ".metadata").write_bytes(crafted_pickles.metadata_of(length=size))
    assert "tensor w cannot be read (torch.float32 [4], torch.float32 [4]" in refusal(folder)


def test_a_pipe_in_place_of_a_file_is_not_waited_for(folder):
    (folder / ".metadata").unlink()
    os.mkfifo(folder / ".metadata")
    with pytest.raises(ValueError, match=r"no \.metadata; not a checkpoint"):
        TorchDistReader(folder)


def test_what_reads_a_converted_model_runs_nothing_of_it(tiny_model, tmp_path, ran, monkeypatch, capsys):
    """Conversion, comparison, inspection, and what a run and preflight open a model with."""
    folder = tmp_path / "converted"
    hf2mcore(tiny_model(), folder)
    crafted, _ = crafted_pickles.running(f"touch {ran}")["in a list"]
    (folder / ".metadata").write_bytes(crafted)
    (folder / "manifest.json").unlink()

    def tool(name: str, *words: object) -> int:
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        return runpy.run_path(str(Path(__file__).parents[2] / "tools" / f"{name}.py"))["main"]()

    calls = {
        "convert": lambda: main(["convert", "mcore2hf", str(folder), str(tmp_path / "out")]),
        "inspect": lambda: main(["inspect", str(folder)]),
        "verify": lambda: tool("verify_conversion", folder, tiny_model()),
    }
    for name, call in calls.items():
        code = call()
        said = capsys.readouterr().err
        assert not ran.exists(), name
        assert code == 2, f"{name}: {code} {said}"
        assert f"{folder / '.metadata'}: names posix.system" in said, f"{name}: {said}"
    with pytest.raises(ValueError, match=r"\.metadata: names posix\.system"):
        open_weights(folder, load_model_config(folder))
    assert not ran.exists()
