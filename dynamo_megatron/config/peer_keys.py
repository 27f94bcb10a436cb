"""What verl's keys and slime's options are called here, for the answer to such a key; and what to do without a key that
other trainers have."""

from __future__ import annotations

PREFIX = "actor_rollout_ref."  # verl's, left out of the table
OURS = {  # ours: verl's keys and slime's options
    "model.path": "model.path --hf-checkpoint",
    "model.lora.rank": "model.lora_rank",
    "model.lora.alpha": "model.lora_alpha",
    "model.lora.targets (attention, mlp)": "model.target_modules",
    "data.source": "data.train_files --prompt-data",
    "data.prompt_key": "--input-key",
    "data.answer_key": "--label-key",
    "data.batch_prompts": "data.train_batch_size --rollout-batch-size",
    "rollout.max_new_tokens": "data.max_response_length rollout.response_length --rollout-max-response-len",
    "data.max_prompt_length": "rollout.prompt_length --rollout-max-prompt-len data.filter_overlong_prompts",
    "data.template_args": "data.apply_chat_template_kwargs --apply-chat-template-kwargs",
    "data.shuffle_seed (always shuffled)": "data.shuffle data.seed --rollout-shuffle --rollout-seed",
    "algorithm.allocation (a budget a step; kind: uniform spreads it evenly)": "rollout.n --n-samples-per-prompt",
    "algorithm.loss.mini_batches (the number of updates a step)": "actor.ppo_mini_batch_size --global-batch-size "
    "--num-steps-per-rollout",
    "trainer.micro_batch_tokens (tokens; sequences are not split)": "actor.ppo_max_token_len_per_gpu "
    "actor.ppo_micro_batch_size_per_gpu --max-tokens-per-gpu --micro-batch-size",
    "trainer.recompute (none, selective or full)": "model.enable_gradient_checkpointing --recompute-granularity",
    "algorithm.loss.aggregation (sequence_mean for seq-mean-token-mean)": "actor.loss_agg_mode "
    "--calculate-per-token-loss",
    "methods/grpo for grpo, methods/ppo for gae and ppo, methods/gspo, methods/cispo, methods/otb, given after your "
    "config; algorithm.advantage.kind=rloo for rloo, module:function for others": "algorithm.adv_estimator "
    "--advantage-estimator",
    "algorithm.advantage.kind (dr_grpo divides by none)": "algorithm.norm_adv_by_std_in_grpo "
    "--disable-grpo-std-normalization",
    "algorithm.advantage.gamma and lambda": "algorithm.gamma algorithm.lam --gamma --lambd",
    "critic.path": "critic.model.path",
    "critic.optimizer.lr": "critic.optim.lr --critic-lr",
    "critic.value_clip": "critic.cliprange_value --value-clip",
    "critic.warmup_steps": "trainer.critic_warmup --num-critic-only-steps",
    "methods/gspo, cispo, clip_cov or kl_cov (others: algorithm.loss.kind=module:function of yours)": ""
    "actor.policy_loss.loss_mode",
    "algorithm.loss.clip_cov.ratio": "actor.policy_loss.clip_cov_ratio",
    "algorithm.loss.clip_cov.low": "actor.policy_loss.clip_cov_lb",
    "algorithm.loss.clip_cov.high": "actor.policy_loss.clip_cov_ub",
    "algorithm.loss.kl_cov.ratio": "actor.policy_loss.kl_cov_ratio",
    "algorithm.loss.kl_cov.coef": "actor.policy_loss.ppo_kl_coef",
    "algorithm.loss.clip_ratio_low and clip_ratio_high": "actor.clip_ratio",
    "algorithm.loss.clip_ratio_low": "actor.clip_ratio_low --eps-clip",
    "algorithm.loss.clip_ratio_high": "actor.clip_ratio_high --eps-clip-high",
    "algorithm.loss.clip_ratio_c": "actor.clip_ratio_c --eps-clip-c",
    "algorithm.loss.entropy_coef": "actor.entropy_coeff --entropy-coef",
    "algorithm.kl.coef (in the loss, and on if above 0; nearest to a KL in the reward: algorithm.kl.kind=k2)": ""
    "actor.kl_loss_coef actor.use_kl_loss algorithm.use_kl_in_reward algorithm.kl_ctrl.kl_coef --kl-loss-coef "
    "--use-kl-loss --kl-coef",
    "algorithm.kl.kind (low_var_kl is k3)": "actor.kl_loss_type --kl-loss-type",
    "algorithm.advantage.overlong_buffer (the share len / max_response_length)": "reward_model.overlong_buffer.len "
    "reward.reward_kwargs.overlong_buffer_cfg.len",
    "algorithm.advantage.overlong_penalty": "reward_model.overlong_buffer.penalty_factor "
    "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor",
    "reward.reward_model.path": "reward_model.model.path reward.reward_model.model_path",
    "algorithm.dynamic_sampling (rounds: max_num_gen_batches - 1)": "algorithm.filter_groups.enable "
    "algorithm.filter_groups.max_num_gen_batches --dynamic-sampling-filter-path --over-sampling-batch-size",
    "algorithm.rollout_correction.level": "algorithm.rollout_correction.rollout_is --use-tis",
    "algorithm.rollout_correction.low": "--tis-clip-low",
    "algorithm.rollout_correction.high": "algorithm.rollout_correction.rollout_is_threshold --tis-clip",
    "algorithm.loss.old (engine)": "algorithm.rollout_correction.bypass_mode --use-rollout-logprobs",
    "rollout.temperature": "--rollout-temperature",
    "reward.functions (module:function of (prompt, response), or a URL)": "custom_reward_function.path "
    "custom_reward_function.name reward.custom_reward_function.path reward.custom_reward_function.name "
    "--custom-rm-path --rm-type --rm-url",
    "optimizer.lr": "actor.optim.lr --lr",
    "optimizer.weight_decay": "actor.optim.weight_decay --weight-decay",
    "optimizer.betas": "actor.optim.betas --adam-beta1 --adam-beta2",
    "optimizer.warmup_steps (in steps; slime counts updates)": "actor.optim.lr_warmup_steps "
    "actor.optim.lr_warmup_steps_ratio --lr-warmup-iters",
    "optimizer.clip_grad": "actor.optim.clip_grad actor.grad_clip --clip-grad",
    "optimizer.schedule": "actor.optim.lr_decay_style actor.optim.lr_scheduler_type --lr-decay-style",
    "optimizer.cpu_offload": "--optimizer-cpu-offload",
    "trainer.steps (epochs x problems of the data / data.batch_prompts)": "trainer.total_training_steps "
    "trainer.total_epochs --num-rollout --num-epoch",
    "eval.every (with one evaluation before the training)": "trainer.test_freq trainer.val_before_train "
    "--eval-interval",
    "eval.data": "data.val_files --eval-prompt-data",
    "eval.samples": "rollout.val_kwargs.n --n-samples-per-eval-prompt",
    "eval.temperature": "rollout.val_kwargs.temperature --eval-temperature",
    "checkpoint.every": "trainer.save_freq --save-interval",
    "checkpoint.keep_last": "trainer.max_actor_ckpt_to_keep",
    "trainer.resume (never for verl's disable)": "trainer.resume_mode",
    "output_dir": "trainer.default_local_dir --save --load",
    "tracking.backends": "trainer.logger --use-wandb",
    "tracking.project": "trainer.project_name --wandb-project",
    "tracking.name": "trainer.experiment_name --wandb-group",
    "parallel.tp": "actor.megatron.tensor_model_parallel_size --tensor-model-parallel-size",
    "parallel.pp": "actor.megatron.pipeline_model_parallel_size --pipeline-model-parallel-size",
    "parallel.last_stage_layers": "actor.megatron.override_transformer_config.num_layers_in_last_pipeline_stage "
    "--decoder-last-pipeline-num-layers",
    "parallel.cp": "actor.megatron.context_parallel_size --context-parallel-size",
    "parallel.ep": "actor.megatron.expert_model_parallel_size --expert-model-parallel-size",
    "rollout.tp": "rollout.tensor_model_parallel_size --rollout-num-gpus-per-engine",
    "rollout.router_replay": "rollout.enable_rollout_routing_replay actor.megatron.router_replay.mode "
    "--use-rollout-routing-replay",
    "rollout.memory_fraction": "rollout.gpu_memory_utilization --sglang-mem-fraction-static",
    "rollout.engine (SGLang is the only one that samples)": "rollout.name",
    "rollout.placement": "--colocate",
    "--nodes and --gpus-per-node (options of launch; train has --ranks)": "trainer.nnodes trainer.n_gpus_per_node "
    "--actor-num-nodes --actor-num-gpus-per-node",
}
ABSENT = {
    "algorithm.teacher.url": "give the URL as algorithm.teacher.path",
    "algorithm.teacher.kind": "reverse KL is the only one; leave it out",
    "model.lora.dropout": "adapters have none; leave it out",
    "parallel.fsdp": "not supported; optimizer.cpu_offload keeps the optimizer in host memory (docs/clusters.md)",
}


def ours(given: str) -> str | None:
    """What to tell the user of a key of verl or an option of slime, which may be written as a key, or of a key of
    ABSENT; None for any other name."""
    if given in ABSENT:
        return ABSENT[given]
    key, option = given.lstrip("+").removeprefix(PREFIX), "--" + given.lstrip("-").replace("_", "-")
    for here, names in OURS.items():
        for name in {key, option}.intersection(names.split()):
            return f"of {'slime' if name == option else 'verl'}, here it is {here}"
    return None
