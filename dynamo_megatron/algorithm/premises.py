"""Warnings about combinations of settings that contradict the theory of their parts; measured in docs/concepts.md."""

from __future__ import annotations

from dynamo_megatron.config import Config

NEVER_FORGET = ("waterfill", "cero")
BY_ROLLOUT = ("token_mean", "sequence_mean", "sequence_sum", "constant_length")
DR_GRPO_LEAST = 0.8  # a warning if dr_grpo scales the gradient of the smallest group by less than this


def premise_warnings(config: Config) -> list[str]:
    """Returns the warnings, one line each; none if the parts fit together. Shown once, at the start of a run."""
    algorithm, selection = config.algorithm, config.data.selection
    allocation, advantage, loss, rule = algorithm.allocation, algorithm.advantage, algorithm.loss, algorithm.sequential
    kind, low, high = allocation.kind, allocation.rollout_n_min, allocation.rollout_n_max
    uneven, functions = kind != "uniform", len(config.reward.outcomes)
    even = not uneven and config.rollout_budget >= 2 * config.batch_prompts
    forever = "static=true" if allocation.static else f"kind={kind}" if kind in NEVER_FORGET else None
    forgetting = "static=false" if allocation.static else "kind=neyman"
    readers = {
        "algorithm.advantage.kind=history": advantage.kind == "history",
        "data.selection.kind=priority": selection.kind == "priority",
    }
    found = [
        (
            config.optimizer.lr == 0,
            "optimizer.lr=0: the weights stay as they are; set a learning rate, such as the default 1e-6",
        ),
        (
            loss.mini_batches == 1 and (loss.kl_cov is not None or loss.clip_ratio_high != loss.clip_ratio_low),
            "algorithm.loss.mini_batches=1: the only update of a step is at ratio 1, where neither clips nor kl_cov do "
            "anything; set algorithm.loss.mini_batches to 2 or more",
        ),
        (
            algorithm.dynamic_sampling is not None and advantage.kind in ("reinforce", "history", "gae"),
            "algorithm.dynamic_sampling leaves out groups of equal rewards, from which "
            f"advantage.kind={advantage.kind} learns as from any other; set algorithm.dynamic_sampling=null",
        ),
        (
            rule is not None and not rule.explore,
            f"algorithm.sequential.kind={rule and rule.kind} goes by the step's own outcomes, which biases the "
            "gradient (docs/concepts.md); set algorithm.sequential=null, or kind=pilot with explore above 0",
        ),
        (
            config.reward.implicit and kind == "neyman",
            "reward.functions: prime adds a part to the advantages, and algorithm.allocation.kind=neyman goes by the "
            "variance of the outcomes alone; set algorithm.allocation.kind=uniform",
        ),
        (
            config.reward.implicit and low == 1 and not even,
            "algorithm.allocation.rollout_n_min=1: process rewards are compared within the group alone, and those of a "
            "rollout without others count nothing; set algorithm.allocation.rollout_n_min=2",
        ),
        *(
            (
                reads and forever,
                f"{key} goes by a prompt's earlier rollouts, and algorithm.allocation.{forever} forgets none of them, "
                f"however much the policy changes; set algorithm.allocation.{forgetting}",
            )
            for key, reads in readers.items()
        ),
        (
            uneven and advantage.kind == "reinforce",
            "algorithm.advantage.kind=reinforce has no baseline: prompts that are always or never solved have full "
            f"advantages, and {kind} allocation gives them the least; set algorithm.allocation.kind=uniform",
        ),
        (
            uneven and advantage.kind == "grpo",
            "algorithm.advantage.kind=grpo divides by the group's standard deviation: hard and easy prompts count more "
            f"than others, the more so the more rollouts they get, which {kind} allocation does not expect; set "
            "algorithm.advantage.kind=rloo or algorithm.allocation.kind=uniform",
        ),
        (
            uneven and advantage.kind == "dr_grpo" and 1 - 1 / low < DR_GRPO_LEAST,
            f"algorithm.advantage.kind=dr_grpo makes a prompt count by its rollouts, {1 - 1 / low:.2f} with {low} and "
            f"{1 - 1 / high:.2f} with {high}; set algorithm.advantage.kind=rloo",
        ),
        (
            uneven and loss.aggregation in BY_ROLLOUT,
            f"algorithm.loss.aggregation={loss.aggregation} makes a prompt count by its rollouts: what {kind} "
            "allocation gives more rollouts is also trained on more; set algorithm.loss.aggregation=prompt_mean",
        ),
        (
            kind == "neyman" and allocation.variance != "empirical" and functions > 1,
            f"algorithm.allocation.variance={allocation.variance} goes by whether a rollout succeeded, but the reward "
            f"is the {config.reward.fusion} of {functions} functions; set algorithm.allocation.variance=empirical",
        ),
    ]
    return [line for applies, line in found if applies]
