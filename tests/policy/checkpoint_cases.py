"""What tests of checkpoints share: a policy that ranks train, save and load, and how far two models are apart."""

import json
import resource
import signal
import threading
from pathlib import Path

import numpy as np
import torch
import xxhash
from rank_cases import settings
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dynamo_megatron.types import Sequences

FILE = __file__


def case(model: Path, parallel: dict, out: Path, *, ranks: int = 4, dtype: str = "float32", **more) -> dict:
    """`load`: the folder to begin with; else the policy trains three steps and is saved. `damaged`: see `damage`."""
    config = settings(model, parallel, trainer={"micro_batch_tokens": 64})
    config["model"]["dtype"] = dtype
    return {"config": config, "ranks": ranks, "out": str(out), **more}


def train(policy, step: int) -> None:
    """One optimizer step on sequences that are a function of its number."""
    generator = np.random.default_rng(step)
    lengths = generator.integers(6, 30, 12)
    sequences = Sequences(
        prompt_ids=[str(i) for i in range(12)],
        tokens=generator.integers(0, policy.spec.vocab_size, int(lengths.sum())),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        prompt_lengths=generator.integers(1, 6, 12),
    )
    policy.fit(sequences, np.full(12, 1 / sequences.response_lengths.sum()), 1e-3)


class Communicated(TorchDispatchMode):
    """`floats`: bytes of floating-point tensors that this rank has passed to torch.distributed, on any backend; what a
    collective writes its result to counts, too. Objects travel as bytes, and do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.floats = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            tensors = [t for t in tree_leaves((args, kwargs)) if torch.is_tensor(t) and t.is_floating_point()]
            self.floats += sum(t.nbytes for t in tensors)
        return func(*args, **(kwargs or {}))


def on_rank(case: dict, config, layout) -> object:
    from dynamo_megatron.checkpoint.policy_state import _Writer, begin_save, load_checkpoint
    from dynamo_megatron.models import load_model_config
    from dynamo_megatron.policy.policy import Policy
    from dynamo_megatron.weight_sync.folder import write_huggingface

    policy, out = Policy(load_model_config(config.model.path), config, layout), Path(case["out"])
    if case.get("damaged"):
        return damage(policy, out / "checkpoints")
    if folder := case.get("load"):
        try:
            load_checkpoint(policy, Path(folder))
        except ValueError as error:
            return str(error)
        train(policy, 4)
        write_huggingface(policy, out / "hf")
        return "loaded"
    for step in (1, 2, 3):
        train(policy, step)
    state = {"stream": {"of": "rank 0"}} if layout.rank == 0 else None
    with Communicated() as counted:
        save = begin_save(policy, out / "sync", 3, state, background=False)
    save.complete(1, 60, print)
    trained, write = threading.Event(), _Writer.write

    def held(writer) -> None:  # a disk so slow that the training is done first
        assert trained.wait(60)
        write(writer)

    _Writer.write = held
    save = begin_save(policy, out / "async", 3, state, background=True)
    train(policy, 4)
    assert not save.written()
    trained.set()
    save.complete(1, 60, print)
    write_huggingface(policy, out / "hf")
    return counted.floats


def damage(policy, root: Path) -> dict[str, str]:
    """What is said of a save onto a full disk, by what does not fit, and of loading what is damaged, by file: with one
    bit flipped, and with a pickle in it that runs a command. A limit on a file's size stands in for the disk's end."""
    from dynamo_megatron.checkpoint.folder import read_manifest
    from dynamo_megatron.checkpoint.policy_state import begin_save

    said = {}
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    begin_save(policy, root, 3, {}, background=False).complete(1, 60, print)
    for what, limit in (("common.pt", 1000), ("data", 100_000), ("state.json", 8_000_000)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited[1]))
        try:
            begin_save(policy, root, 4, {"stream": {"of": "x" * 9_000_000}}, background=False).complete(1, 60, print)
        except OSError as error:
            said[what] = str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        said[f"{what} left"] = " ".join(path.name for path in root.iterdir())
    folder = root / "step-000003"
    for name in read_manifest(folder)["files"]:
        said[f"{name} flipped"] = loaded(policy, folder / name, flipped(folder / name))
    return said


def flipped(file: Path) -> bytes:
    whole = bytearray(file.read_bytes())
    whole[len(whole) // 2] ^= 1
    return bytes(whole)


def loaded(policy, file: Path, content: bytes, *, with_checksum: bool = False) -> str:
    """What is said of loading the checkpoint with other content of that file, perhaps with its right checksum."""
    from dynamo_megatron.checkpoint.policy_state import load_checkpoint

    whole, manifest = file.read_bytes(), file.with_name("manifest.json")
    original = manifest.read_text()
    changed = json.loads(original)
    changed["files"][file.name] = len(content)
    if with_checksum:
        changed["checksums"][file.name] = xxhash.xxh3_128_hexdigest(content)
    file.write_bytes(content)
    manifest.write_text(json.dumps(changed))
    try:
        load_checkpoint(policy, file.parent)
    except ValueError as error:
        return str(error)
    finally:
        file.write_bytes(whole)
        manifest.write_text(original)
    return "nothing"


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as f:
            found.update({name: f.get_tensor(name) for name in f.keys()})  # noqa: SIM118
    return found


def difference(a: Path, b: Path) -> float:
    """The largest over tensors of norm of the difference over norm."""
    a, b = weights_of(a / "hf"), weights_of(b / "hf")
    assert a.keys() == b.keys() and len(a) > 40
    return max(float((w.double() - b[n].double()).norm() / w.double().norm()) for n, w in a.items())
