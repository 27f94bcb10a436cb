"""Qwen2 and Qwen2.5 (q, k and v have a bias), Qwen3 (RMSNorm on every head of q and k), and its mixture of experts."""

from collections.abc import Mapping
from typing import Any

from dynamo_megatron.errors import InputError
from dynamo_megatron.models.config_fields import flag, integer
from dynamo_megatron.models.family import DENSE_LAYER, HEAD_NORMS, QKV_BIAS, Family, JsonObject


class Qwen2(Family):
    """SGLang ignores the windows."""

    name = "qwen2"
    layer = {**DENSE_LAYER, **QKV_BIAS}
    fields = "use_sliding_window"
    window = 4096
    reads_layer_types = True

    def windowed(self, config: JsonObject, layer: int) -> bool:
        used = flag(config, "use_sliding_window") and config.get("sliding_window", self.window) is not None
        return used and layer >= integer(config, "max_window_layers", 28, least=0)

    def windows(self, config: JsonObject, layers: int) -> tuple[int, ...]:
        windows = super().windows(config, layers)
        if windows and not flag(config, "use_sliding_window"):
            raise InputError("layer_types: has sliding_attention, and use_sliding_window is not true")
        return windows


class Qwen3(Qwen2):
    name = "qwen3"
    layer = {**DENSE_LAYER, **HEAD_NORMS}
    head_dim: int | None = 128


class Qwen3Moe(Qwen3):
    """30B-A3B, 235B-A22B: every MLP is replaced by routed experts. The router is a linear layer whose softmax picks
    `num_experts_per_tok` experts per token; no expert is shared."""

    name = "qwen3_moe"
    fields = "moe_intermediate_size norm_topk_prob num_experts num_experts_per_tok num_local_experts"
    only = {"decoder_sparse_step": 1, "mlp_only_layers": []}
    head_dim = None
    tiny = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}

    def layer_names(self, config: JsonObject) -> Mapping[str, tuple[str, ...]]:
        names = {name: parts for name, parts in self.layer.items() if not name.startswith("mlp.")}
        names["mlp.router.weight"] = ("mlp.gate.weight",)
        for e in range(_experts(config)):
            here, there = f"mlp.experts.local_experts.{e}", f"mlp.experts.{e}"
            names[f"{here}.linear_fc1.weight"] = (f"{there}.gate_proj.weight", f"{there}.up_proj.weight")
            names[f"{here}.linear_fc2.weight"] = (f"{there}.down_proj.weight",)
        return names

    def further(self, config: JsonObject) -> dict[str, Any]:
        topk, norm = integer(config, "num_experts_per_tok"), flag(config, "norm_topk_prob")
        if topk == 1 and norm:
            raise InputError("norm_topk_prob: true with num_experts_per_tok 1 leaves the router without a gradient")
        return {
            "num_experts": _experts(config),
            "router_topk": topk,
            "moe_ffn_hidden_size": integer(config, "moe_intermediate_size"),
            "norm_topk_prob": norm,
        }


def _experts(config: JsonObject) -> int:
    # transformers 5 writes num_local_experts, older ones and the published files num_experts
    return integer(config, "num_local_experts" if config.get("num_experts") is None else "num_experts")
