"""OLMo 2: RMSNorm on the output of attention and MLP in place of their input, and on all heads of q and k together.
OLMo 3: a window in three of four layers, to which scaled RoPE does not apply."""

from dynamo_megatron.errors import InputError
from dynamo_megatron.models.family import DENSE_LAYER, Family, JsonObject
from dynamo_megatron.models.spec import RopeScaling, Served

THETA = 500000.0


class Olmo2(Family):
    name = "olmo2"
    layer = {
        **{name: parts for name, parts in DENSE_LAYER.items() if "layernorm" not in name},
        "self_attention.q_layernorm.scales": ("self_attn.q_norm.weight",),
        "self_attention.k_layernorm.scales": ("self_attn.k_norm.weight",),
        "self_attn_bda.norm.weight": ("post_attention_layernorm.weight",),
        "mlp_bda.norm.weight": ("post_feedforward_layernorm.weight",),
    }
    required = "num_key_value_heads rms_norm_eps"
    served = Served(head_dim=False)


class Olmo3(Olmo2):
    name = "olmo3"
    window = 4096
    reads_layer_types = True
    served = Served(head_dim=False, windows=True)
    tiny = {
        "sliding_window": 8,
        "rope_theta": THETA,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    }

    def windowed(self, config: JsonObject, layer: int) -> bool:
        return layer % 4 < 3

    def rope(self, config: JsonObject) -> tuple[float, RopeScaling, float | None]:
        scaling = config.get("rope_scaling")
        elsewhere = config.get("rope_parameters") is not None or config.get("rope_theta") is None
        if elsewhere or (scaling and isinstance(scaling, dict) and "rope_type" not in scaling):
            raise InputError(
                "rope_parameters, rope_theta, rope_scaling: SGLang reads the RoPE of this model from rope_theta and "
                "rope_scaling, which has a rope_type; if transformers 5 has saved it, write the values of "
                "rope_parameters' full_attention as rope_theta and rope_scaling"
            )
        if config["rope_theta"] != THETA:  # transformers does not read it for layers with a window
            raise InputError(
                f"rope_theta: a model with {config['rope_theta']!r} cannot be served, because SGLang and transformers "
                f"agree on the RoPE of an OLMo 3 only with {THETA:g} (do not change it: that would be another model)"
            )
        theta, scaled, _ = super().rope(config)
        return theta, scaled, theta if scaled else None
