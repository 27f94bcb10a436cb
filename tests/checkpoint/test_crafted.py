"""Checkpoints and models of others: no code that a file names is run, and the refusal is one line."""

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from config_files import refusal

from dynamo_megatron.checkpoint.torch_dist import TorchDistReader, TorchDistWriter
from dynamo_megatron.cli import main
from dynamo_megatron.data.templates import load_tokenizer
from dynamo_megatron.models import load_model_config


class Calls:
    """Unpickles as the call of a function."""

    def __init__(self, function, *arguments):
        self._called = function, arguments

    def __reduce__(self):
        return self._called


def pickles(command: str, protocol: int = 4) -> dict[str, bytes]:
    """{kind: pickle that runs `command` in the shell}."""

    def text(value: str) -> bytes:
        return b"\x8c" + bytes([len(value)]) + value.encode()

    def by_hand(*instructions: bytes) -> bytes:
        return b"\x80\x04" + b"".join(instructions) + b"."

    metadata = text("torch.distributed.checkpoint.metadata") + text("Metadata") + b"\x93"
    return {
        "a call": pickle.dumps([Calls(os.system, command)], protocol),
        "an attribute": pickle.dumps([Calls(getattr, torch.Size, "__class__")], protocol),
        "a dotted name": by_hand(text("torch.serialization"), text("os.system"), b"\x93", text(command), b"\x85R"),
        "a state that is a method": by_hand(
            metadata, b")\x81}", text("__setstate__"), text("posix"), text("system"), b"\x93sb"
        ),
    }  # fmt: skip


def torch_file(crafted: bytes) -> bytes:
    """What torch.save writes, with another pickle in it."""
    stream, copied = io.BytesIO(), io.BytesIO()
    torch.save({"x": 1}, stream)
    with zipfile.ZipFile(stream) as source, zipfile.ZipFile(copied, "w") as target:
        for entry in source.infolist():
            target.writestr(entry.filename, crafted if entry.filename.endswith("/data.pkl") else source.read(entry))
    return copied.getvalue()


@pytest.fixture
def folder(tmp_path) -> Path:
    """One tensor of four values, and an object."""
    made = tmp_path / "made"
    made.mkdir()
    writer = TorchDistWriter(made)
    writer.add("w", torch.ones(4), (4,), (0,))
    writer.add_object("object/shard_0_1", [None])
    writer.close()
    return made


def test_members_of_enumerations_may_be_pickled_by_name(folder, monkeypatch):
    """As Python 3.11.2 does."""
    kind = type(torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    monkeypatch.setattr(kind, "__reduce_ex__", lambda member, _: (getattr, (kind, member.name)))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert b"getattr" in (folder / ".metadata").read_bytes() and TorchDistReader(folder).names == ["w"]


@pytest.mark.parametrize("kind", pickles(""))
def test_a_crafted_pickle_runs_nothing(folder, tmp_path, kind, capsys):
    """As `.metadata`, and among the tensors."""
    ran = tmp_path / "ran"
    crafted = pickles(f"touch {ran}")[kind]
    whole = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(crafted)
    said = refusal(TorchDistReader, folder)
    assert said.startswith(f"{folder / '.metadata'}: cannot be read (")
    assert "names posix.system, " in said or kind in ("an attribute", "a dotted name")
    assert said.endswith("; copy or convert the model again")
    assert main(["inspect", str(folder)]) == 2 and "cannot be read" in capsys.readouterr().err
    metadata, data = pickle.loads(whole), torch_file(pickles(f"touch {ran}", 2)[kind])
    (info,) = (info for index, info in metadata.storage_data.items() if index.fqn == "w")
    info.offset, info.length = (folder / info.relative_path).stat().st_size, len(data)
    with open(folder / info.relative_path, "ab") as stream:
        stream.write(data)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    reader = TorchDistReader(folder)
    assert "tensor w cannot be read" in refusal(reader.read, "w", (0,), (4,))
    assert not ran.exists()


LOADS = """
import pickle, sys
from pathlib import Path
import torch
import torch.distributed as dist
from dynamo_megatron.policy.backend import enable_cpu
enable_cpu()
folder = Path(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from dynamo_megatron.checkpoint.policy_state import load_trusted_classes

def sharded(tensor, value):
    tensor = ShardedTensor.from_rank_offsets("w", tensor, (0, 0, 1))
    return {"w": tensor, "o": ShardedObject("object", value, (1,), (0,))}

saved, whole = folder / "saved", torch.rand(4, 3)
saved.mkdir()
dist_checkpointing.save({**sharded(whole, {"a": [1, 2.5]}), "common": {"step": 3}}, str(saved))
loaded = load_trusted_classes(sharded(torch.zeros(4, 3), None), saved)
assert torch.equal(loaded["w"], whole) and loaded["o"] == {"a": [1, 2.5]} and loaded["common"] == {"step": 3}
print("loaded", flush=True)
metadata, data = pickle.loads((saved / ".metadata").read_bytes()), (folder / "crafted").read_bytes()
info = next(info for index, info in metadata.storage_data.items() if index.fqn.startswith("object"))
file = saved / info.relative_path
info.offset, info.length = file.stat().st_size, len(data)
file.write_bytes(file.read_bytes() + data)
(saved / ".metadata").write_bytes(pickle.dumps(metadata))
load_trusted_classes(sharded(torch.zeros(4, 3), None), saved)
"""


@pytest.mark.full
def test_what_plain_megatron_wrote_is_loaded_and_a_crafted_object_in_it_runs_nothing(tmp_path):
    (tmp_path / "crafted").write_bytes(torch_file(pickles(f"touch {tmp_path / 'ran'}", 2)["a call"]))
    words = [sys.executable, "-P", "-c", LOADS, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.stdout == "loaded\n" and done.returncode == 1 and "posix.system" in done.stderr, done.stderr
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def model(model_of, tmp_path):
    """With modules that leave `ran` in their place when they are imported."""
    made = shutil.copytree(model_of(), tmp_path / "model")
    for name in ("configuration_mine.py", "modeling_mine.py", "tokenization_mine.py"):
        (made / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: ...\nclass Tokenizer: ...\n")
    return made


def test_a_model_folder_with_code_runs_none_of_it(model, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoConfig": "configuration_mine.Config"}}))
    assert "auto_map: " in refusal(load_model_config, model)
    (model / "config.json").write_text(json.dumps(config))
    auto_map = {"AutoTokenizer": ["tokenization_mine.Tokenizer", "tokenization_mine.Tokenizer"]}
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"auto_map": auto_map}))
    load_tokenizer(model)
    assert not (tmp_path / "ran").exists()
