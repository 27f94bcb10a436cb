"""Reward functions and the processes that they run in."""

from dynamo_megatron.reward.functions import Step
from dynamo_megatron.reward.pool import RewardError, RewardPool, Score

__all__ = ["RewardError", "RewardPool", "Score", "Step"]
