"""Run by test_memory.py: the tensors of a policy after an update, counted on every rank, beside the planner's."""

import gc
import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "policy")]
from checkpoint_cases import train  # noqa: E402
from forked_ranks import run_in_turn  # noqa: E402

from dynamo_megatron.policy import backend  # noqa: E402

backend.enable_cpu()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from dynamo_megatron.config import Config  # noqa: E402
from dynamo_megatron.models import load_model_config  # noqa: E402
from dynamo_megatron.planning import formulas  # noqa: E402
from dynamo_megatron.policy.batch import MicroBatch  # noqa: E402
from dynamo_megatron.policy.layout import join_ranks  # noqa: E402
from dynamo_megatron.policy.policy import Policy  # noqa: E402


def live_bytes() -> int:
    """Of all tensors of this process, storages that they share once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def saved_bytes(policy: Policy, tokens: int = 256) -> int:
    """What autograd keeps of the layers (not of embedding and last norm) for `tokens` packed tokens of this rank, as
    much on every machine: a CPU without bfloat16 arithmetic multiplies in float32 here."""
    (chunk,), cp = policy.chunks, policy.layout.cp.size()
    collecting, storages = [False], {}
    parameters = {p.untyped_storage().data_ptr() for p in chunk.parameters()}
    chunk.decoder.register_forward_pre_hook(lambda *_: collecting.__setitem__(0, True))
    chunk.decoder.final_layernorm.register_forward_pre_hook(lambda *_: collecting.__setitem__(0, False))

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if collecting[0] and storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = (storage.nbytes(), tensor)  # alive, or its address could be another's
        return tensor

    places = torch.arange(tokens * cp // 4).view(2 * cp, -1).repeat(4, 1, 1)
    here = torch.cat([places[:, policy.layout.cp.rank()], places[:, -1 - policy.layout.cp.rank()]], 1).view(1, -1)
    none = torch.zeros(0, dtype=torch.int64)
    bounds = torch.arange(0, tokens * cp + 1, tokens * cp // 4, dtype=torch.int32)
    lengths, real = bounds.diff().numpy(), torch.ones_like(here[0], dtype=torch.bool)
    batch = MicroBatch(torch.zeros_like(here), here, bounds, none, none, none, 0 * bounds, lengths, real)
    backend._mode._slow_bfloat16 = False
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        chunk.forward_packed(batch)
    return sum(size for size, _ in storages.values())


def run(case: dict, store: dist.Store) -> None:
    config = Config.model_validate(case["config"])
    before = live_bytes()
    layout = join_ranks(config, store)
    spec, p = load_model_config(config.model.path), config.parallel
    policy = Policy(spec, config, layout)
    train(policy, 1)
    options = {"lora": config.model.lora, "cpu_offload": config.optimizer.cpu_offload}
    planned = formulas.stage_state(spec, p, config.model.dtype, layout.world_size, layout.pp.rank(), **options)
    row = {
        "live": live_bytes() - before,
        "planned": planned.total + planned.host,
        "planned host": planned.host,
        "parameters": sum(q.numel() for chunk in policy.chunks for q in chunk.parameters()),
        "planned parameters": planned.dense + planned.experts,
    }
    if p.pp == 1:
        h, width = spec.hidden_size, 4 if spec.zero_centered_norms else formulas.WIDTH[config.model.dtype]
        spread, heads = p.tp if p.sequence_parallel else 1, spec.num_attention_heads + spec.num_query_groups
        norms = (spec.pre_norms + spec.post_norms) * 2 * h / spread + spec.qk_norm * heads * spec.kv_channels / p.tp
        # A CPU's norm saves two tensors in float32, a frozen one its input alone.
        wide = 4 if config.model.lora else 8
        kept = formulas.layer_activations(spec, p, config.model.dtype, config.model.lora) + (wide - width) * norms
        if config.trainer.recompute == "full":
            kept = width * h / spread
        angles = 4 * spec.kv_channels  # of RoPE, once for all layers: nothing beside a real model's
        first = (4 * h + 4) / spread if config.model.lora else 0  # the first norm: no gradient goes through it
        row["saved"], row["planned saved"] = saved_bytes(policy), (kept * spec.num_layers - first + angles) * 256
    Path(case["out"]).joinpath(f"{case['name']}-{layout.rank}.json").write_text(json.dumps(row))


if __name__ == "__main__":
    run_in_turn(sys.argv[1], 2, run)
