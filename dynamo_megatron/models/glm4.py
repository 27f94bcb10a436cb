"""GLM-4 of 2025, dense (GLM-4-9B-0414, 32B, Z1): RMSNorm on input and output of attention and MLP, RoPE of neighbours
in the first half of each head, gate and up in one tensor."""

from collections.abc import Mapping
from typing import Any

from dynamo_megatron.models.config_fields import flag
from dynamo_megatron.models.family import DENSE_LAYER, FUSED_MLP, QKV_BIAS, Family, JsonObject


class Glm4(Family):
    name = "glm4"
    layer = {
        **DENSE_LAYER,
        **FUSED_MLP,
        "self_attn_bda.norm.weight": ("post_self_attn_layernorm.weight",),
        "mlp_bda.norm.weight": ("post_mlp_layernorm.weight",),
    }
    fields = "attention_bias"
    required = "attention_bias num_key_value_heads rms_norm_eps"
    head_dim = 128
    rotary_share = 0.5
    rope_types = ("default",)
    tiny = {"attention_bias": True}

    def layer_names(self, config: JsonObject) -> Mapping[str, tuple[str, ...]]:
        return {**self.layer, **(QKV_BIAS if flag(config, "attention_bias") else {})}

    def further(self, config: JsonObject) -> dict[str, Any]:
        return {"rotary_interleaved": True}
