"""Router replay, beside a mixture of experts of transformers that is made to route as the rollouts did."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from layout_cases import rollout_batch
from rank_cases import run_cases, settings
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dynamo_megatron.policy.routing import ExpertRouting, Routing
from dynamo_megatron.types import RolloutBatch

PROMPT, RESPONSES = 5, (21, 1, 30, 12, 17)


def sampled(path) -> RolloutBatch:
    """Random rollouts with the routes and logprobs of the model in bfloat16, as a server has it."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    generator, chosen, made = torch.Generator().manual_seed(0), [], []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, output: chosen.append(output[2]))
    for length in RESPONSES:
        tokens = torch.randint(0, 100, (PROMPT + length,), generator=generator)
        chosen.clear()
        with torch.no_grad():
            logprobs = model(tokens[None]).logits[0].float().log_softmax(-1)
        own = logprobs[PROMPT - 1 : -1].gather(1, tokens[PROMPT:, None])[:, 0]
        routes = torch.stack(chosen, 1).to(torch.uint8)
        routes = torch.cat([torch.full_like(routes[:1], 255), routes[:-1]])  # as rollouts have them, by the next token
        made.append((tokens, own, routes))
    tokens, own, routes = (torch.cat(parts).numpy() for parts in zip(*made, strict=True))
    fields, count = {"tokens": tokens, "engine_logprobs": own, "routes": routes}, len(RESPONSES)
    return rollout_batch(["g"] * count, [PROMPT] * count, RESPONSES, np.zeros(count), **fields)


def forced(path, batch: RolloutBatch) -> tuple[np.ndarray, list[torch.Tensor]]:
    """The response's logprobs in float32 along the routes of `batch`, and the gradient of their sum by each router."""
    model, found, given = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), [], {}
    gates = [layer.mlp.gate for layer in model.model.layers]

    def force(gate, layer):
        def forward(hidden):
            logits, chosen = F.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight), given["routes"][:, layer]
            scores = logits.softmax(-1).gather(1, chosen)
            return logits, scores / scores.sum(-1, keepdim=True) if gate.norm_topk_prob else scores, chosen

        gate.forward = forward

    for layer, gate in enumerate(gates):
        force(gate, layer)
    for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        tokens = torch.from_numpy(batch.tokens[start:end])
        given["routes"] = torch.from_numpy(batch.routes[start + 1 : end]).long()
        logprobs = model(tokens[None, :-1]).logits[0].log_softmax(-1).gather(1, tokens[1:, None])[PROMPT - 1 :, 0]
        logprobs.sum().backward()
        found.append(logprobs.detach())
    return torch.cat(found).numpy(), [gate.weight.grad for gate in gates]


def on_rank(case: dict, config, layout) -> dict[str, float]:
    from dynamo_megatron.models import load_model_config
    from dynamo_megatron.policy.policy import Policy

    found, batch, path = {}, sampled(config.model.path), config.model.path
    for replay in (False, True):
        rollout = config.rollout.model_copy(update={"router_replay": replay})
        policy = Policy(load_model_config(path), config.model_copy(update={"rollout": rollout}), layout)
        own = policy.token_stats(batch, policy.pack(batch, [np.arange(len(RESPONSES))])).logprobs.numpy()
        gap = float(np.abs(own - batch.engine_logprobs).mean())
        found["with" if replay else "without"] = {"gap": gap, **policy.routing.take()}
    known = batch.routes[batch.routes[:, 0, 0] < 255]
    found["tokens"] = [np.bincount(layer.ravel(), minlength=8).tolist() for layer in known.transpose(1, 0, 2)]
    policy.fit(batch, np.ones(len(RESPONSES)), 0.0)
    logprobs, slopes = forced(path, batch)
    gradients = [layer.mlp.router.weight.main_grad for layer in policy.chunks[0].decoder.layers]
    errors = [float((a + b).norm() / b.norm()) for a, b in zip(gradients, slopes, strict=True)]
    return found | {"logprobs": float(np.abs(own - logprobs).max()), "gradient": max(errors)}


def test_the_gap_of_near_tied_routers_falls_to_that_of_rounding(make_tiny_model, tmp_path):
    """Of these routers, whose rows are nearly alike, two choices in five are rounding. Layers are recomputed."""
    cases = []
    for norm in (True, False):  # of the chosen experts' probabilities
        fields = {"num_experts": 8, "norm_topk_prob": norm}
        folder = make_tiny_model(tmp_path / str(norm), family="qwen3_moe", fields=fields, layers=3)
        tensors = {name: t.bfloat16().float() for name, t in load_file(folder / "model.safetensors").items()}
        for name in (n for n in tensors if n.endswith("mlp.gate.weight")):
            tensors[name] = (tensors[name][:1] + tensors[name] / 256).bfloat16().float()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        one = settings(folder, {}, trainer={"micro_batch_tokens": 60, "recompute": "full"})
        cases.append({"config": one | {"optimizer": {"clip_grad": 1e9, "warmup_steps": 0}}, "ranks": 1})
    for ((found,),) in zip(run_cases(__file__, cases, tmp_path), strict=True):
        print(found)
        without, replayed = found["without"], found["with"]
        assert replayed["moe/route_mismatch"] > 0.1 and replayed["moe/replayed"] == 1 and without["moe/replayed"] == 0
        assert replayed["gap"] < without["gap"] / 5
        tokens = np.array(found["tokens"])
        busiest = tokens.max(1) / tokens.mean(1)
        assert (replayed["moe/load_max"], replayed["moe/load_mean"]) == pytest.approx((busiest.max(), busiest.mean()))
        assert found["logprobs"] < 1e-5 and found["gradient"] < 1e-4


def test_the_share_of_other_experts_is_of_the_known_routes(monkeypatch):
    layers = [torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"router": torch.nn.Module()})}) for _ in range(2)]
    chunk = SimpleNamespace(decoder=SimpleNamespace(layers=layers), layer_offset=0)
    spec = SimpleNamespace(num_layers=2, num_experts=4)
    routing = ExpertRouting([chunk], spec, SimpleNamespace(device=torch.device("cpu"), host=None))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    # Of four tokens and padding; the routers would choose 0 and 1 for all.
    first = [[1, 0], [0, 2], [255, 255], [255, 255], [255, 255]]  # as they would, another, not known
    second = [[0, 1], [255, 255], [1, 0], [3, 3], [255, 255]]  # 3 twice is no route
    experts = torch.tensor([first, second], dtype=torch.uint8).transpose(0, 1)
    given = {"packed_seq_params": SimpleNamespace(routing=Routing(experts, torch.arange(5) < 4))}
    scores = torch.tensor([[4.0, 3.0, 2.0, 1.0]] * 5)
    for replay in (layer.mlp.router.router_replay for layer in layers):
        replay.before_layer(layers[0], (), given)
        replay.get_replay_topk(scores, 2, default_compute_topk=lambda s, k, **_: s.topk(k))
    metrics = routing.take()
    assert (metrics["moe/replayed"], metrics["moe/route_mismatch"]) == (4 / 8, 1 / 4)
