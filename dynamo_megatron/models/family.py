"""What model families have in common: config.json -> ModelSpec. What is particular to one is a subclass in a file of
its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dynamo_megatron.errors import InputError
from dynamo_megatron.models.config_fields import DECODER, HARMLESS_AS, check_fields, flag, integer, read_shape
from dynamo_megatron.models.spec import ROPE_PARAMETERS, ModelSpec, RopeScaling, Served, read_rope

JsonObject = Mapping[str, Any]
# Megatron's parameter name within a layer -> the names within Hugging Face's `model.layers.N.` of the tensors that the
# parameter is made of, in Megatron's order. Most families have these.
DENSE_LAYER: Mapping[str, tuple[str, ...]] = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.weight": tuple(f"self_attn.{part}_proj.weight" for part in "qkv"),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
}
QKV_BIAS = {"self_attention.linear_qkv.bias": tuple(f"self_attn.{part}_proj.bias" for part in "qkv")}
HEAD_NORMS = {
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
}
FUSED_MLP = {"mlp.linear_fc1.weight": ("mlp.gate_up_proj.weight",)}
KINDS = ("full_attention", "sliding_attention")


class Family:
    """Reads the config.json of a family. A subclass has what differs from what stands here."""

    name: str
    architectures = ""  # that config.json may have; "": as transformers names it, NAME OF THE CLASS + ForCausalLM
    layer = DENSE_LAYER
    fields = ""  # of config.json that the family reads, beside config_fields.DECODER
    only: JsonObject = {}  # fields and the value that each must have, beside config_fields.HARMLESS_AS
    required = "num_key_value_heads"  # what else transformers' default would be differs between families
    head_dim: int | None = None  # if config.json has none; None: hidden_size / num_attention_heads
    tied = False  # if config.json does not say
    activation = "silu"
    window: int | None = None  # sliding_window, if config.json does not say
    reads_layer_types = False
    rotary_share = 1.0
    rope_theta: float | None = 10000.0  # if config.json has none; None: refused
    rope_types: Collection[str] = tuple(ROPE_PARAMETERS)
    served = Served()
    tiny: JsonObject = {}  # what a tiny model's config.json has to show all that the family does (tools/tiny_model.py)

    def layer_names(self, config: JsonObject) -> Mapping[str, tuple[str, ...]]:
        return self.layer

    def windowed(self, config: JsonObject, layer: int) -> bool:
        """Whether a layer has a window, if layer_types does not say."""
        if config.get("sliding_window") is not None:
            raise InputError(f"sliding_window: not supported in a {self.name} model; its attention has no window")
        return False

    def windows(self, config: JsonObject, layers: int) -> tuple[int, ...]:
        """The spec's."""
        types = [KINDS[self.windowed(config, layer)] for layer in range(layers)]
        given = config.get("layer_types") or types
        known = isinstance(given, list) and len(given) == layers and all(kind in KINDS for kind in given)
        if not known or (given != types and not self.reads_layer_types):
            raise InputError(f"layer_types: {given!r:.300} is not supported in a {self.name} model of {layers} layers")
        if KINDS[1] not in given:
            return ()
        window = integer({"sliding_window": self.window, **config}, "sliding_window")
        return tuple(window * KINDS.index(kind) for kind in given)

    def rope(self, config: JsonObject) -> tuple[float, RopeScaling, float | None]:
        """The spec's rope_theta, rope_scaling and local_rope_theta."""
        return *read_rope(config, self.rope_theta, self.rope_types, self.rotary_share), None

    def further(self, config: JsonObject) -> dict[str, Any]:
        """Further fields of the spec."""
        return {}

    def read(self, config: JsonObject) -> ModelSpec:
        """The spec of config.json's content. Raises ValueError naming the field that is missing, malformed or unknown,
        or that GPTModel would ignore."""
        only = {**HARMLESS_AS, "hidden_act": self.activation, **self.only}
        architectures = self.architectures.split() or [f"{type(self).__name__}ForCausalLM"]
        check_fields(config, DECODER.union(self.fields.split()), only, architectures)
        for key in self.required.split():
            if config.get(key) is None:
                raise InputError(f"{key}: missing, and families differ in what that means; give it")
        shape = read_shape(config, self.head_dim)
        heads, groups, hidden = shape["num_attention_heads"], shape["num_query_groups"], shape["hidden_size"]
        if heads % groups:
            raise InputError(f"num_key_value_heads: {groups} does not divide num_attention_heads {heads}")
        if config.get("head_dim") is None and self.head_dim is None and hidden % heads:
            raise InputError(f"num_attention_heads: {heads} does not divide hidden_size {hidden}; give head_dim")
        names, windows = self.layer_names(config), self.windows(config, shape["num_layers"])
        theta, scaling, local_theta = self.rope(config)
        return ModelSpec(
            **shape,
            family=self.name,
            rope_theta=theta,
            rope_scaling=scaling,
            local_rope_theta=local_theta if windows else None,
            rotary_share=self.rotary_share,
            tied=flag({"tie_word_embeddings": self.tied, **config}, "tie_word_embeddings"),
            windows=windows,
            activation=self.activation,
            qkv_bias="self_attention.linear_qkv.bias" in names,
            qk_norm=any(name.startswith("self_attention.q_layernorm") for name in names),
            wide_qk_norm="self_attention.q_layernorm.scales" in names,
            pre_norms="input_layernorm.weight" in names,
            post_norms="self_attn_bda.norm.weight" in names,
            layer_names=names,
            served=self.served,
            **self.further(config),
        )
