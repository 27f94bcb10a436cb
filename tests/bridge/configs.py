"""name -> config.json"""


def _t(model_type, arch, **k):
    return {
        "model_type": model_type,
        "architectures": [arch],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        **k,
    }


def llama(**k):
    return _t("llama", "LlamaForCausalLM", **k)


def mistral(**k):
    return _t("mistral", "MistralForCausalLM", **{"head_dim": 16, "sliding_window": None, **k})


def qwen2(**k):
    return _t("qwen2", "Qwen2ForCausalLM", **k)


def qwen3(**k):
    return _t("qwen3", "Qwen3ForCausalLM", **{"head_dim": 32, **k})


def qwen3_moe(**k):
    return _t(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        **{
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            **k,
        },
    )


def gemma3(**k):
    return _t(
        "gemma3_text",
        "Gemma3ForCausalLM",
        **{
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 16,
            "num_hidden_layers": 6,
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            **k,
        },
    )


def gpt_oss(**k):
    return _t(
        "gpt_oss",
        "GptOssForCausalLM",
        **{
            "head_dim": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
            "rope_theta": 150000.0,
            "attention_bias": True,
            "swiglu_limit": 7.0,
            "rms_norm_eps": 1e-5,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "max_position_embeddings": 131072,
            **k,
        },
    )


def exaone4(**k):
    return _t(
        "exaone4",
        "Exaone4ForCausalLM",
        **{"sliding_window": None, "head_dim": 16, "tie_word_embeddings": True, "rms_norm_eps": 1e-5, **k},
    )


def glm4_moe(**k):
    return _t(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        **{
            "head_dim": 32,
            "moe_intermediate_size": 48,
            "n_routed_experts": 8,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
            "num_nextn_predict_layers": 0,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-5,
            **k,
        },
    )


def deepseek_v3(**k):
    return _t(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        **{
            "num_key_value_heads": 4,
            "moe_intermediate_size": 48,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "num_nextn_predict_layers": 0,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            **k,
        },
    )


def nemotron(**k):
    c = _t(
        "nemotron",
        "NemotronForCausalLM",
        **{"hidden_act": "relu2", "norm_eps": 1e-5, "head_dim": 16, "partial_rotary_factor": 0.5, **k},
    )
    c.pop("rms_norm_eps")
    return c


def qwen3_next(**k):
    return _t(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        **{
            "head_dim": 32,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 48,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "partial_rotary_factor": 0.25,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            **k,
        },
    )


def olmoe(**k):
    return _t(
        "olmoe",
        "OlmoeForCausalLM",
        **{
            "num_key_value_heads": 4,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
            "rms_norm_eps": 1e-5,
            **k,
        },
    )


yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
dsyarn = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
NOTE = {
    "llama, llama3 rope with another original_max": llama(
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    ),
    "llama, rope dynamic": llama(rope_scaling={"rope_type": "dynamic", "factor": 4.0}, max_position_embeddings=64),
    "llama, longrope": llama(
        rope_scaling={
            "rope_type": "longrope",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "short_factor": [1.0] * 8,
            "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.0],
        }
    ),
    "mistral, rope linear": mistral(rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "qwen2, window from layer 2": qwen2(use_sliding_window=True, sliding_window=16, max_window_layers=2),
    "qwen3, window from layer 2": qwen3(use_sliding_window=True, sliding_window=16, max_window_layers=2),
    "qwen3, rope linear": qwen3(rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "qwen3, attention_bias": qwen3(attention_bias=True),
    "gemma3, layer_types 1:1": gemma3(layer_types=["sliding_attention", "full_attention"] * 3),
    "gpt_oss, swiglu_limit": gpt_oss(swiglu_limit=0.5),
    "gpt_oss, original_max": gpt_oss(
        rope_scaling={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        }
    ),
    "exaone4 with window": exaone4(
        sliding_window=16, sliding_window_pattern="LLLG", layer_types=["sliding_attention"] * 3 + ["full_attention"]
    ),
    "glm4_moe, norm_topk_prob false": glm4_moe(norm_topk_prob=False),
    "deepseek_v3, norm_topk_prob false": deepseek_v3(norm_topk_prob=False),
    "qwen3_moe, decoder_sparse_step 2": qwen3_moe(decoder_sparse_step=2),
    "llama attention_bias": llama(attention_bias=True),
    "llama mlp_bias": llama(mlp_bias=True),
    "nemotron attention_bias": nemotron(attention_bias=True),
    "llama yarn": llama(rope_scaling=yarn),
    "qwen2 yarn": qwen2(rope_scaling=yarn),
    "mistral yarn": mistral(rope_scaling=yarn),
    "llama yarn attention_factor": llama(rope_scaling={**yarn, "attention_factor": 1.3}),
    "llama linear": llama(rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "llama gelu": llama(hidden_act="gelu"),
    "llama partial 0.5": llama(partial_rotary_factor=0.5),
    "qwen3_moe norm_topk false": qwen3_moe(norm_topk_prob=False),
    "deepseek_v3 yarn": deepseek_v3(rope_scaling=dsyarn),
}
MORE = {
    "gemma3": gemma3(),
    "gemma3 other query_pre_attn_scalar": gemma3(query_pre_attn_scalar=20),
    "qwen3_next, full_attention_interval 2": qwen3_next(full_attention_interval=2),
    "qwen3_next, layer_types": qwen3_next(
        layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention"]
    ),
    "qwen3_next, norm_topk_prob false": qwen3_next(norm_topk_prob=False),
    "qwen3_next, mlp_only_layers": qwen3_next(mlp_only_layers=[1]),
    "qwen3_moe, mlp_only_layers": qwen3_moe(mlp_only_layers=[1]),
    "qwen3_moe, window": qwen3_moe(use_sliding_window=True, sliding_window=16, max_window_layers=0),
    "glm4_moe, no qk norm": glm4_moe(use_qk_norm=False),
    "glm4_moe, two shared experts": glm4_moe(n_shared_experts=2),
    "glm4_moe, groups": glm4_moe(n_group=4, topk_group=2),
    "glm4_moe, no bias": glm4_moe(attention_bias=False),
    "deepseek_v3, no q lora": deepseek_v3(q_lora_rank=None),
    "deepseek_v3, rope not interleaved": deepseek_v3(rope_interleave=False),
    "deepseek_v3, attention_bias": deepseek_v3(attention_bias=True),
    "deepseek_v3, routed_scaling_factor": deepseek_v3(routed_scaling_factor=1.0, n_shared_experts=2),
    "gpt_oss, layer_types": gpt_oss(layer_types=["full_attention", "sliding_attention"] * 2),
    "gpt_oss, attention_bias false": gpt_oss(attention_bias=False),
    "gpt_oss, hidden == intermediate": gpt_oss(intermediate_size=64),
    "olmoe, norm_topk_prob true": olmoe(norm_topk_prob=True),
    "olmoe, clip_qkv": olmoe(clip_qkv=0.5),
    "mistral window": mistral(sliding_window=16),
}
PLAIN = {
    "llama": llama(),
    "qwen2": qwen2(),
    "qwen3": qwen3(),
    "qwen3_moe": qwen3_moe(),
    "glm4_moe": glm4_moe(),
    "deepseek_v3": deepseek_v3(),
    "gpt_oss": gpt_oss(),
    "qwen3_next": qwen3_next(),
    "olmoe": olmoe(),
    "nemotron": nemotron(),
    "exaone4": exaone4(),
    "tied qwen3": qwen3(tie_word_embeddings=True),
}
