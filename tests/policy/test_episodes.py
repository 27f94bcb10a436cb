"""Episodes in training: each counts as one rollout, whatever its number of turns and segments."""

import numpy as np
import pytest
import torch
from rank_cases import run_cases, settings

from dynamo_megatron.config.files import compose
from dynamo_megatron.policy.batch import TrainBatch
from dynamo_megatron.types import EpisodeRecord, Rollout, RolloutBatch

# (context, sampled) of each turn, of each segment
Segments = list[list[tuple[list[int], list[int]]]]
EPISODES: list[tuple[str, float, Segments]] = [
    ("a", 1.0, [[([5, 6, 7], [8, 9]), ([10], [11, 12, 13])], [([5, 6, 20, 21], [22])]]),
    ("a", 0.0, [[([5, 6, 7], [30])]]),
    ("b", 1.0, [[([40, 41], [42, 43, 44])], [([40], [45]), ([46, 47], [48, 49])], [([1, 2, 3], [4])]]),
    ("b", 0.0, [[([40, 41], [50, 51])]]),
]


def episode(index: int, group: str, reward: float, segments: Segments, plain: bool = False) -> Rollout:
    tokens, mask, starts = [], [], []
    for segment in segments:
        starts.append(len(tokens))
        for context, sampled in segment:
            tokens += [*context, *sampled]
            mask += [0] * len(context) + [1] * len(sampled)
    n = sum(mask)
    logprobs = [-4.0 - 0.01 * t for t in range(n)]
    record = None if plain else EpisodeRecord(starts, {"turns": sum(map(len, segments)), "segments": len(segments)})
    identity = (f"{group}-{index}", group, group, 1)
    return Rollout(*identity, tokens, mask, logprobs, [(0, 0, n)], "stop", reward, reward > 0, {}, episode=record)


def batch_of() -> RolloutBatch:
    return RolloutBatch.from_rollouts([episode(i, *e) for i, e in enumerate(EPISODES)])


def turns() -> list[tuple[int, list[int], list[int]]]:
    """(episode, everything before, sampled) of each turn: the sequences that somebody would write by hand."""
    found = []
    for i, (_, _, segments) in enumerate(EPISODES):
        for segment in segments:
            before: list[int] = []
            for context, sampled in segment:
                before = [*before, *context]
                found.append((i, before, sampled))
                before = [*before, *sampled]
    return found


def test_an_episode_weighs_and_counts_as_one_rollout():
    fixed = ["model.path=m", "data.source=d", "output_dir=o", "rollout.max_new_tokens=16"]
    batch = batch_of()
    assert batch.response_lengths.tolist() == [6, 1, 7, 2] and batch.response(0).tolist() == [8, 9, 11, 12, 13, 22]
    for mode, expected in {
        "sequence_mean": [1 / 4 / 6, 1 / 4, 1 / 4 / 7, 1 / 4 / 2],
        "prompt_mean": [1 / (2 * 2 * 16)] * 4,
        "token_mean": [1 / 16] * 4,
    }.items():
        config = compose(["methods/rloo"], [*fixed, f"algorithm.loss.aggregation={mode}"])[0]
        built = TrainBatch.build(batch, config)
        np.testing.assert_allclose(built.weights, expected)
        np.testing.assert_array_equal(built.advantages, [1, -1, 1, -1])


@pytest.mark.parametrize(
    ("keys", "lasts"),  # slots of the last steps
    [
        (["rollout.agent=module:agent"], ([5], [6], [13], [14, 15])),
        (["algorithm.advantage.steps=turns"], ([5], [6], [13], [14, 15])),
        (["rollout.agent=module:agent", "algorithm.advantage.steps=tokens"], ([5], [6], [13], [15])),
    ],
)
def test_gae_between_turns_or_tokens(keys, lasts):
    """Values of 1 and lambda 0: a step's advantage is gamma less 1, and that of an episode's last one its reward less
    1."""
    algorithm = "algorithm={advantage: {kind: gae, gamma: 0.5, lambda: 0.0}}"
    config = compose([], ["model.path=m", "data.source=d", "output_dir=o", algorithm, *keys])[0]
    found, values = TrainBatch.build(batch_of(), config, values=np.ones(16)), np.full(16, -0.5)
    for (_, reward, _), slots in zip(EPISODES, lasts, strict=True):
        values[slots] = reward - 1
    np.testing.assert_allclose(found.process, values)
    np.testing.assert_allclose(found.returns, values + 1)


def on_rank(case, config, layout) -> dict:
    """An update on the episodes, or on the same tokens as rollouts of one turn each."""
    from dynamo_megatron.models import load_model_config
    from dynamo_megatron.policy.policy import Policy

    made, owners = [episode(i, *e) for i, e in enumerate(EPISODES)], list(range(len(EPISODES)))
    if case["by hand"]:
        made, owners, k = [], [i for i, _, _ in turns()], 0
        for i, before, sampled in turns():
            rollout = episode(len(made), EPISODES[i][0], EPISODES[i][1], [[(before, sampled)]], plain=True)
            first = k - sum(len(s) for j, _, s in turns() if j < i)
            rollout.engine_logprobs = [-4.0 - 0.01 * t for t in range(first, first + len(sampled))]
            k += len(sampled)
            made.append(rollout)
    batch = RolloutBatch.from_rollouts(made)
    advantages, weights = np.array([0.7, -0.4, 1.3, -0.9])[owners], np.array([0.05, 0.08, 0.02, 0.03])[owners]
    train = TrainBatch(batch, advantages, [np.arange(len(made))], weights)
    policy = Policy(load_model_config(config.model.path), config, layout)
    (mini,) = policy.pack(batch, [np.arange(len(made))])
    stats = policy.token_stats(batch, [mini])
    update = policy.update(train, mini, stats, None, 1e-2)
    after = policy.token_stats(batch, [mini])
    gradient = torch.cat([p.main_grad.flatten() for chunk in policy.chunks for p in chunk.parameters()])
    found = {"before": stats.logprobs.tolist(), "after": after.logprobs.tolist(), "norm": update["grad_norm"]}
    return {**found, "gradient": gradient.tolist()}


@pytest.mark.full
def test_the_gradient_is_that_of_sequences_written_by_hand_in_every_layout(tiny_model, tmp_path):
    cases = []
    for by_hand, parallel in ((True, {}), (False, {}), (False, {"cp": 2}), (False, {"tp": 2})):
        config = settings(tiny_model, parallel, trainer={"micro_batch_tokens": 24})
        cases.append({"config": config, "ranks": 2 if parallel else 1, "by hand": by_hand})
    by_hand, one, *others = (ranks[0] for ranks in run_cases(__file__, cases, tmp_path))
    gradient = np.array(by_hand["gradient"])
    assert np.abs(gradient).max() > 1e-4
    np.testing.assert_allclose(one["gradient"], gradient, atol=1e-5 * np.abs(gradient).max())
    for mine, theirs in ((one, by_hand), *((other, one) for other in others)):
        np.testing.assert_allclose(mine["norm"], theirs["norm"], rtol=1e-4)
        np.testing.assert_allclose(mine["before"], theirs["before"], atol=1e-5)
        np.testing.assert_allclose(mine["after"], theirs["after"], atol=1e-4)
