"""The spec of a model of `model.source: bridge`: what a run has to know before Megatron-Bridge builds the model.

Its names and shapes are those of the folder itself, which the loading compares with Bridge's (bridge/loading.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from dynamo_megatron.errors import InputError
from dynamo_megatron.models.config_fields import flag, integer, number, read_shape
from dynamo_megatron.models.mapping import HF_HEAD
from dynamo_megatron.models.spec import Bridged, ModelSpec

MULTI_TOKEN = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
SCALES = ("logits_scaling", "logit_scale", "lm_head_multiplier")


def bridged_spec(config: Mapping[str, Any], folder: Path) -> ModelSpec:
    """Raises ValueError naming the field that is missing, or that the policy's head cannot do."""
    _refuse(config)
    shapes = _shapes(folder)
    tied = flag(config, "tie_word_embeddings") or HF_HEAD not in shapes
    if tied:
        shapes.pop(HF_HEAD, None)
    width = integer(config, "intermediate_size", 4 * integer(config, "hidden_size"))
    experts = next(
        (config[key] for key in ("n_routed_experts", "num_experts", "num_local_experts") if config.get(key)), 0
    )
    return ModelSpec(
        **read_shape({**config, "intermediate_size": width}),
        family=f"bridge:{config.get('model_type')}",
        rope_theta=number(config, "rope_theta", 10000.0),
        tied=tied,
        num_experts=experts,
        router_topk=integer(config, "num_experts_per_tok", 1) if experts else 0,
        moe_ffn_hidden_size=integer(config, "moe_intermediate_size", width) if experts else 0,
        bridged=Bridged(shapes),
    )


def _refuse(config: Mapping[str, Any]) -> None:
    for key in MULTI_TOKEN:
        if config.get(key):
            raise InputError(
                f"{key}: {config[key]!r}; multi-token prediction is not trained with model.source: bridge: set it to 0 "
                "and leave its tensors out of the folder"
            )
    if config.get("final_logit_softcapping") is not None:
        raise InputError("final_logit_softcapping: soft-capped logits are not supported with model.source: bridge")
    for key in SCALES:
        if config.get(key) not in (None, 1, 1.0):
            raise InputError(f"{key}: {config[key]!r}; scaled logits are not supported with model.source: bridge")
    if config.get("quantization_config") is not None:
        raise InputError("quantization_config: a quantised checkpoint cannot be trained; give the bf16 or fp32 one")


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Of the tensors in the folder's headers; without a tied model's head, and without rotary buffers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        try:
            with safe_open(file, framework="numpy") as opened:
                shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise InputError(f"{file.name}: corrupt or truncated ({error})") from None
    if not shapes:
        raise InputError("no model*.safetensors beside it; model.source: bridge needs the weights at once")
    return {name: shape for name, shape in shapes.items() if not name.endswith("rotary_emb.inv_freq")}
