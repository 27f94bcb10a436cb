"""SmolLM3: Llama, with layers that have no RoPE: those with a 0 in no_rope_layers, else every fourth one or what
no_rope_layer_interval says."""

from typing import Any

from dynamo_megatron.errors import InputError
from dynamo_megatron.models.config_fields import integer
from dynamo_megatron.models.family import Family, JsonObject
from dynamo_megatron.models.spec import Served


class SmolLM3(Family):
    """SGLang 0.5.23 has none."""

    name = "smollm3"
    fields = "no_rope_layer_interval no_rope_layers"
    tied = True
    rope_theta = None  # transformers' default is another family's
    rope_types = ("default", "linear", "llama3")  # YaRN's factor would be in the softmax scale of all layers
    served = Served(fused=False)
    tiny = {"no_rope_layers": [1, 0, 0, 1] * 8}

    def further(self, config: JsonObject) -> dict[str, Any]:
        layers, interval = integer(config, "num_hidden_layers"), integer(config, "no_rope_layer_interval", 4)
        turned = config.get("no_rope_layers")
        if turned is None:
            turned = [int((layer + 1) % interval != 0) for layer in range(layers)]
        if not isinstance(turned, list) or len(turned) < layers or any(one not in (0, 1) for one in turned):
            raise InputError(f"no_rope_layers: {turned!r:.80} is not a list of 0 or 1 for each of {layers} layers")
        return {"no_rope_layers": tuple(layer for layer in range(layers) if not turned[layer])}
