"""What tests of checkpoints share: a policy that ranks train, save and load, and how far two models are apart."""

import resource
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from layout_cases import tensors_of
from rank_cases import settings
from safetensors.torch import load_file, save_file

from dynamo_megatron.types import Sequences

FILE = __file__


def case(
    model: Path, parallel: dict, out: Path, *, ranks: int = 4, dtype: str = "float32", lora: dict | None = None, **more
) -> dict:
    """`load`: the folder to begin with; else the policy trains three steps and is saved. `damaged`: see `damage`."""
    config = settings(model, parallel, trainer={"micro_batch_tokens": 64})
    config["model"] |= {"dtype": dtype, "lora": lora}
    if "reference" in more:
        config["algorithm"] = {"kl": {"coef": 0.1, "reference": more["reference"]}}
    return {"config": config, "ranks": ranks, "out": str(out), **more}


def random_sequences(vocabulary: int, generator: np.random.Generator) -> Sequences:
    lengths = generator.integers(6, 30, 12)
    tokens = generator.integers(0, vocabulary, int(lengths.sum()))
    return Sequences([str(i) for i in range(12)], tokens, np.append(0, lengths.cumsum()), generator.integers(1, 6, 12))


def train(policy, step: int) -> None:
    """One optimizer step on sequences that are a function of its number; a critic's to values that are."""
    generator = np.random.default_rng(step)
    sequences = random_sequences(policy.spec.vocab_size, generator)
    if hasattr(policy, "fit_values"):
        old, returns = generator.normal(size=(2, int(sequences.response_lengths.sum())))
        batch = SimpleNamespace(rollouts=sequences, values=old, returns=returns)
        policy.fit_values(step, batch, policy.pack(sequences, [np.arange(12)]), lambda phase: None)
        return
    policy.fit(sequences, np.full(12, 1 / sequences.response_lengths.sum()), 1e-3)


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
    begin_save(policy, out / "sync", 3, state, background=False).complete(1, 60, print)
    if config.model.lora is not None:
        write_huggingface(policy, out / "saved" / "hf")
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
    return "saved"


def damage(policy, root: Path) -> dict[str, str]:
    """What is said of a save onto a full disk, by what does not fit, and of loading a file with one bit flipped, and
    where the reference has other weights now. A limit on a file's size stands in for the disk's end."""
    from dynamo_megatron.checkpoint.folder import read_manifest
    from dynamo_megatron.checkpoint.policy_state import begin_save, load_checkpoint
    from dynamo_megatron.policy.frozen_models import FrozenModels

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
        said[f"{name} flipped"] = load_flipped(policy, folder / name)
    reference = Path(policy.config.algorithm.kl.reference, "model.safetensors")
    save_file({name: -tensor for name, tensor in load_file(reference).items()}, reference)
    policy.frozen = FrozenModels(policy.chunks, policy.spec, policy.config, policy.layout)
    try:
        load_checkpoint(policy, folder)
    except ValueError as error:
        said["another reference"] = str(error)
    return said


def load_flipped(policy, file: Path) -> str:
    """What is said of loading the checkpoint with a bit of that file flipped."""
    from dynamo_megatron.checkpoint.policy_state import load_checkpoint

    whole = file.read_bytes()
    middle = len(whole) // 2
    file.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    try:
        load_checkpoint(policy, file.parent)
    except ValueError as error:
        return str(error)
    finally:
        file.write_bytes(whole)
    return "nothing"


def difference(a: Path, b: Path) -> float:
    """The largest over tensors of norm of the difference over norm."""
    a, b = tensors_of(a / "hf"), tensors_of(b / "hf")
    assert a.keys() == b.keys() and len(a) > 40
    return max(float((w.double() - b[n].double()).norm() / w.double().norm()) for n, w in a.items())
