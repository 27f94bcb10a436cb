"""Run by test_transformer_engine.py, as one rank: te_checkpoint_job.py JOB.json saves the policy of a Hugging Face
folder in Megatron's format, with what a GPU's rank builds (`gpu`, under the interpreter of `make te`) or with the local
layers.

The job has `config`, `gpu`, `save` (a folder) and one of `load` (the folder of another job's `save`), `mcore` (what
hf2mcore wrote, for Megatron's own loader) or neither: then the policy is trained for a step. Prints what it holds: a
checksum of each weight, of its main weight and of its moments, by the Hugging Face tensors that it is made of.
"""

import json
import os
import sys
import types
import warnings
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

from dynamo_megatron.policy import backend

backend.enable_cpu()

import torch  # noqa: E402
import xxhash  # noqa: E402
from layout_runs import rollouts  # noqa: E402
from megatron.core import dist_checkpointing  # noqa: E402

from dynamo_megatron.checkpoint.policy_state import begin_save, load_checkpoint  # noqa: E402
from dynamo_megatron.config import Config  # noqa: E402
from dynamo_megatron.models import load_model_config  # noqa: E402
from dynamo_megatron.models.mapping import global_name, huggingface_names  # noqa: E402
from dynamo_megatron.policy.batch import TrainBatch  # noqa: E402
from dynamo_megatron.policy.layout import join_ranks  # noqa: E402
from dynamo_megatron.policy.policy import Policy  # noqa: E402
from dynamo_megatron.runtime.coordination import connect_store  # noqa: E402


def call_this_a_gpu() -> None:
    """After the process group, whose NCCL is not here."""
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_device_properties = lambda device=None: types.SimpleNamespace(major=9, minor=0)
    torch.Tensor.pin_memory = lambda values: values
    empty = torch.empty
    torch.empty = lambda *size, pin_memory=False, **options: empty(*size, **options)


def train(policy: Policy) -> None:
    source = rollouts(policy.spec.vocab_size, 7, None)
    batch = TrainBatch.build(source, policy.config)
    (mini,) = policy.pack(source, batch.mini_batches)
    policy.update(batch, mini, policy.token_stats(source, [mini]), None, 1e-3)


def load_converted(policy: Policy, folder: str) -> None:
    """As Megatron itself loads it, with nothing missing and nothing left over."""
    (chunk,) = policy.chunks
    for parameter in chunk.parameters():
        parameter.data.zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        state = chunk.sharded_state_dict(metadata={"dp_cp_group": policy.layout.dp_cp})
        loaded = dist_checkpointing.load(state, folder)
        del loaded["content_metadata"]  # beside the model's, as in Megatron's own checkpoints
        chunk.load_state_dict(loaded)


def digest(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(tensor.detach().contiguous().flatten().view(torch.uint8).numpy())


def held(policy: Policy) -> dict[str, list[str]]:
    found = {}
    for part in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]):
        for parameter, (group, number) in part.model_param_group_index_map.items():
            main = part.optimizer.param_groups[group]["params"][number]
            state = part.optimizer.state.get(main, {})
            moments = [digest(state[name]) for name in ("exp_avg", "exp_avg_sq") if name in state]
            found[parameter] = [digest(parameter), digest(main), *moments]
    return {
        " ".join(huggingface_names(policy.spec, global_name(name, 0))): found[parameter]
        for name, parameter in policy.chunks[0].named_parameters()
    }


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    config = Config.model_validate(job["config"])
    spec, layout = load_model_config(config.model.path), join_ranks(config, connect_store(60))
    if job["gpu"]:
        call_this_a_gpu()
    policy = Policy(spec, config, layout)
    if "load" in job:
        load_checkpoint(policy, Path(job["load"]) / "step-000001")
    elif "mcore" in job:
        load_converted(policy, job["mcore"])
    else:
        train(policy)
    if "save" in job:
        begin_save(policy, Path(job["save"]), 1, {}, background=False).complete(1, 60, print)
    attention = policy.chunks[0].decoder.layers[0].self_attention.core_attention
    steps = [group.get("step") for group in policy.optimizer.param_groups]
    said = {"held": held(policy), "attention": type(attention).__name__, "steps": steps}
    print(json.dumps(said | {"packages": str(backend.Fusions.detect())}))


main()
sys.stdout.flush()
os._exit(0)
