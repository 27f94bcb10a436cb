"""Run by test_gpu_branch.py: what a GPU's ranks build and compute, on a CPU that calls itself one, with the stand-in
for TransformerEngine (te_stand_in.py) or without. Prints what it found as JSON."""

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

import te_stand_in

JOB = json.loads(sys.argv[1])
if JOB["transformer_engine"]:
    te_stand_in.install()

from dynamo_megatron.policy import backend  # noqa: E402

backend.enable_cpu()

import torch  # noqa: E402
from layout_runs import rollouts  # noqa: E402
from sync_lint import HostWaits  # noqa: E402

from dynamo_megatron.checkpoint.policy_state import begin_save, load_checkpoint  # noqa: E402
from dynamo_megatron.config import Config  # noqa: E402
from dynamo_megatron.models import load_model_config  # noqa: E402
from dynamo_megatron.policy import batch as batch_module  # noqa: E402
from dynamo_megatron.policy import model  # noqa: E402
from dynamo_megatron.policy import policy as policy_module  # noqa: E402
from dynamo_megatron.policy.batch import TrainBatch  # noqa: E402
from dynamo_megatron.policy.layout import join_ranks  # noqa: E402
from dynamo_megatron.policy.model import transformer_config  # noqa: E402
from dynamo_megatron.policy.offload import PARTS, Offload  # noqa: E402
from dynamo_megatron.policy.policy import Policy  # noqa: E402
from dynamo_megatron.runtime.coordination import connect_store  # noqa: E402
from dynamo_megatron.weight_sync.gather import BucketSource  # noqa: E402
from dynamo_megatron.weight_sync.proof import ExpectedChecksums  # noqa: E402
from dynamo_megatron.weight_sync.schedule import make_schedule  # noqa: E402
from dynamo_megatron.weight_sync.transports.flat import FlatBuffer  # noqa: E402


def call_this_a_gpu(capability: list[int]) -> None:
    """After the process group, whose NCCL is not here."""
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda device=None: tuple(capability)
    torch.Tensor.pin_memory = lambda values: values
    empty = torch.empty
    torch.empty = lambda *size, pin_memory=False, **options: empty(*size, **options)


def update(policy: Policy, measured: bool) -> dict:
    """An update's figures; what the layers used in it, for each micro-batch and layer."""
    source = rollouts(policy.spec.vocab_size, 7, None)
    source = dataclasses.replace(source, prompt_ids=source.group_ids)
    batch = TrainBatch.build(source, policy.config)
    (mini,) = policy.pack(source, batch.mini_batches, measured)
    stats = policy.token_stats(source, [mini])
    te_stand_in.calls.clear()
    figures = policy.update(batch, mini, stats, None, 1e-3)
    passes = len(mini.micro_batches) * policy.spec.num_layers
    return {
        "logprobs": stats.logprobs.tolist(),
        "figures": figures,
        "weights": torch.cat([p.detach().double().flatten() for p in policy._parameters]).norm().item(),
        "calls": {name: count / passes for name, count in te_stand_in.calls.items()},
    }


def sow(seed: str) -> None:
    """Breaks the policy as somebody may who has only a CPU to try it on."""
    if seed == "wrong device":  # the positions and bounds of sequences
        pack = batch_module.MicroBatch.pack
        batch_module.MicroBatch.pack = lambda *args, device, **options: pack(
            *args, device=torch.device("cpu"), **options
        )
    elif seed.startswith("missing to"):
        (policy_module if "loss" in seed else batch_module).to_device = lambda values, device: values
    elif seed == "float32 times bfloat16":
        model.RMSNorm.forward = lambda norm, x: torch.nn.functional.rms_norm(
            x.float(), (x.shape[-1],), norm.weight.float(), norm.eps
        )
    else:
        assert not seed, seed


def lint(policy_of: Callable[[], Policy]) -> dict:
    """The host's waits for a GPU in a step of two updates, the second of which is counted."""
    torch.cuda.current_device = lambda: torch.device("cuda", 0)  # so that what is made on a GPU is seen
    waits = HostWaits()
    schedule = policy_module.get_forward_backward_func()

    def passes(**arguments) -> None:
        update, waits.phase = waits.phase, "micro-batches"
        schedule(**arguments)
        waits.phase = update

    policy_module.get_forward_backward_func = lambda: passes
    try:
        with waits.watching():
            return watched(policy_of, waits)
    except RuntimeError as error:
        if not JOB.get("seed"):
            raise
        return {"raised": str(error), **seen(waits)}


def seen(waits: HostWaits) -> dict:
    of_kind = {"mixed": waits.mixed, "dtypes": waits.dtypes, "found": waits.found}
    return {kind: {" ".join(key): n for key, n in found.items()} for kind, found in of_kind.items()}


def watched(policy_of: Callable[[], Policy], waits: HostWaits) -> dict:
    """What `waits` found in the two updates, a push's gathering, and an offload."""
    policy = policy_of()
    waits.watch_layers(policy.chunks[0].decoder.layers)
    source = rollouts(policy.spec.vocab_size, 7, None)
    batch = TrainBatch.build(source, policy.config)
    for _ in range(2):
        waits.found.clear()
        waits.phase = "pack"
        (mini,) = policy.pack(source, batch.mini_batches)
        waits.phase = "statistics"
        stats = policy.token_stats(source, [mini])
        waits.phase = "reference"
        reference = policy.reference_logprobs(source, [mini])
        waits.phase = "update"
        policy.update(batch, mini, stats, reference, 1e-3)
    waits.phase = "push"
    pushed = gathered(policy)
    waits.phase = "offload"
    offload = Offload(policy)
    offloaded = offload.release(PARTS)
    offload.resume(PARTS)
    policy.token_stats(source, [mini])
    return {
        "raised": "",
        **seen(waits),
        "pushed": pushed,
        "offloaded": offloaded,
        "layers": waits.in_layers,
        "outside": {phase: waits.outside(phase) for phase in ("pack", "statistics", "update", "micro-batches")},
        "micro-batches": 2 * len(mini.micro_batches),  # forward for the statistics, and the update's
    }


def gathered(policy: Policy) -> int:
    """Bytes that a push would send: gathered, laid end to end on the GPU, and hashed there."""
    parallel, width = policy.config.parallel, policy.chunks[0].config.params_dtype.itemsize
    schedule = make_schedule(policy.spec, parallel, 1, bucket_bytes=1 << 16, itemsize=width)
    source, hashes = BucketSource(policy, schedule), ExpectedChecksums(policy.spec, 1, "cuda")
    buffer = FlatBuffer(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device="cuda"))
    sent = 0
    for number in range(len(schedule.rounds)):
        tensors = source.gather(number)
        buffer.fill(tensors)
        hashes.add(tensors.items())
        sent += buffer.used.nbytes
    return sent


def moments(policy: Policy) -> list[list[float]]:
    states = policy.optimizer.chained_optimizers[0].optimizer.state.values()
    return [[state[name].norm().item() for name in ("exp_avg", "exp_avg_sq")] for state in states]


def main() -> None:
    config = Config.model_validate(JOB["config"])
    spec, layout = load_model_config(config.model.path), join_ranks(config, connect_store(60))
    if JOB["gpu"]:
        call_this_a_gpu(JOB["capability"])
    found = {"packages": str(backend.Fusions.detect())}
    wanted = transformer_config(spec, config)
    found["config"] = {name: getattr(wanted, name) for name in JOB.get("flags", ())}
    sow(JOB.get("seed", ""))
    if JOB.get("lint"):
        found |= lint(lambda: Policy(spec, config, layout))
    if JOB.get("update"):
        policy = Policy(spec, config, layout)
        attention = policy.chunks[0].decoder.layers[0].self_attention.core_attention
        found["attention"] = type(attention).__name__
        if folder := JOB.get("save_first"):
            begin_save(policy, Path(folder), 1, {}, background=False).complete(1, 60, print)
            straight = update(policy, False)
            resumed = Policy(spec, config, layout)
            load_checkpoint(resumed, Path(folder) / "step-000001")
            found["resumed"] = [straight, update(resumed, False), moments(policy), moments(resumed)]
        else:
            found |= update(policy, JOB["measured"])
    print(json.dumps(found))


main()
sys.stdout.flush()
os._exit(0)
