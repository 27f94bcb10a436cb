"""Gemma 3, text alone (270M, 1B): layers with a window and a RoPE base of their own alternate with layers without;
norms before and after attention and MLP; RMSNorm on every head of q and k; GeGLU; an embedding times the square root of
its width."""

from typing import Any

from dynamo_megatron.errors import InputError
from dynamo_megatron.models.config_fields import integer, number
from dynamo_megatron.models.family import DENSE_LAYER, HEAD_NORMS, KINDS, Family, JsonObject
from dynamo_megatron.models.spec import RopeScaling, Served


class Gemma3(Family):
    name = "gemma3_text"
    layer = {
        **DENSE_LAYER,
        **HEAD_NORMS,
        "self_attn_bda.norm.weight": ("post_attention_layernorm.weight",),
        "pre_mlp_layernorm.weight": ("pre_feedforward_layernorm.weight",),
        "mlp_bda.norm.weight": ("post_feedforward_layernorm.weight",),
    }
    fields = "query_pre_attn_scalar rope_local_base_freq sliding_window_pattern"
    activation = "gelu_pytorch_tanh"
    only = {"hidden_activation": activation}
    head_dim = 256
    tied = True
    window = 4096
    reads_layer_types = True
    rope_theta = 1e6
    rope_types = ("default",)  # SGLang ignores the others
    served = Served(windows=True, whole_embedding=True)
    tiny = {"sliding_window": 8, "sliding_window_pattern": 2, "tie_word_embeddings": True}

    def windowed(self, config: JsonObject, layer: int) -> bool:
        return (layer + 1) % integer(config, "sliding_window_pattern", 6) > 0

    def rope(self, config: JsonObject) -> tuple[float, RopeScaling, float | None]:
        """transformers 5 writes both bases into rope_parameters, older versions have a field for each."""
        both = config.get("rope_parameters")
        if both is None:
            theta, scaling, _ = super().rope(config)
            return theta, scaling, number(config, "rope_local_base_freq", 1e4)
        sets = [both.get(kind) for kind in KINDS] if isinstance(both, dict) and len(both) == len(KINDS) else []
        if not sets or not all(isinstance(one, dict) and "rope_theta" in one for one in sets):
            raise InputError(f"rope_parameters: {both!r} is not a set with rope_theta for each of {', '.join(KINDS)}")
        for key in ("rope_theta", "rope_scaling", "rope_local_base_freq"):
            if config.get(key) is not None:
                raise InputError(f"{key}: given beside rope_parameters, which has one for each layer type; remove it")
        everywhere, local = (Family.rope(self, {**config, "rope_parameters": one}) for one in sets)
        return everywhere[0], everywhere[1], local[0]

    def further(self, config: JsonObject) -> dict[str, Any]:
        return {
            "attention_scale": number(config, "query_pre_attn_scalar", 256.0) ** -0.5,
            # as SGLang has it; transformers rounds it to the weights' dtype
            "embedding_scale": integer(config, "hidden_size") ** 0.5,
            "zero_centered_norms": True,
        }
