"""Configured combinations that undo their own theory, in words. docs/estimators.md has the measurements behind them."""

from __future__ import annotations

from dynamo_megatron.config import Config

BY_ROLLOUT = ("token_mean", "sequence_mean", "sequence_sum", "constant_length")


def premise_warnings(config: Config) -> list[str]:
    """One line each; none for a configuration whose parts fit together. Said once, at the start of a run."""
    allocation, advantage = config.algorithm.allocation, config.algorithm.advantage
    aggregation = config.algorithm.loss.aggregation
    if allocation.kind == "uniform":
        return []
    warnings = []
    if advantage.kind == "grpo":
        warnings.append(
            f"algorithm.advantage.kind=grpo divides by the group's standard deviation: hard and easy prompts then count "
            f"as much as middling ones, more so the more rollouts they get, and {allocation.kind} allocation saves on "
            "the wrong prompts; set algorithm.advantage.kind=rloo, or algorithm.allocation.kind=uniform"
        )
    if advantage.kind == "dr_grpo":
        low, high = allocation.rollout_n_min, allocation.rollout_n_max
        warnings.append(
            "algorithm.advantage.kind=dr_grpo shrinks a prompt's gradient by 1 - 1/n, so that prompts count by their "
            f"rollouts: by {1 - 1 / low:.2f} with {low} and {1 - 1 / high:.2f} with {high}; "
            "set algorithm.advantage.kind=rloo, which does not"
        )
    if aggregation in BY_ROLLOUT:
        warnings.append(
            f"algorithm.loss.aggregation={aggregation} counts a prompt as often as it has rollouts: what "
            f"{allocation.kind} allocation gives more rollouts, the training also takes for more important; "
            "set algorithm.loss.aggregation=prompt_mean"
        )
    if allocation.rollout_n_min == 1 and advantage.singleton == "zero":
        warnings.append(
            "algorithm.allocation.rollout_n_min=1: a prompt with one rollout has nothing to compare it with and "
            "teaches nothing, the more surely the less the allocation thinks of it; set it to 2 or more"
        )
    if allocation.kind == "neyman" and allocation.variance != "empirical" and len(config.reward.functions) > 1:
        warnings.append(
            f"algorithm.allocation.variance={allocation.variance} goes by whether a rollout succeeded, but the reward "
            f"is the {config.reward.fusion} of {len(config.reward.functions)} functions; "
            "set algorithm.allocation.variance=empirical"
        )
    return warnings
