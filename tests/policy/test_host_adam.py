"""optimizer.cpu_offload: the same bits as without it, under every kind of layout and from each other's checkpoints."""

from pathlib import Path

import torch
from checkpoint_cases import case, train
from rank_cases import run_cases

# name: (family, dtype, layout, LoRA); two ranks each
CASES = {
    "tp2": ("qwen2", "bfloat16", {"tp": 2}, None),
    "dp2": ("qwen2", "float32", {}, None),
    "pp2": ("qwen3", "bfloat16", {"pp": 2, "vpp": 2}, {"rank": 4}),
    "ep2": ("qwen3_moe", "bfloat16", {"ep": 2}, None),
}


def on_rank(case: dict, config, layout) -> dict:
    """Three steps and a save, with and without it; then a fourth step, also of policies that load the other's save."""
    from dynamo_megatron.checkpoint.policy_state import begin_save, load_checkpoint
    from dynamo_megatron.models import load_model_config
    from dynamo_megatron.policy.offload import PARTS, Offload
    from dynamo_megatron.policy.policy import Policy

    def policy(*, host: bool, folder: Path | None = None) -> Policy:
        optimizer = config.optimizer.model_copy(update={"cpu_offload": host})
        made = Policy(load_model_config(config.model.path), config.model_copy(update={"optimizer": optimizer}), layout)
        if folder is not None:
            load_checkpoint(made, folder / "step-000003")
        return made

    policies = {host: policy(host=host) for host in (False, True)}
    folders = {host: Path(case["out"], f"host-{host}") for host in policies}
    offload, state = Offload(policies[True]), {} if layout.rank == 0 else None
    freed = []
    for host, one in policies.items():
        for step in (1, 2, 3):
            if host and step > 1:
                freed.append([offload.release([part]) for part in PARTS])
                offload.resume(PARTS)
            train(one, step)
        begin_save(one, folders[host], 3, state, background=host).complete(1, 60, print)
    resumed = [policy(host=host, folder=folders[saver]) for host in policies for saver in policies]
    found = []
    for one in (*policies.values(), *resumed):
        train(one, 4)
        found.append([p.detach() for chunk in one.chunks for p in chunk.parameters()])
    equal = [all(map(torch.equal, found[0], weights)) for weights in found]
    inner = [part.optimizer for part in policies[True].optimizer.chained_optimizers if not part.is_stub_optimizer]
    return {"equal": equal, "freed": freed, "classes": sorted({type(one).__name__ for one in inner})}


def test_updates_in_host_memory_are_the_same_bits(make_tiny_model, tmp_path):
    cases = []
    for name, (family, dtype, parallel, lora) in CASES.items():
        path = make_tiny_model(tmp_path / f"{name}-model", family=family, dtype=dtype, layers=4, vocab=104, kv_heads=4)
        cases.append(case(path, parallel, tmp_path / name, ranks=2, dtype=dtype, lora=lora))
    for name, ranks in zip(CASES, run_cases(__file__, cases, tmp_path), strict=True):
        for got in ranks:
            assert got["classes"] == ["HostAdam"], name
            assert all(got["equal"]), (name, got["equal"])
            # Servers get the memory of weights and gradients; the state is not on the device.
            assert all(weights and gradients and not state for weights, state, gradients in got["freed"]), name
