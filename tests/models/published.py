"""Dimensions of published models, as their config.json has them."""

QWEN25 = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN3 = {
    **QWEN25,
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
}
QWEN3_MOE = {
    **QWEN3,
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "router_aux_loss_coef": 0.001,
}


def _sizes(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


CONFIGS = {
    "Qwen2.5-1.5B": QWEN25 | _sizes(1536, 8960, 28, 12, 2) | {"vocab_size": 151936, "tie_word_embeddings": True},
    "Qwen2.5-7B": QWEN25 | _sizes(3584, 18944, 28, 28, 4),
    "Qwen2.5-14B": QWEN25 | _sizes(5120, 13824, 48, 40, 8),
    "Qwen2.5-32B": QWEN25 | _sizes(5120, 27648, 64, 40, 8),
    "Qwen2.5-72B": QWEN25 | _sizes(8192, 29568, 80, 64, 8),
    "Qwen3-14B": QWEN3 | _sizes(5120, 17408, 40, 40, 8),
    "Qwen3-32B": QWEN3 | _sizes(5120, 25600, 64, 64, 8),
    "Qwen3-30B-A3B": QWEN3_MOE | _sizes(2048, 6144, 48, 32, 4) | {"moe_intermediate_size": 768},
    "Qwen3-235B-A22B": QWEN3_MOE | _sizes(4096, 12288, 94, 64, 4) | {"moe_intermediate_size": 1536},
}
# In billions, from the model cards: what the dimensions above must add up to
PARAMETERS = {
    "Qwen2.5-1.5B": 1.54,
    "Qwen2.5-7B": 7.61,
    "Qwen2.5-14B": 14.7,
    "Qwen2.5-32B": 32.5,
    "Qwen2.5-72B": 72.7,
    "Qwen3-14B": 14.8,
    "Qwen3-32B": 32.8,
    "Qwen3-30B-A3B": 30.5,
    "Qwen3-235B-A22B": 235,
}
