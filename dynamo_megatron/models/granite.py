"""Granite 3, dense: Llama with four factors."""

from typing import Any

from dynamo_megatron.models.config_fields import number
from dynamo_megatron.models.family import Family, JsonObject


class Granite(Family):
    name = "granite"
    fields = "attention_multiplier embedding_multiplier logits_scaling residual_multiplier"
    required = ""
    tiny = {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "logits_scaling": 0.5, "residual_multiplier": 0.5}

    def further(self, config: JsonObject) -> dict[str, Any]:
        return {
            "attention_scale": number(config, "attention_multiplier", 1.0),
            "embedding_scale": number(config, "embedding_multiplier", 1.0),
            "residual_scale": number(config, "residual_multiplier", 1.0),
            "logit_scale": 1 / number(config, "logits_scaling", 1.0),
        }
