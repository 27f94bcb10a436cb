"""The same rollouts through every layout of Megatron, against one process: the cases, and how far two are apart."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import runpy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from rank_cases import settings
from safetensors import safe_open

from dynamo_megatron.models import FAMILIES as OWN
from dynamo_megatron.runtime.routes import no_route
from dynamo_megatron.types import RolloutBatch

ROOT = Path(__file__).parents[2]
BAR = {"float32": 1e-5, "bfloat16": 1e-1}
# `after`: logprobs after the updates, where Adam has divided rounding by small gradients. In bfloat16 neither they, nor
# gradient norms after the first update, nor counts of tokens beyond a bound say anything.
OTHER_BARS = {"float32": {"after": 1e-4}, "bfloat16": dict.fromkeys(("after", "grad_norm", "metrics"), float("inf"))}

WHOLE = {"sequence_parallel": False}  # with tp above 1 sequences are cut by default
LAYOUTS: dict[str, tuple[int, dict]] = {
    "1": (1, {}),  # packed otherwise and in another order than what all are compared with
    "TP2": (2, {"tp": 2, **WHOLE}),
    "TP4": (4, {"tp": 4, **WHOLE}),
    "TP2+SP": (2, {"tp": 2}),
    "PP2": (2, {"pp": 2}),
    "PP4": (4, {"pp": 4}),
    "PP3+1": (2, {"pp": 2, "last_stage_layers": 1}),
    "TP2xPP2+SP": (4, {"tp": 2, "pp": 2}),
    "VPP2xPP2": (2, {"pp": 2, "vpp": 2}),
    "VPP2xPP2xDP2": (4, {"pp": 2, "vpp": 2}),
    "DP2": (2, {}),
    "DP4": (4, {}),
    "CP2": (2, {"cp": 2}),
    "CP4": (4, {"cp": 4}),
    "CP2xTP2": (4, {"cp": 2, "tp": 2, **WHOLE}),
    "CP2xTP2+SP": (4, {"cp": 2, "tp": 2}),
    "CP2xPP2": (4, {"cp": 2, "pp": 2}),
    "EP2": (2, {"ep": 2}),
    "EP2xPP2": (4, {"ep": 2, "pp": 2}),
    "EP2xTP2+SP": (2, {"ep": 2, "tp": 2}),
    "EP2xCP2": (4, {"ep": 2, "cp": 2}),
    "EP4": (4, {"ep": 4}),
}
ROPE_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
EVERY = ("TP2+SP", "PP2", "VPP2xPP2", "CP2", "DP2")  # what every family is put through (test_layouts.py)
# In place of USUAL: a family's tiny model (make_tiny_model), a method that makes all terms of the loss count, more
# layouts than EVERY, and dtype and layouts of a policy that sends weights to servers (tests/weight_sync/test_sync.py).
PARTICULAR: dict[str, dict] = {
    "qwen2": {
        "algorithm": {"loss": {"mini_batches": 2, "clip_ratio_high": 0.28}},
        "more": "1 TP4 PP4 PP3+1 CP2xPP2 TP2xPP2+SP",
    },
    "qwen3": {
        "algorithm": {
            "loss": {"entropy_coef": 0.01, "clip_ratio_c": 3.0, "aggregation": "token_mean"},
            "kl": {"coef": 0.1, "reference": "other"},
            "modulation": {"tau": 0.5},
            "advantage": {"kind": "grpo"},
        },
        "more": "1 TP2 DP4 CP2xTP2+SP",
    },
    "llama": {
        "model": {"tied": True, "fields": {"rope_theta": 10000.0, "rope_scaling": ROPE_SCALING}},
        "algorithm": {  # all that selects or weighs tokens, at once
            "advantage": {"entropy_shaping": {}, "overlong_buffer": 0.5},
            "loss": {
                "mini_batches": 2,
                "entropy_top_ratio": 0.5,
                "clip_cov": {"ratio": 0.05, "low": 0.0},
                "kl_cov": {"ratio": 0.05, "coef": 0.1},
            },
            "modulation": {"gamma": 10.0},
            "rollout_correction": {"kind": "mask", "low": 0.2, "high": 1.5},
        },
        "more": "CP4 CP2xPP2",
    },
    "qwen3_moe": {
        "algorithm": {"kl": {"coef": 0.1}},
        "more": "1 EP2 EP2xTP2+SP EP2xCP2 EP4",
        "sync": ("float32", "EP2xTP2+SP EP2xPP2"),
    },
    "mistral": {"sync": ("float32", "PP3+1")},
    "olmo3": {"more": "CP2xPP2"},
    "gemma3_text": {"algorithm": {"loss": {"entropy_coef": 0.01}}, "more": "1 TP2"},
    "phi3": {"more": "CP2xTP2+SP"},
    "olmo2": {
        "algorithm": {"loss": {"entropy_coef": 0.01}, "kl": {"coef": 0.1}},
        "more": "TP4 CP2xTP2+SP",
        "sync": ("float32", "TP2"),
    },
    "granite": {"model": {"tied": True}, "more": "CP2xPP2", "sync": ("bfloat16", "PP2")},
    # Keys' biases have no gradient where RoPE leaves them, and Adam would divide rounding by rounding.
    "glm4": {
        "model": {"fields": {"attention_bias": False}},
        "algorithm": {"loss": {"entropy_coef": 0.01}},
        "more": "TP2xPP2+SP",
    },
    "smollm3": {"model": {"tied": True}, "more": "TP2"},
}
USUAL: dict[str, Any] = {"model": {}, "algorithm": {}, "more": "", "sync": ("bfloat16", "TP2")}
FAMILIES = {family: {**USUAL, **PARTICULAR.get(family, {})} for family in OWN}


@dataclass(frozen=True)
class Row:
    family: str
    layout: str
    dtype: str = "float32"
    recompute: str = "none"

    @property
    def name(self) -> str:
        return "-".join([self.family, self.layout, self.dtype, self.recompute])


def make_models(folder: Path) -> dict[str, Path]:
    """A model of every family, with weights that no swap would leave alike; "other" is a second qwen3."""
    make = runpy.run_path(str(ROOT / "tools" / "tiny_model.py"))["make_tiny_model"]
    shape = {"layers": 4, "hidden": 64, "heads": 8, "kv_heads": 4, "dtype": "float32"}
    made = {f: make(folder / f, family=f, **shape, **FAMILIES[f]["model"]) for f in FAMILIES}
    return made | {"other": make(folder / "other", family="qwen3", **shape, seed=1)}


def case(models: dict[str, Path], out: Path, row: Row, *, budget: int = 200, seed: int = 7, **extra) -> dict:
    """`extra`: order_seed, overlap, algorithm."""
    ranks, parallel = LAYOUTS[row.layout]
    algorithm = json.loads(json.dumps(extra.pop("algorithm", FAMILIES[row.family]["algorithm"])))
    if algorithm.get("kl", {}).get("reference"):
        algorithm["kl"]["reference"] = str(models["other"])
    config = settings(
        models[row.family],
        parallel,
        rollout={"max_new_tokens": 32},
        algorithm=algorithm,
        trainer={"micro_batch_tokens": budget, "recompute": row.recompute},
    )
    config["model"]["dtype"] = row.dtype
    config["data"]["batch_prompts"] = 4
    return {"config": config, "ranks": ranks, "out": str(out), "seed": seed, **extra}


def rollouts(vocabulary: int, seed: int, order_seed: int | None) -> RolloutBatch:
    """Four groups of random sizes, one prompt twice, responses of random lengths; optionally in another
    order."""
    generator = np.random.default_rng(seed)
    rows = []
    for group, prompt in enumerate("abca"):
        start = generator.integers(0, vocabulary, int(generator.integers(3, 12)))
        for k in range(int(generator.integers(2, 14))):
            response = generator.integers(0, vocabulary, int(generator.integers(1, 30)))
            logprobs = generator.normal(-np.log(vocabulary), 0.3, len(response)).astype(np.float32)
            rows.append(
                (f"{group}-{k}", f"g{group}", prompt, start, response, float(generator.random() < 0.5), logprobs)
            )
    if order_seed is not None:  # the groups' order is kept: mini-batches are cut by it
        rows = [rows[i] for i in np.random.default_rng(order_seed).permutation(len(rows))]
        firsts = {row[1]: i for i, row in reversed(list(enumerate(rows)))}
        leading = [firsts[group] for group in sorted(firsts)]
        rows = [rows[i] for i in leading] + [row for i, row in enumerate(rows) if i not in leading]
    ids, groups, prompts, starts, responses, rewards, logprobs = zip(*rows, strict=True)
    return rollout_batch(
        list(groups),
        list(map(len, starts)),
        list(map(len, responses)),
        rewards,
        rollout_ids=list(ids),
        prompt_ids=list(prompts),
        tokens=np.concatenate([part for pair in zip(starts, responses, strict=True) for part in pair]),
        engine_logprobs=np.concatenate(logprobs),
    )


def rollout_batch(group_ids: list[str], prompt_lengths, response_lengths, rewards, **others) -> RolloutBatch:
    """Rollouts whose tokens and logprobs are 0 and whose groups are of one prompt each, but for fields in `others`."""
    count, ends = len(group_ids), np.cumsum(np.add(prompt_lengths, response_lengths))
    responses = int(np.sum(response_lengths))
    fields = {
        "rollout_ids": [f"{group}-{i}" for i, group in enumerate(group_ids)],
        "group_ids": group_ids,
        "prompt_ids": group_ids,
        "tokens": np.zeros(ends[-1], np.int64),
        "offsets": np.append(0, ends),
        "prompt_lengths": np.asarray(prompt_lengths),
        "engine_logprobs": np.zeros(responses, np.float32),
        "rewards": np.asarray(rewards),
        "successes": np.asarray(rewards) > 0,
        "weight_versions": np.zeros(responses, np.int32),
        "finish_reasons": ["stop"] * count,
        "servers": [""] * count,
    }
    return RolloutBatch(**fields | others)


def transformers_logprobs(model, source: RolloutBatch, temperature: float = 1.0) -> torch.Tensor:
    """[R], of the responses, by a causal model of transformers; differentiable."""
    found = []
    for start, end, prompt in zip(source.offsets[:-1], source.offsets[1:], source.prompt_lengths, strict=True):
        tokens = torch.from_numpy(source.tokens[start:end])
        logprobs = (model(tokens[None]).logits[0, prompt - 1 : -1] / temperature).log_softmax(-1)
        found.append(logprobs.gather(1, tokens[prompt:, None])[:, 0])
    return torch.cat(found)


def weights_of(policy) -> list[torch.Tensor]:
    return [p.detach().clone() for chunk in policy.chunks for p in chunk.parameters()]


def gather_gradients(policy) -> None:
    """Every rank gets the finished gradients of all its parameters, in their main_grad."""
    import torch.distributed as dist
    from megatron.core.distributed.param_and_grad_buffer import shard_buffer

    for ddp in policy.ddp:
        for bucket_group in ddp.bucket_groups + ddp.expert_parallel_bucket_groups:
            group = bucket_group.intra_distributed_optimizer_instance_group
            for bucket in bucket_group.buckets:
                mine = shard_buffer(bucket.grad_data, group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, mine, group=group)


def write_gradients(policy, folder: Path) -> None:
    """The finished gradients as a Hugging Face folder, through the same mapping as the weights."""
    import torch.distributed as dist

    from dynamo_megatron.weight_sync.folder import write_huggingface

    gather_gradients(policy)
    parameters = [p for chunk in policy.chunks for p in chunk.parameters()]
    for p in parameters:
        if not getattr(p, "tensor_model_parallel", False):  # every rank has its own of these, and only one is written
            bounds = torch.stack([-p.main_grad, p.main_grad])
            dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=policy.layout.tp)
            assert torch.equal(-bounds[0], bounds[1]), f"{tuple(p.shape)}: tensor-parallel copies differ in gradient"
    values = weights_of(policy)
    with torch.no_grad():
        for p in parameters:
            p.copy_(p.main_grad)
        write_huggingface(policy, folder)
        for p, value in zip(parameters, values, strict=True):
            p.copy_(value)


@contextlib.contextmanager
def overlapping(overlap: bool):
    """Policies built here reduce gradients during the backward pass, as on GPUs, and in several buckets, which only
    much larger models have."""
    from dynamo_megatron.policy import optimizer

    config = partial(optimizer.DistributedDataParallelConfig, bucket_size=20_000)
    with contextlib.ExitStack() as stack:
        if overlap:
            stack.enter_context(mock.patch.object(optimizer, "overlaps", lambda layout: True))
            stack.enter_context(mock.patch.object(optimizer, "DistributedDataParallelConfig", config))
        yield


def on_rank(case: dict, config, layout) -> dict:
    """Two steps on the rollouts of a seed; writes the first gradients and the last weights."""
    from dynamo_megatron.algorithm.success import Baseline
    from dynamo_megatron.models import load_model_config
    from dynamo_megatron.policy.batch import TrainBatch
    from dynamo_megatron.policy.policy import Policy
    from dynamo_megatron.weight_sync.folder import write_huggingface

    spec, out = load_model_config(config.model.path), Path(case["out"])
    with overlapping(case.get("overlap", False)):
        policy = Policy(spec, config, layout)
    source = rollouts(spec.vocab_size, case["seed"], case.get("order_seed"))
    if (routed := spec.replayed(config.rollout)) is not None:  # random ones, those of two tokens in five unknown
        order = np.random.default_rng(0).random((spec.vocab_size, routed.layers, routed.experts)).argsort()
        routes = order[..., : routed.topk].astype(routed.dtype)
        routes[::5], routes[1::5] = no_route(routed.dtype), 0
        source = dataclasses.replace(source, routes=routes[source.tokens])
    each = np.ones(len(source.rewards))
    batch = TrainBatch.build(source, config, baseline=Baseline(0.4 * each, 3 * each, score_ratio=2.0))
    prepare = policy.optimizer.prepare_grads

    def prepare_grads():  # the gradients of an update are complete
        policy.optimizer.prepare_grads = prepare
        write_gradients(policy, out / "gradients")
        return prepare()

    policy.optimizer.prepare_grads = prepare_grads
    updates: list[dict] = []
    values: dict[str, list[torch.Tensor]] = {"logprobs": [], "entropy": [], "reference": []}
    mini_batches = policy.pack(batch.rollouts, batch.mini_batches)
    for _ in range(2):
        stats = policy.token_stats(batch.rollouts, mini_batches)
        reference = policy.reference_logprobs(batch.rollouts, mini_batches)
        updates += [policy.update(batch, mini, stats, reference, 1e-3) for mini in mini_batches]
        for name, value in zip(values, (stats.logprobs, stats.entropy, reference), strict=True):
            if value is not None:
                values[name].append(value)
    offsets = source.response_offsets
    tokens = {
        rollout: {
            name: [t[..., offsets[s] : offsets[s + 1]].tolist() for t in passes] for name, passes in values.items()
        }
        for s, rollout in enumerate(source.rollout_ids)
    }
    write_huggingface(policy, out / "hf")
    return {"updates": updates, "tokens": tokens, "routing": policy.routing.take() if policy.routing else {}}


def result(folder: Path) -> dict:
    return json.loads((folder / "rank0.json").read_text())


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as f:
            found.update({name: f.get_tensor(name).float() for name in f.keys()})  # noqa: SIM118
    return found


def gaps(reference: Path, other: Path) -> dict[str, float]:
    """How far `other` is from `reference`, the largest of each kind: loss, logprobs (before the updates, after them, of
    the reference policy) and entropy absolute (nats), gradients of the first update and weights after all of them by
    tensor (norm of the difference over norm); the gradient norm, of the first update and of all, and the metrics' sums
    relative."""
    a, b = result(reference), result(other)
    assert a["tokens"].keys() == b["tokens"].keys() and len(a["updates"]) == len(b["updates"])

    def widest(name: str, passes: slice) -> float:
        x, y = (
            torch.tensor([x for key in a["tokens"] for one in r["tokens"][key][name][passes] for x in one])
            for r in (a, b)
        )
        return float((x - y).abs().max())

    first, after = slice(0, 1), slice(1, None)
    found = {name: widest(name, first) for name in ("logprobs", "entropy")}
    if all(tokens["reference"] for tokens in a["tokens"].values()):
        found["reference"] = widest("reference", slice(None))
    found["after"] = widest("logprobs", after)
    assert [u["skipped"] for u in a["updates"]] == [u["skipped"] for u in b["updates"]]
    pairs = [pair for pair in zip(a["updates"], b["updates"], strict=True) if not pair[0]["skipped"]]
    found["loss"] = max(abs(x["loss"] - y["loss"]) for x, y in pairs)
    norms = [abs(x["grad_norm"] / y["grad_norm"] - 1) for x, y in pairs]
    found["first_norm"], found["grad_norm"] = norms[0], max(norms)
    for kind, name in (("gradients", "gradients"), ("hf", "weights")):
        x, y = tensors_of(reference / kind), tensors_of(other / kind)
        assert x.keys() == y.keys(), sorted(x.keys() ^ y.keys())
        found[name] = max(float((t - y[n]).norm() / t.norm().clamp(min=1e-12)) for n, t in x.items())
    found["routing"] = max((abs(x - b["routing"][name]) for name, x in a["routing"].items()), default=0.0)
    sums = ("kl", "clipped", "clipped_dual", "damped", "boosted", "selected")
    found["metrics"] = max(abs(x[n] - y[n]) / max(1.0, abs(x[n])) for x, y in pairs for n in sums)
    return found


def beyond(dtype: str, found: dict[str, float]) -> dict[str, float]:
    """The gaps above the bar."""
    bars = dict.fromkeys(found, BAR[dtype]) | OTHER_BARS[dtype]
    return {name: gap for name, gap in found.items() if not gap <= bars[name]}
