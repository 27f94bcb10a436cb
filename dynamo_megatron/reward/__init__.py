"""Reward functions and the processes that they run in."""

from dynamo_megatron.reward.functions import RewardError, Step
from dynamo_megatron.reward.pool import RewardPool, Score

__all__ = ["RewardError", "RewardPool", "Score", "Step"]
