"""PPO's critic beside autograd through transformers in float64, in every kind of layout, and what it learns."""

from pathlib import Path

import numpy as np
import pytest
import torch
from layout_cases import LAYOUTS, make_models, rollouts, weights_of
from rank_cases import run_cases, settings

from dynamo_megatron.checkpoint.weights import open_weights
from dynamo_megatron.models import load_model_config

PPO = {
    "modulation": None,
    "loss": {"mini_batches": 2},
    "advantage": {"kind": "gae", "gamma": 0.99, "lambda": 0.9, "normalise": "batch"},
}
CRITIC = {"value_clip": 0.02, "optimizer": {"lr": 1e-2, "warmup_steps": 0, "weight_decay": 0.0, "eps": 1e-6}}
CASES = [
    *(("qwen3", layout) for layout in ("TP2xPP2+SP", "VPP2xPP2", "CP2xTP2", "DP2")),
    ("llama", "PP2"),  # tied
    ("qwen3_moe", "EP2xTP2+SP"),
    ("qwen3 agent", "CP2xPP2"),
]
STEPS = 2


def first_head(size: int) -> np.ndarray:
    """A critic's own begins at 0, and would give the layers below no gradient in the first update."""
    return 0.1 * np.sin(np.arange(size))


def source_of(vocabulary: int, agent: bool):
    """Rollouts, or an agent's episodes of several turns and segments."""
    if not agent:
        return rollouts(vocabulary, 7, None)
    from test_episodes import batch_of

    return batch_of()


def make(config, layout):
    """(policy, critic, what begins a phase: each has on the device what the phase needs, as beside servers)."""
    from dynamo_megatron.policy.critic import Critic
    from dynamo_megatron.policy.offload import PARTS, Offload
    from dynamo_megatron.policy.policy import Policy
    from dynamo_megatron.weight_sync.memory import PHASES

    spec = load_model_config(config.model.path)
    models = Policy(spec, config, layout), Critic(spec, config.of_critic, layout)
    offloads = [Offload(model) for model in models]

    def begin(phase: str) -> None:
        for offload, needed in zip(offloads, PHASES[phase][1:], strict=True):
            offload.release([part for part in PARTS if part not in needed])
            offload.resume(needed)

    return *models, begin


def on_rank(case: dict, config, layout) -> dict | list:
    from dynamo_megatron.policy.batch import TrainBatch, cut_mini_batches

    if "save" in case or "load" in case:
        return across_layouts(case, config, layout)
    policy, critic, begin = make(config, layout)
    source = source_of(policy.spec.vocab_size, config.rollout.agent is not None)
    minis = policy.pack(source, cut_mini_batches(source.group_ids, 2))
    if layout.is_last_stage:
        head = critic.chunks[-1].output_layer.weight.data
        head.copy_(torch.from_numpy(first_head(head.shape[1])))
    before = weights_of(policy)
    seen = []
    for step in range(1, STEPS + 1):
        values = critic.values(source, minis, begin)
        batch = TrainBatch.build(source, config, values=values)
        fits = critic.fit_values(step, batch, minis, begin)
        sums = {name: [fit[name] for fit in fits] for name in ("loss", "clipped", "grad_norm")}
        seen.append({"values": values.tolist(), "returns": batch.returns.tolist(), **sums})
    begin("update")
    assert all(map(torch.equal, before, weights_of(policy))), "the critic has changed the policy"
    stats = policy.token_stats(source, minis)
    found = policy.gradient(batch, minis[0], stats, None, 1e-3).found
    return {"steps": seen, "policy": found["grad_norm"], "process": batch.process.tolist()}


def across_layouts(case: dict, config, layout) -> list:
    """Trains a step and saves, or loads that; then the values, and those after a step more."""
    from dynamo_megatron.checkpoint.policy_state import begin_save, load_checkpoint
    from dynamo_megatron.policy.batch import TrainBatch

    policy, critic, begin = make(config, layout)
    source = rollouts(policy.spec.vocab_size, 7, None)
    minis = policy.pack(source, [np.arange(len(source.prompt_ids))])

    def step(number: int) -> list:
        values = critic.values(source, minis, begin)
        critic.fit_values(number, TrainBatch.build(source, config, values=values), minis, begin)
        return values.tolist()

    if folder := case.get("load"):
        load_checkpoint(policy, Path(folder), critic=critic)
    else:
        step(1)
        step(2)
        begin("save")
        begin_save(policy, Path(case["save"]), 2, {}, background=False, critic=critic).complete(1, 60, print)
    return [step(3), critic.values(source, minis, begin).tolist()]


def reference(path, agent: bool) -> list[dict]:
    """The same steps with transformers, autograd and torch's Adam in float64."""
    from transformers import AutoModel

    from dynamo_megatron.algorithm.gae import generalised_advantages, token_rewards, turn_advantages, value_loss
    from dynamo_megatron.policy.batch import cut_mini_batches

    model = AutoModel.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
    model.get_input_embeddings().padding_idx = None
    source = source_of(model.config.vocab_size, agent)
    head = torch.from_numpy(first_head(model.config.hidden_size)).requires_grad_()
    parameters, seen, lengths = [*model.parameters(), head], [], source.response_lengths
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0)

    def values_of(members) -> torch.Tensor:
        found = []
        for owner, start, end in zip(*source.segments(members), strict=True):
            ids = torch.from_numpy(source.tokens[start:end])
            sampled = source.in_response(np.arange(start + 1, end), members[owner])
            found.append((model(ids[None]).last_hidden_state[0, :-1] @ head)[torch.from_numpy(sampled)])
        return torch.cat(found)

    for _ in range(STEPS):
        old, rewards = values_of(np.arange(len(lengths))).detach(), token_rewards(source.rewards, lengths, [], 1.0)
        advantages, steps = (turn_advantages, source.turns()) if agent else (generalised_advantages, lengths)
        returns = torch.from_numpy(advantages(rewards, old.numpy(), steps, 0.99, 0.9).returns)
        sums = {"loss": [], "clipped": [], "grad_norm": []}
        for members in cut_mini_batches(source.group_ids, 2):
            here = torch.from_numpy(np.isin(np.repeat(np.arange(len(lengths)), lengths), members))
            loss, clipped = value_loss(values_of(members), old[here], returns[here], CRITIC["value_clip"])
            optimizer.zero_grad()
            loss.mean().backward()
            norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            for name, value in zip(sums, (loss.mean(), clipped.sum(), norm), strict=True):
                sums[name].append(value.item())
        seen.append({"values": old.tolist(), "returns": returns.tolist(), **sums})
    return seen


def in_layout(model, layout: str, agent: str | None = None, **more) -> dict:
    ranks, parallel = LAYOUTS[layout]
    sections = {"algorithm": PPO, "critic": CRITIC, "rollout": {"max_new_tokens": 32, "agent": agent}}
    sections["trainer"] = {"micro_batch_tokens": 200}
    return {"config": settings(model, parallel, **sections), "ranks": ranks, **more}


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_critic_is_resumed_in_the_same_layout_and_in_others(tmp_path):
    model, folder = make_models(tmp_path / "models")["llama"], tmp_path / "checkpoints"
    cases = [in_layout(model, "TP2xPP2+SP", save=str(folder))]
    load = str(folder / "step-000002")
    cases += [in_layout(model, layout, load=load) for layout in ("TP2xPP2+SP", "CP2", "1")]
    saved, same, *others = (ranks[0] for ranks in run_cases(__file__, cases, tmp_path))
    assert same == saved and np.abs(np.diff(saved, axis=0)).max() > 0.01
    for other in others:
        np.testing.assert_allclose(other[0], saved[0], atol=1e-5)
        np.testing.assert_allclose(other[1], saved[1], atol=2e-3)
    open_weights(folder / "step-000002", load_model_config(model))  # as a model.path: the critic is left out


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("critic")
    models = make_models(folder / "models")
    agents = {family: "module:agent" if family.endswith(" agent") else None for family, _ in CASES}
    cases = [in_layout(models[family.split()[0]], layout, agents[family]) for family, layout in CASES]
    found = run_cases(__file__, cases, folder)
    expected = {family: reference(models[family.split()[0]], agent is not None) for family, agent in agents.items()}
    return dict(zip(CASES, found, strict=True)), expected


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_values_and_updates_are_those_of_autograd(compared, case):
    found, expected = compared[0][case], compared[1][case[0]]
    assert all(rank == found[0] for rank in found)
    for step, (ours, theirs) in enumerate(zip(found[0]["steps"], expected, strict=True)):
        # Adam divides rounding by small gradients: what follows the first update is compared less closely.
        tolerance = 1e-5 if step == 0 else 2e-3
        for key in ("values", "returns"):
            np.testing.assert_allclose(ours[key], theirs[key], atol=tolerance * np.abs(theirs["returns"]).max())
        for key in ("loss", "grad_norm"):
            assert ours[key][0] == pytest.approx(theirs[key][0], rel=tolerance)
            assert ours[key][1] == pytest.approx(theirs[key][1], rel=2e-3)
        assert ours["clipped"][0] == 0 and ours["clipped"][1] == pytest.approx(theirs["clipped"][1], abs=2)
        assert theirs["clipped"][1] > (0 if case[0].endswith(" agent") else 10)  # of 8 tokens; of hundreds
    assert found[0]["policy"] > 0 and abs(np.mean(found[0]["process"])) < 1e-9
