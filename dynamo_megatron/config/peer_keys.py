"""What verl's keys and slime's options are called here: the table of docs/names.md, and the answer to such a key."""

from __future__ import annotations

from typing import NamedTuple

PREFIX = "actor_rollout_ref."  # verl's, left out of the table
SECTIONS = ("actor_rollout_ref", "critic", "ray_init")  # of verl alone


class Row(NamedTuple):
    """Names, separated by blanks; where a peer has as many as `here`, they correspond in order."""

    verl: str
    slime: str
    here: str
    note: str = ""


TABLE = (
    Row("model.path", "--hf-checkpoint", "model.path"),
    Row(
        "data.train_files",
        "--prompt-data",
        "data.source",
        "the same Parquet file, JSONL, `datasets:NAME`, reasoning-gym, your iterator",
    ),
    Row("data.prompt_key", "--input-key --label-key", "data.prompt_key data.answer_key"),
    Row("data.train_batch_size", "--rollout-batch-size", "data.batch_prompts"),
    Row("data.max_response_length rollout.response_length", "--rollout-max-response-len", "rollout.max_new_tokens"),
    Row("rollout.prompt_length", "--rollout-max-prompt-len", "data.max_prompt_length"),
    Row("data.apply_chat_template_kwargs", "--apply-chat-template-kwargs", "data.template_args"),
    Row("data.filter_overlong_prompts data.truncation", "", "data.on_long_prompt", "`skip` or `error`"),
    Row(
        "rollout.n",
        "--n-samples-per-prompt",
        "algorithm.allocation",
        "a budget per step and bounds per prompt; `kind: uniform` gives every prompt the same n",
    ),
    Row(
        "actor.ppo_mini_batch_size",
        "--global-batch-size",
        "algorithm.loss.mini_batches",
        "the number of updates per step, `train_batch_size / ppo_mini_batch_size` with both in prompts; slime's "
        "`--global-batch-size` counts samples",
    ),
    Row(
        "actor.ppo_max_token_len_per_gpu actor.ppo_micro_batch_size_per_gpu",
        "--max-tokens-per-gpu --micro-batch-size",
        "trainer.micro_batch_tokens",
        "tokens; sequences are not split",
    ),
    Row(
        "model.enable_gradient_checkpointing",
        "--recompute-granularity",
        "trainer.recompute",
        "`full` recomputes every layer, `none` is verl's `False`",
    ),
    Row("actor.loss_agg_mode", "--calculate-per-token-loss", "algorithm.loss.aggregation"),
    Row(
        "algorithm.adv_estimator",
        "--advantage-estimator",
        "methods/grpo",
        "the file of a method, named after your config; for `rloo` or `optimal_token_baseline` also set "
        "`algorithm.advantage.kind` to `rloo` or `otb`. That key alone leaves the rest of the default method on: "
        "modulation, allocation and `prompt_mean`. There is no critic (`gae`, `ppo`)",
    ),
    Row(
        "algorithm.norm_adv_by_std_in_grpo",
        "--disable-grpo-std-normalization",
        "algorithm.advantage.kind",
        "after `methods/grpo`, `dr_grpo` does not divide by the standard deviation",
    ),
    Row(
        "algorithm.gamma algorithm.lam",
        "--gamma --lambd",
        "algorithm.advantage.process.gamma",
        "the discount of process rewards; without a critic, GAE's lambda only multiplies gamma, so set the product",
    ),
    Row(
        "actor.policy_loss.loss_mode",
        "",
        "algorithm.loss.clip_cov algorithm.loss.kl_cov algorithm.loss.ratio algorithm.loss.kind",
        "`ratio` is for `gspo`, `kind` for `cispo`",
    ),
    Row(
        "actor.clip_ratio_low actor.clip_ratio_high actor.clip_ratio_c",
        "--eps-clip --eps-clip-high --eps-clip-c",
        "algorithm.loss.clip_ratio_low algorithm.loss.clip_ratio_high algorithm.loss.clip_ratio_c",
    ),
    Row("actor.clip_ratio", "", "algorithm.loss.clip_ratio_low algorithm.loss.clip_ratio_high"),
    Row("actor.entropy_coeff", "--entropy-coef", "algorithm.loss.entropy_coef"),
    Row(
        "actor.kl_loss_coef actor.kl_loss_type",
        "--kl-loss-coef --kl-loss-type",
        "algorithm.kl.coef algorithm.kl.kind",
        "verl's `low_var_kl` is `k3`",
    ),
    Row("actor.use_kl_loss", "--use-kl-loss", "algorithm.kl.coef", "above 0 turns it on"),
    Row("algorithm.use_kl_in_reward algorithm.kl_ctrl.kl_coef", "", "algorithm.kl.coef", "of the loss, not the reward"),
    Row(
        "reward_model.overlong_buffer.len reward_model.overlong_buffer.penalty_factor",
        "",
        "algorithm.advantage.overlong_buffer algorithm.advantage.overlong_penalty",
        "`overlong_buffer` is the share `len / max_response_length`",
    ),
    Row("reward_model.model.path", "", "reward.reward_model.path"),
    Row(
        "algorithm.filter_groups.enable algorithm.filter_groups.max_num_gen_batches",
        "--dynamic-sampling-filter-path --over-sampling-batch-size",
        "algorithm.dynamic_sampling",
        "groups whose rewards are all equal are replaced, at most `rounds` times: `max_num_gen_batches - 1`",
    ),
    Row(
        "algorithm.rollout_correction.rollout_is algorithm.rollout_correction.rollout_is_threshold",
        "--use-tis --tis-clip",
        "algorithm.rollout_correction.level algorithm.rollout_correction.high",
    ),
    Row(
        "custom_reward_function.path custom_reward_function.name",
        "--custom-rm-path --rm-type --rm-url",
        "reward.functions",
        "`module:function`, a URL or a built-in one (docs/rewards.md); the function takes `(prompt, response)`, where "
        'verl\'s takes `(data_source, solution_str, ground_truth, extra_info)` (`prompt.meta["data_source"]`, '
        '`response`, `prompt.answer`, `prompt.meta["extra_info"]`) and slime\'s `(args, sample)`',
    ),
    Row(
        "actor.optim.lr actor.optim.weight_decay actor.optim.lr_warmup_steps actor.optim.clip_grad "
        "actor.optim.lr_decay_style",
        "--lr --weight-decay --lr-warmup-iters --clip-grad --lr-decay-style",
        "optimizer.lr optimizer.weight_decay optimizer.warmup_steps optimizer.clip_grad optimizer.schedule",
    ),
    Row("actor.optim.lr_warmup_steps_ratio", "", "optimizer.warmup_steps", "in steps: ratio x `trainer.steps`"),
    Row("actor.grad_clip", "", "optimizer.clip_grad"),
    Row("trainer.total_training_steps", "--num-rollout", "trainer.steps"),
    Row("trainer.total_epochs", "--num-epoch", "trainer.steps", "epochs x problems of the data / `data.batch_prompts`"),
    Row("data.shuffle data.seed", "--rollout-shuffle --rollout-seed", "data.shuffle_seed", "always shuffled"),
    Row("trainer.test_freq", "--eval-interval", "eval.every"),
    Row("trainer.val_before_train", "", "eval.every", "one evaluation comes before the training, unless it is null"),
    Row("data.val_files", "--eval-prompt-data", "eval.data"),
    Row(
        "rollout.val_kwargs.n rollout.val_kwargs.temperature",
        "--n-samples-per-eval-prompt --eval-temperature",
        "eval.samples eval.temperature",
    ),
    Row("trainer.save_freq", "--save-interval", "checkpoint.every"),
    Row("trainer.max_actor_ckpt_to_keep", "", "checkpoint.keep_last"),
    Row("trainer.resume_mode", "", "trainer.resume", "`never` for verl's `disable`"),
    Row("trainer.default_local_dir", "--save --load", "output_dir"),
    Row(
        "trainer.logger trainer.project_name trainer.experiment_name",
        "--use-wandb --wandb-project --wandb-group",
        "tracking.backends tracking.project tracking.name",
    ),
    Row(
        "actor.megatron.tensor_model_parallel_size actor.megatron.pipeline_model_parallel_size "
        "actor.megatron.context_parallel_size actor.megatron.expert_model_parallel_size",
        "--tensor-model-parallel-size --pipeline-model-parallel-size --context-parallel-size "
        "--expert-model-parallel-size",
        "parallel.tp parallel.pp parallel.cp parallel.ep",
    ),
    Row("rollout.tensor_model_parallel_size", "--rollout-num-gpus-per-engine", "rollout.tp"),
    Row("rollout.gpu_memory_utilization", "--sglang-mem-fraction-static", "rollout.memory_fraction"),
    Row("rollout.name", "", "rollout.engine", "SGLang is the only one that samples"),
    Row("", "--colocate", "rollout.placement"),
    Row(
        "trainer.nnodes trainer.n_gpus_per_node",
        "--actor-num-nodes --actor-num-gpus-per-node",
        "--nodes --gpus-per-node",
        "options of `launch`; `train` on one machine has `--ranks`",
    ),
)


def markdown_table() -> str:
    """The table in Markdown, as docs/names.md has it."""
    lines = ["| verl | slime | here |", "|---|---|---|"]
    for row in TABLE:
        verl, slime, here = (", ".join(f"`{name}`" for name in names.split()) for names in row[:3])
        lines.append(f"| {verl} | {slime} | {here}{f': {row.note}' if row.note else ''} |")
    return "\n".join(lines)


def whole_name(given: str) -> tuple[list[str], str] | None:
    """Our names for a key of verl, with or without its `actor_rollout_ref.`, or an option of slime, written as an
    option or as a key, and what to tell the user; None for a name that is neither's."""
    key = given.lstrip("+").removeprefix(PREFIX).removeprefix("reward.")
    option = "--" + given.lstrip("-").replace("_", "-")
    for peer, column, name in (("verl", 0, key), ("slime", 1, option)):
        for row in TABLE:
            if name in row[column].split():
                return _answer(peer, row, row[column].split(), name)
    return None


def last_part(given: str) -> tuple[list[str], str] | None:
    """As `whole_name`, for a key of verl without its section, as `ppo_mini_batch_size`; None unless one ends so."""
    ending = "." + given.rpartition(".")[2]
    found = [(row, name) for row in TABLE for name in row.verl.split() if name.endswith(ending)]
    return _answer("verl", found[0][0], found[0][0].verl.split(), found[0][1]) if len(found) == 1 else None


def _answer(peer: str, row: Row, names: list[str], name: str) -> tuple[list[str], str]:
    here = row.here.split()
    if len(names) == len(here):
        here = [here[names.index(name)]]
    note = f" ({row.note.replace('`', '')})" if row.note else ""
    return here, f", of {peer}; here it is {' and '.join(here)}{note}"
