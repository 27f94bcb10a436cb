"""Process rewards in the batch that is trained on: added to the outcome's advantage, token by token, or not there."""

import numpy as np
import torch
from background_run import made_rollout

from dynamo_megatron.algorithm.shaping import shape_tokens
from dynamo_megatron.config import Config
from dynamo_megatron.config.files import compose
from dynamo_megatron.policy.batch import TrainBatch
from dynamo_megatron.types import RolloutBatch, TokenStats


def rollouts(*rows: tuple[float, list[float | None]]) -> RolloutBatch:
    """(outcome, the reward that ends at each token or None) of each rollout of a group."""
    made = []
    for i, (reward, rewards) in enumerate(rows):
        steps = [(t, t + 1, r) for t, r in enumerate(rewards) if r is not None]
        fields = {"right": reward, "engine_logprobs": [-1.0] * len(rewards), "step_rewards": steps}
        made.append(made_rollout(1, 0, i, "p", [1, 2], [3] * len(rewards), **fields))
    return RolloutBatch.from_rollouts(made)


def configured(method: str = "grpo", *overrides: str) -> Config:
    fixed = ["model.path=m", "data.source=d", "output_dir=o", "rollout.max_new_tokens=8"]
    return compose([f"methods/{method}"], [*fixed, *overrides])[0]


def token_advantages(batch: TrainBatch, config: Config) -> np.ndarray:
    """float32 [R], of all mini-batches, as the policy head gets them."""
    count = len(batch.rollouts.engine_logprobs)
    stats = TokenStats(*(torch.linspace(low, high, count) for low, high in ((-2, -1), (0.5, 1), (0, 0.1), (0.2, 0.3))))
    found = np.zeros(count, np.float32)
    for members in batch.mini_batches:
        given = (batch.advantages, batch.weights, stats, config.algorithm)
        found += shape_tokens(batch.rollouts, members, *given, seed=0, process=batch.process).advantages.numpy()
    return found


PAIR = rollouts((1.0, [None, 0.5, 1.0]), (0.0, [-0.5, None]))


def test_outcome_and_steps_by_hand():
    """rloo: the outcome's advantages are 1 and -1; mean steps .75 and -.5; gamma .5, weight 2. A teacher's gap is added
    to what it leaves of them."""
    process = "algorithm.advantage.process={weight: 2.0, gamma: 0.5}"
    config = configured("rloo", process)
    batch = TrainBatch.build(PAIR, config)
    np.testing.assert_array_equal(batch.advantages, [1.0, -1.0])
    returns = [1.0 / 2 + 1.5 / 4, 1.0 + 1.5 / 2, 1.5, -1.25, 0.0]
    expected = np.array([1, 1, 1, -1, -1]) + 2 * np.array(returns)
    np.testing.assert_allclose(token_advantages(batch, config), expected)
    taught, gap = configured("rloo", process, "algorithm.teacher={path: t, reward_weight: 0.5}"), np.linspace(-1, 1, 5)
    batch = TrainBatch.build(PAIR, taught, teacher_gap=gap)
    np.testing.assert_allclose(token_advantages(batch, taught), 0.5 * expected + gap, rtol=1e-6)


def test_prime_by_hand():
    """The advantage of arXiv 2502.01456, with beta .05: log-ratios (2, 4) and (-2, 0, -4), so rewards (.1, .2) and
    (-.1, 0, -.2) with the means .15 and -.1; outcomes 1 and 0."""
    batch = rollouts((1.0, [None, None]), (0.0, [None, None, None]))
    implicit = 0.05 * np.array([2.0, 4.0, -2.0, 0.0, -4.0])
    config = configured("rloo")
    built = TrainBatch.build(batch, config, implicit_rewards=implicit)
    first = [1 + (0.1 + 0.1) + (0.2 + 0.1), 1 + (0.2 + 0.1)]
    second = [-1 + (-0.1 - 0.15) + (0 - 0.15) + (-0.2 - 0.15), -1 + (0 - 0.15) + (-0.2 - 0.15), -1 + (-0.2 - 0.15)]
    np.testing.assert_allclose(token_advantages(built, config), [*first, *second], rtol=1e-6)


def test_steps_and_prime_add_up_each_with_a_baseline_of_its_own():
    config = configured("rloo")
    implicit = np.array([0.1, 0.2, 0.0, -0.1, 0.3])
    none = RolloutBatch(**{**vars(PAIR), "step_rewards": None})
    assert TrainBatch.build(none, config).process is None
    both = TrainBatch.build(PAIR, config, implicit_rewards=implicit).process
    apart = TrainBatch.build(PAIR, config).process + TrainBatch.build(none, config, implicit_rewards=implicit).process
    np.testing.assert_allclose(both, apart, rtol=1e-12)


def test_of_a_critic_by_hand():
    """gamma 1, lambda .5: steps count .1 of their rewards, outcomes (1, 0) come last; a teacher's gap is added."""
    keys = ["algorithm.advantage={normalise: none, lambda: 0.5, process: {weight: 0.1}}"]
    values = np.array([0.5, 0.4, 0.2, 0.1, 0.3])
    # errors r + V' - V: 0.4 - 0.5, 0.05 + 0.2 - 0.4, 0.1 + 1 - 0.2; -0.05 + 0.3 - 0.1, 0 - 0.3
    second, other = -0.15 + 0.5 * 0.9, -0.3
    expected = np.array([-0.1 + 0.5 * second, second, 0.9, 0.15 + 0.5 * other, other])
    config = configured("ppo", *keys)
    batch = TrainBatch.build(PAIR, config, values=values)
    np.testing.assert_allclose(token_advantages(batch, config), expected, rtol=1e-6)
    np.testing.assert_allclose(batch.returns, expected + values, rtol=1e-12)
    taught = configured("ppo", *keys, "algorithm.teacher={path: t, weight: 2.0, reward_weight: 0.5}")
    gap = np.array([0.1, -0.2, 0.0, 0.3, 0.0])
    batch = TrainBatch.build(PAIR, taught, values=values, teacher_gap=gap)
    np.testing.assert_allclose(token_advantages(batch, taught), 0.5 * expected + 2 * gap, rtol=1e-6)
    np.testing.assert_allclose(batch.returns, expected + values, rtol=1e-12)
