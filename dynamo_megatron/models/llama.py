"""Llama and models that compute the same (SmolLM2): no biases, no q/k norm. Mistral, which may have a window. Phi-3 and
Phi-4: queries, keys and values are one tensor, gate and up another. SGLang ignores the windows, which transformers
applies in all layers whatever layer_types has."""

from dynamo_megatron.errors import InputError
from dynamo_megatron.models.family import DENSE_LAYER, FUSED_MLP, Family, JsonObject


class Llama(Family):
    name = "llama"
    architectures = "LlamaForCausalLM MistralForCausalLM"
    required = ""


class Mistral(Llama):
    required = "num_key_value_heads"
    tiny = {"sliding_window": 8}

    def windowed(self, config: JsonObject, layer: int) -> bool:
        if "sliding_window" not in config:
            raise InputError("sliding_window: missing, and families differ in what that means; give it")
        return config["sliding_window"] is not None


class Phi3(Family):
    name = "phi3"
    layer = {**DENSE_LAYER, **FUSED_MLP, "self_attention.linear_qkv.weight": ("self_attn.qkv_proj.weight",)}
    fields = "original_max_position_embeddings"  # of RoPE "longrope"
    required = "num_key_value_heads rms_norm_eps"
    rope_types = ("default",)  # transformers takes YaRN's name for "longrope"

    def windowed(self, config: JsonObject, layer: int) -> bool:
        return config.get("sliding_window") is not None
