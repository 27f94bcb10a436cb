"""Run by test_bridge.py in the bridge environment: ranks_job.py CASES.json RANKS compares Bridge's models with
transformers: logprobs, gradient, what a weight sync sends, a checkpoint, and given routes and biases of routers. A case
has `folder`, `parallel`, `out`, `rate` (model.expert_bias_update_rate) and `recompute`."""

import dataclasses
import json
import sys
from pathlib import Path
from unittest import mock

sys.path += [str(Path(__file__).parents[1] / "policy")]

from forked_ranks import run_in_turn

from dynamo_megatron.policy import backend

backend.enable_cpu()

from dynamo_megatron.bridge import environment  # noqa: E402

environment.prepare()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from layout_cases import tensors_of, write_gradients  # noqa: E402
from megatron.bridge.models.conversion.param_mapping import (  # noqa: E402
    AutoMapping,
    RMSNorm2ZeroCenteredRMSNormMapping,
)
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.core_model_loading import revert_weight_conversion  # noqa: E402

from dynamo_megatron.bridge.source import build_chunks  # noqa: E402
from dynamo_megatron.checkpoint.policy_state import begin_save, load_checkpoint  # noqa: E402
from dynamo_megatron.config import Config  # noqa: E402
from dynamo_megatron.models import load_model_config  # noqa: E402
from dynamo_megatron.models.mapping import ROUTER_BIAS  # noqa: E402
from dynamo_megatron.policy.layout import join_ranks  # noqa: E402
from dynamo_megatron.policy.policy import Policy  # noqa: E402
from dynamo_megatron.types import Sequences  # noqa: E402
from dynamo_megatron.weight_sync.folder import write_huggingface  # noqa: E402
from dynamo_megatron.weight_sync.schedule import BucketSource, floor_bytes, make_schedule  # noqa: E402

LENGTHS = (9, 70, 33, 21)
RESPONSES = sum(LENGTHS) - 2 * len(LENGTHS)  # tokens


def sequences(vocabulary):
    tokens = torch.randint(0, vocabulary, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0)).numpy()
    ends = np.cumsum([0, *LENGTHS])
    return Sequences([str(n) for n in range(len(LENGTHS))], tokens, ends, np.full(len(LENGTHS), 2))


def with_routes(data, spec, seed):
    order = np.random.default_rng(seed).random((len(data.tokens), spec.num_layers, spec.num_experts)).argsort()
    return dataclasses.replace(data, routes=order[..., : spec.router_topk].astype(np.uint8))


def reference(folder, data):
    """(logprobs of the responses, gradient of their negative mean by the folder's tensors, tokens of each expert by its
    router's name), along the routes of `data` where it has some"""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    parts, load = [], {}

    def route(name):
        def hook(router, _, output):
            logits, weights, chosen = output
            if data.routes is not None:
                given = torch.from_numpy(data.routes[start + 1 : end, int(name.split(".")[2])]).long()
                chosen = torch.cat([given, chosen[-1:]])
                weights = logits.gather(1, chosen)
                if hasattr(router, ROUTER_BIAS):
                    weights = weights.sigmoid() / weights.sigmoid().sum(-1, True) * router.routed_scaling_factor
                else:
                    weights = weights.softmax(-1)
            real = chosen[:-1].flatten()  # the last has no label
            load[name] = load.get(name, 0) + real.bincount(minlength=len(router.weight))
            return logits, weights, chosen

        return hook

    for name, module in model.named_modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            module.register_forward_hook(route(name))
    for start, end in zip(data.offsets, data.offsets[1:], strict=False):
        tokens = torch.from_numpy(data.tokens[start:end])
        logits = model(tokens[None]).logits[0, 1:-1]
        parts.append(logits.log_softmax(-1).gather(1, tokens[2:, None])[:, 0])
    logprobs = torch.cat(parts)
    logprobs.mean().neg().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logprobs.detach(), revert_weight_conversion(model, gradients), load


def fit(policy, data, rate, folder, expected):
    """A step on the mean of the responses' logprobs: (its loss, how far its gradient is from transformers').
    `gradient`: norm of a tensor's difference over the tensor's norm, the largest, which is that of `furthest`."""
    prepare = policy.optimizer.prepare_grads

    def prepare_grads():  # the gradients are complete, and not clipped
        policy.optimizer.prepare_grads = prepare
        # The folder has these weights plus 1.
        with mock.patch.object(RMSNorm2ZeroCenteredRMSNormMapping, "megatron_to_hf", AutoMapping.megatron_to_hf):
            write_gradients(policy, folder)
        return prepare()

    policy.optimizer.prepare_grads = prepare_grads
    found = policy.fit(data, np.full(len(LENGTHS), 1 / RESPONSES), rate)
    written = tensors_of(folder)
    assert all(name.endswith(ROUTER_BIAS) for name in written.keys() - expected.keys())
    gaps = {n: ((written[n] - g).norm() / g.norm().clamp(min=1e-12)).item() for n, g in expected.items()}
    norm = torch.stack([g.norm() for g in expected.values()]).norm().item()
    furthest = max(gaps, key=gaps.get)
    gap = {"gradient": gaps[furthest], "furthest": furthest, "gradient_norm": abs(found["grad_norm"] / norm - 1)}
    return found["loss"], gap


def check_sent(policy, folder):
    """What the senders send is the folder's tensors, each once, bit by bit."""
    layout, spec = policy.layout, policy.spec
    schedule = make_schedule(spec, policy.config.parallel, layout.world_size, bucket_bytes=1 << 12, itemsize=4)
    assert all(("q_a_proj" in str(b.names)) == ("kv_a_proj" in str(b.names)) for b in schedule.buckets)  # MLA's
    source, stored = BucketSource(policy, schedule), load_file(Path(folder, "model.safetensors"))
    floor = sum(stored[name].nbytes for name in spec.bridged.shapes)
    assert floor_bytes(spec, 1, 4) == floor < floor_bytes(spec, 2, 4)
    sent = []
    for number in range(len(schedule.rounds)):
        for name, tensor in (source.gather(number) or {}).items():
            assert torch.equal(tensor, stored[name]), name
            sent.append(name)
    everything = sorted(n for names in layout.gather(sent) for n in names)
    assert everything == sorted(spec.bridged.shapes), set(spec.bridged.shapes) ^ set(everything)


def check_checkpoint(policy, root):
    state = {} if policy.layout.rank == 0 else None
    begin_save(policy, root, 1, state, background=False).complete(1, 60, print)
    kept = held(policy)
    policy.fit(sequences(policy.spec.vocab_size), np.full(len(LENGTHS), 0.01), 1e-2)
    load_checkpoint(policy, root / "step-000001")
    assert all(torch.equal(kept[name], tensor) for name, tensor in held(policy).items())


def held(policy):
    """The rank's parameters and lasting buffers."""
    return {n: t.detach().clone() for n, t in policy.chunks[0].state_dict().items() if isinstance(t, torch.Tensor)}


def check_balance(policy, folder, load, out):
    """One update has moved each bias by the rate towards its layer's mean load, as transformers routes the tokens, on
    this rank and in what is exported. Returns logprobs that the exported model has."""
    logged, rate = policy.routing.take(), policy.config.model.expert_bias_update_rate
    assert logged["moe/load_max"] == max((n.max() / n.double().mean()).item() for n in load.values())
    write_huggingface(policy, out)
    stored, sent = load_file(Path(folder, "model.safetensors")), {}
    for file in out.glob("*.safetensors"):
        sent |= load_file(file)
    moved = {}
    for name, tokens in load.items():
        key = f"{name}.{ROUTER_BIAS}"
        moved[name] = stored[key] + (tokens.double().mean() - tokens).sign().float() * rate
        assert torch.equal(sent[key], moved[name]), key
    for number, layer in enumerate(policy.chunks[0].decoder.layers, policy.chunks[0].layer_offset):
        if hasattr(layer.mlp, "router"):
            assert torch.equal(layer.mlp.router.expert_bias, moved[f"model.layers.{number}.mlp.gate"])
    return reference(out, sequences(policy.spec.vocab_size))[0]


def replay(policy, data, folder, out):
    """Along given routes of all tokens in all layers: logprobs, and how far they and the gradient are from
    transformers'."""
    given, other = (with_routes(data, policy.spec, seed) for seed in (1, 2))
    expected, gradients, _ = reference(folder, given)
    logprobs, others = (
        policy.token_stats(d, policy.pack(d, [np.arange(len(LENGTHS))])).logprobs for d in (given, other)
    )
    assert (logprobs - others).abs().max() > 0.1, "routes change nothing"
    kept = held(policy)
    _, gaps = fit(policy, given, 0.0, out, gradients)
    policy.chunks[0].load_state_dict(kept, strict=False)  # the biases of routers
    logged = policy.routing.take()
    assert logged["moe/replayed"] == 1 and logged["moe/route_mismatch"] > 0.5, logged
    gaps["gap"] = (logprobs - expected).abs().max().item()
    return {"routed": logprobs.tolist(), **{f"routed_{name}": gap for name, gap in gaps.items()}}


def compare(case, store):
    folder, out = case["folder"], Path(case["out"])
    spec = load_model_config(folder, source="bridge")
    config = Config(
        model={
            "path": folder,
            "dtype": "float32",
            "source": "bridge",
            "expert_bias_update_rate": case.get("rate", 0.0),
        },
        data={"source": "none"},
        rollout={"proof": {"checksums": False}},
        output_dir="none",
        algorithm={"kl": {"coef": 0.1}},
        parallel=case["parallel"],
        trainer={"timeout": 120, "micro_batch_tokens": 80, "recompute": case.get("recompute", "none")},
    )
    layout = join_ranks(config, store)
    policy = Policy(spec, config, layout, build=build_chunks)
    check_sent(policy, folder)
    data = sequences(spec.vocab_size)
    routed = {} if policy.routing is None else replay(policy, data, folder, out / "routed")
    packed = policy.pack(data, [np.arange(len(LENGTHS))])
    stats = policy.token_stats(data, packed)
    expected, gradients, load = reference(folder, data)
    gaps = [stats.logprobs - expected]
    if policy.routing is not None:
        policy.routing.take()
    loss, gradient = fit(policy, data, 1e-5, out / "gradients", gradients)
    if "rate" in case:
        exported = check_balance(policy, folder, load, out / "hf")
        gaps.append(policy.token_stats(data, packed).logprobs - exported)
        assert (exported - expected).abs().max() > 0.01, "no other routes"
    gaps.append(policy.reference_logprobs(data, packed) - expected)
    check_checkpoint(policy, out)
    if layout.rank == 0:
        gap = torch.stack(gaps).abs().max().item()
        result = {"gap": gap, "loss": abs(loss + expected.mean().item()), **gradient, **routed}
        print(json.dumps({"name": Path(folder).name, "parallel": case["parallel"], **result}), flush=True)


if __name__ == "__main__":
    run_in_turn(sys.argv[1], int(sys.argv[2]), compare)
