"""Warnings about combinations of settings that contradict the theory of their parts; measured in docs/concepts.md."""

from __future__ import annotations

from collections.abc import Iterator

from dynamo_megatron.config import Config

NEVER_FORGET = ("waterfill", "cero")
BY_ROLLOUT = ("token_mean", "sequence_mean", "sequence_sum", "constant_length")
DR_GRPO_LEAST = 0.8  # a warning if dr_grpo scales the gradient of the smallest group by less than this


def premise_warnings(config: Config) -> list[str]:
    """Returns the warnings, one line each; none if the parts fit together. Shown once, at the start of a run."""
    algorithm = config.algorithm
    allocation, advantage, aggregation = algorithm.allocation, algorithm.advantage, algorithm.loss.aggregation
    kind, low, high = allocation.kind, allocation.rollout_n_min, allocation.rollout_n_max
    warnings = []
    if config.optimizer.lr == 0:
        warnings.append("optimizer.lr=0: the weights stay as they are; set a learning rate, such as the default 1e-6")
    loss = algorithm.loss
    if loss.mini_batches == 1 and (loss.kl_cov is not None or loss.clip_ratio_high != loss.clip_ratio_low):
        warnings.append(
            "algorithm.loss.mini_batches=1: the only update of a step is at ratio 1, where neither clips nor "
            "kl_cov do anything; set algorithm.loss.mini_batches to 2 or more"
        )
    if algorithm.dynamic_sampling is not None and advantage.kind in ("reinforce", "history"):
        warnings.append(
            "algorithm.dynamic_sampling leaves out groups of equal rewards, from which "
            f"advantage.kind={advantage.kind} learns as from any other; set algorithm.dynamic_sampling=null"
        )
    if (rule := algorithm.sequential) is not None and not rule.explore:
        warnings.append(
            f"algorithm.sequential.kind={rule.kind} goes by the step's own outcomes, which biases the gradient "
            "(docs/concepts.md); set algorithm.sequential=null, or kind=pilot with explore above 0"
        )
    warnings += [*_process_warnings(config), *_history_warnings(config)]
    if kind == "uniform":
        return warnings
    if advantage.kind == "reinforce":
        warnings.append(
            "algorithm.advantage.kind=reinforce has no baseline: prompts that are always or never solved have full "
            f"advantages, and {kind} allocation gives them the least; set algorithm.allocation.kind=uniform"
        )
    if advantage.kind == "grpo":
        warnings.append(
            "algorithm.advantage.kind=grpo divides by the group's standard deviation: hard and easy prompts count more "
            f"than others, the more so the more rollouts they get, which {kind} allocation does not expect; set "
            "algorithm.advantage.kind=rloo or algorithm.allocation.kind=uniform"
        )
    if advantage.kind == "dr_grpo" and 1 - 1 / low < DR_GRPO_LEAST:
        warnings.append(
            f"algorithm.advantage.kind=dr_grpo makes a prompt count by its rollouts, {1 - 1 / low:.2f} with {low} and "
            f"{1 - 1 / high:.2f} with {high}; set algorithm.advantage.kind=rloo"
        )
    if aggregation in BY_ROLLOUT:
        warnings.append(
            f"algorithm.loss.aggregation={aggregation} makes a prompt count by its rollouts: what {kind} allocation "
            "gives more rollouts is also trained on more; set algorithm.loss.aggregation=prompt_mean"
        )
    functions = len(config.reward.outcomes)
    if kind == "neyman" and allocation.variance != "empirical" and functions > 1:
        warnings.append(
            f"algorithm.allocation.variance={allocation.variance} goes by whether a rollout succeeded, but the reward "
            f"is the {config.reward.fusion} of {functions} functions; set algorithm.allocation.variance=empirical"
        )
    return warnings


def _process_warnings(config: Config) -> Iterator[str]:
    """Warnings about process rewards, those of the reward `prime`."""
    allocation = config.algorithm.allocation
    if not config.reward.implicit:
        return
    if allocation.kind == "neyman":
        yield (
            "reward.functions: prime adds a part to the advantages, and algorithm.allocation.kind=neyman goes by the "
            "variance of the outcomes alone; set algorithm.allocation.kind=uniform"
        )
    even = allocation.kind == "uniform" and config.rollout_budget >= 2 * config.batch_prompts
    if allocation.rollout_n_min == 1 and not even:
        yield (
            "algorithm.allocation.rollout_n_min=1: process rewards are compared within the group alone, and those of a "
            "rollout without others count nothing; set algorithm.allocation.rollout_n_min=2"
        )


def _history_warnings(config: Config) -> Iterator[str]:
    """Warnings about methods besides the allocation that use a prompt's earlier rollouts."""
    allocation, selection = config.algorithm.allocation, config.data.selection
    setting, mend = ("static=true", "static=false") if allocation.static else (f"kind={allocation.kind}", "kind=neyman")
    readers = {
        "algorithm.advantage.kind=history": config.algorithm.advantage.kind == "history",
        f"data.selection.kind={selection.kind}": selection.kind in ("priority", "thompson"),
    }
    for key, reads in readers.items():
        if reads and (allocation.static or allocation.kind in NEVER_FORGET):
            yield (
                f"{key} goes by a prompt's earlier rollouts, and algorithm.allocation.{setting} forgets none of them, "
                f"however much the policy changes; set algorithm.allocation.{mend}"
            )
    if selection.weights and config.algorithm.dynamic_sampling is not None:
        yield (
            "data.selection.weights is unbiased only if every drawn prompt counts, and algorithm.dynamic_sampling "
            "leaves out groups by their rewards; set algorithm.dynamic_sampling=null"
        )
