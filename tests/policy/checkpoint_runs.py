"""Run by test_checkpoint.py: trains under one layout, saves, and takes the next step under that and other layouts."""

import contextlib
import json
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "models")]

import crafted_pickles
from forked_ranks import fork_ranks, wait_for

from dynamo_megatron.policy import backend

backend.enable_cpu()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from communicated import Communicated  # noqa: E402
from megatron.core import dist_checkpointing, parallel_state  # noqa: E402

from dynamo_megatron.checkpoint import policy_state  # noqa: E402
from dynamo_megatron.checkpoint.checked_loading import load_checked  # noqa: E402
from dynamo_megatron.checkpoint.folder import read_manifest  # noqa: E402
from dynamo_megatron.checkpoint.policy_state import _Writer, begin_save, load_checkpoint  # noqa: E402
from dynamo_megatron.checkpoint.torch_dist_metadata import read_metadata  # noqa: E402
from dynamo_megatron.config import Config  # noqa: E402
from dynamo_megatron.models import load_model_config  # noqa: E402
from dynamo_megatron.policy.layout import join_ranks  # noqa: E402
from dynamo_megatron.policy.policy import Policy  # noqa: E402
from dynamo_megatron.runtime.coordination import connect_store  # noqa: E402
from dynamo_megatron.types import Sequences  # noqa: E402
from dynamo_megatron.weight_sync.folder import write_huggingface  # noqa: E402


def train(policy: Policy, step: int) -> None:
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


def hold_writing() -> threading.Event:
    """From now on a file is written only once the event is set: a disk so slow that the training is done first."""
    event, write = threading.Event(), _Writer.write

    def held(writer: _Writer) -> None:
        assert event.wait(60)
        write(writer)

    _Writer.write = held
    return event


def damage(policy: Policy, root: Path) -> dict[str, str]:
    """What is said of a save onto a full disk, by what does not fit, and of loading what is damaged without a change
    of its size, by file: with one bit flipped, and overwritten in a checkpoint without checksums. A limit on a file's
    size stands in for the disk's end."""
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
        said[f"{name} flipped"] = loaded(policy, folder / name, flipped)
    assert load_checkpoint(policy, folder), "its bytes were compared"
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["checksums"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    for name in ("__0_0.distcp", "common.pt", ".metadata"):
        said[f"{name} overwritten"] = loaded(policy, folder / name, lambda whole: whole[:100] + bytes(len(whole) - 100))
    assert not load_checkpoint(policy, folder)
    for name, crafted in crafted_files(folder, f"touch {root / 'ran'}").items():
        said[f"{name} crafted"] = loaded(policy, folder / name, lambda _, crafted=crafted: crafted)
        said["ran"] = str((root / "ran").exists())
    return said


def crafted_files(folder: Path, command: str) -> dict[str, bytes]:
    """By name: the files of a checkpoint with a pickle in them that runs `command` when it is read."""
    data, metadata = folder / "__0_0.distcp", read_metadata(folder)
    whole = bytearray(data.read_bytes())
    in_torch_file, _ = crafted_pickles.torch_files(command)["in a list"]
    for info in metadata.storage_data.values():
        assert len(in_torch_file) <= info.length, f"{info}: {len(in_torch_file)} bytes of a crafted file do not fit"
        whole[info.offset : info.offset + info.length] = in_torch_file.ljust(info.length, b" ")
    in_metadata, _ = crafted_pickles.running(command)["a state on the list"]
    return {".metadata": in_metadata, "common.pt": in_torch_file, data.name: bytes(whole)}


def flipped(whole: bytes) -> bytes:
    return whole[: len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 1]) + whole[len(whole) // 2 + 1 :]


def loaded(policy: Policy, file: Path, change: Callable[[bytes], bytes]) -> str:
    """What is said of loading the checkpoint with that file changed."""
    whole = file.read_bytes()
    changed, manifest = change(whole), file.with_name("manifest.json")
    file.write_bytes(changed)
    original = manifest.read_text()
    manifest.write_text(original.replace(f'"{file.name}": {len(whole)}', f'"{file.name}": {len(changed)}'))
    try:
        load_checkpoint(policy, file.parent)
    except ValueError as error:
        return str(error)
    finally:
        file.write_bytes(whole)
        manifest.write_text(original)
    return "nothing"


def sent_by_saves(policy: Policy, out: Path, state: dict | None) -> dict[str, int]:
    """Saves to `out`/sync, and to `out`/gathered as versions before optimizer_parts.py did. Returns the bytes of
    floating-point numbers that this rank gave to collectives, by folder."""
    ways = {"sync": policy_state.without_gathering, "gathered": lambda optimizer: contextlib.nullcontext()}
    sent = {}
    for name, way in ways.items():
        policy_state.without_gathering = way
        with Communicated() as counted:
            save = begin_save(policy, out / name, 3, state, background=False)
        save.complete(1, 60, print)
        sent[name] = counted.floats
    policy_state.without_gathering = ways["sync"]
    return sent


def run(case: dict, number: int, store: dist.Store) -> None:
    config = Config.model_validate(case["config"])
    layout = join_ranks(config, dist.PrefixStore(f"case{number}", store))
    policy = Policy(load_model_config(config.model.path), config, layout)
    out = Path(case["out"])
    if case.get("damaged"):
        (out / "said.json").write_text(json.dumps(damage(policy, out / "checkpoints")))
    elif "load" in case:
        if refused := case.get("refused"):
            try:
                load_checkpoint(policy, Path(case["load"]))
            except ValueError as error:
                (out / "refused.txt").write_text(str(error))
            assert refused
        else:
            if case.get("plain"):
                policy_state.load_checked = lambda sharded, folder: dist_checkpointing.load(sharded, str(folder))
            load_checkpoint(policy, Path(case["load"]))
            policy_state.load_checked = load_checked
            train(policy, 4)
            write_huggingface(policy, out / "hf")
    else:
        for step in (1, 2, 3):
            train(policy, step)
        state = {"stream": {"of": "rank 0"}} if layout.rank == 0 else None
        (out / f"sent-{layout.rank}.json").write_text(json.dumps(sent_by_saves(policy, out, state)))
        trained = hold_writing()
        save = begin_save(policy, out / "async", 3, state, background=True)
        train(policy, 4)
        assert not save.written()
        trained.set()
        save.complete(1, 60, print)
        write_huggingface(policy, out / "hf")
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def main(cases_file: str) -> None:
    folder = Path(cases_file).parent
    for name, cases in json.loads(Path(cases_file).read_text()).items():

        def body(cases=cases) -> None:
            torch.set_num_threads(1)
            store = connect_store(60)
            for number, case in enumerate(cases):
                start = time.monotonic()
                run(case, number, store)
                print(f"{case['out']}: {time.monotonic() - start:.1f} s", flush=True)

        logs = folder / name
        logs.mkdir()
        wait_for(fork_ranks(int(name.rpartition("-")[2]), body, logs), logs)


if __name__ == "__main__":
    main(sys.argv[1])
