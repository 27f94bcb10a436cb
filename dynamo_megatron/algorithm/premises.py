"""Warnings about combinations of settings that contradict the theory of their parts."""

from __future__ import annotations

from dynamo_megatron.config import Config
from dynamo_megatron.config.reward import WITH_SETTINGS

BY_ROLLOUT = ("token_mean", "sequence_mean", "sequence_sum", "constant_length")


def premise_warnings(config: Config) -> list[str]:
    """Returns the warnings, one line each; none if the parts fit together. Shown once, at the start of a run."""
    algorithm, reward, functions = config.algorithm, config.reward, len(config.reward.outcomes)
    allocation, advantage, loss = algorithm.allocation, algorithm.advantage, algorithm.loss
    uneven = allocation.kind != "uniform"
    one_update, clips = loss.mini_batches == 1, loss.clip_ratio_high != loss.clip_ratio_low
    found = [
        (
            config.optimizer.lr == 0,
            "optimizer.lr=0: the weights stay as they are; set a learning rate, such as the default 1e-6",
        ),
        (
            one_update and loss.old == "policy" and (clips or loss.kl_cov is not None),
            "algorithm.loss.mini_batches=1: the only update of a step is at ratio 1, where neither clips nor kl_cov do "
            "anything; set algorithm.loss.mini_batches to 2 or more",
        ),
        (
            one_update and advantage.kind == "gae" and config.critic.value_clip is not None,
            "algorithm.loss.mini_batches=1: critic.value_clip does nothing in the only update of a step; set "
            "algorithm.loss.mini_batches to 2 or more",
        ),
        (
            algorithm.dynamic_sampling is not None and advantage.kind in ("reinforce", "history", "gae"),
            "algorithm.dynamic_sampling leaves out groups of equal rewards, from which "
            f"advantage.kind={advantage.kind} learns as from any other; set algorithm.dynamic_sampling=null",
        ),
        (
            uneven and advantage.kind in ("grpo", "dr_grpo", "reinforce"),
            f"algorithm.advantage.kind={advantage.kind} makes hard and easy prompts, or those with more rollouts, "
            f"count more than others, which {allocation.kind} allocation does not expect; set "
            "algorithm.advantage.kind=rloo or algorithm.allocation.kind=uniform",
        ),
        (
            uneven and loss.aggregation in BY_ROLLOUT,
            f"algorithm.loss.aggregation={loss.aggregation} makes a prompt count by its rollouts: what "
            f"{allocation.kind} allocation gives more rollouts is also trained on more; set "
            "algorithm.loss.aggregation=prompt_mean",
        ),
        (
            allocation.kind == "neyman" and allocation.variance != "empirical" and functions > 1,
            f"algorithm.allocation.variance={allocation.variance} goes by whether a rollout succeeded, but the reward "
            f"is the {config.reward.fusion} of {functions} functions; set algorithm.allocation.variance=empirical",
        ),
        (
            algorithm.kl.coef > 0 and algorithm.kl.kind == "k1" and algorithm.kl.where == "loss",
            "algorithm.kl.kind=k1: as a term of the loss its gradient is noise, 0 on average; set "
            "algorithm.kl.kind=k2, whose gradient is that of the KL divergence",
        ),
        *(
            (
                name not in reward.functions and getattr(reward, name) != type(reward).model_fields[name].default,
                f"reward.{name}: settings of a reward that reward.functions lacks; set reward.functions to use it",
            )
            for name in WITH_SETTINGS
        ),
    ]
    return [line for applies, line in found if applies]
