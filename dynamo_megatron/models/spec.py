"""What Megatron needs to know about a model, read from a Hugging Face config.json."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dynamo_megatron.config.rollout import RolloutConfig
from dynamo_megatron.errors import InputError
from dynamo_megatron.models.config_fields import DECODER, check_fields, flag, integer, number
from dynamo_megatron.runtime.routes import RouteShape

if TYPE_CHECKING:
    import torch

# What every dense family here has in common: Megatron's parameter name within a layer -> the names within Hugging
# Face's `model.layers.N.` of the tensors that the parameter is made of, in Megatron's order.
DENSE_LAYER = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.weight": (
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
    ),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
}


@dataclass(frozen=True)
class Bridged:
    """Of a model that Megatron-Bridge builds: the folder's tensors, and what a rank learns when it builds its part."""

    shapes: Mapping[str, tuple[int, ...]]
    # Megatron's parameters of the whole model -> the tensors that each is made of; empty before the model is built
    parameters: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelSpec:
    """A decoder: a gated MLP (or experts of it), RMSNorm, RoPE, grouped-query attention."""

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int  # key/value heads
    kv_channels: int  # size of a head
    vocab_size: int  # rows of the embedding in the Hugging Face folder
    max_positions: int  # tokens
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling  # as `read_rope` returns it; empty: plain RoPE
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    wide_qk_norm: bool  # over all heads together, not over each
    pre_norms: bool  # of the input of attention and MLP
    post_norms: bool  # of their output, before it is added to the residual
    layer_names: Mapping[str, tuple[str, ...]] = field(repr=False, hash=False)  # as DENSE_LAYER
    # Tokens that a query of each layer sees, itself included (transformers' sliding_window), 0: all; empty: all zero
    windows: tuple[int, ...] = ()
    local_rope_theta: float | None = None  # unscaled RoPE of the layers with a window; None: the same as of the others
    activation: str = "silu"  # of the MLP's gate, or "gelu_pytorch_tanh"
    zero_centered_norms: bool = False  # a norm multiplies by 1 + its weight
    num_experts: int = 0  # routed experts of every layer; 0: dense
    router_topk: int = 0  # experts a token goes to
    moe_ffn_hidden_size: int = 0  # width of an expert
    norm_topk_prob: bool = False  # the chosen experts' probabilities are made to sum to 1
    attention_scale: float | None = None  # of queries times keys; None: kv_channels ** -0.5
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of the output of attention and MLP, before it is added to the residual
    logit_scale: float = 1.0
    rotary_share: float = 1.0  # of a head's elements, the first ones, that RoPE turns
    rotary_interleaved: bool = False  # it turns neighbours, not an element of each half
    no_rope_layers: tuple[int, ...] = ()  # layers without RoPE
    bridged: Bridged | None = field(default=None, repr=False, hash=False)  # None: a family of ours

    def dimensions(self) -> dict[str, Any]:
        """The fields that determine what the model computes, as plain data that survives JSON."""
        plain = {key: value for key, value in vars(self).items() if key not in ("layer_names", "bridged")}
        lists = {"windows": list(self.windows), "no_rope_layers": list(self.no_rope_layers)}
        return plain | {"rope_scaling": dict(self.rope_scaling), **lists}

    @property
    def window(self) -> int:
        """Of the layers that have one, 0: no layer has one."""
        return max(self.windows, default=0)

    def replayed(self, config: RolloutConfig) -> RouteShape | None:
        """The routes that training takes from the servers; None: none."""
        if not (self.num_experts and config.router_replay and self.bridged is None):
            return None
        return RouteShape(self.num_layers, self.router_topk, self.num_experts)

    def padded_vocab(self, tp: int) -> int:
        """Rows of Megatron's embedding: the smallest multiple of 16 * tp that holds the vocabulary."""
        return -(-self.vocab_size // (16 * tp)) * 16 * tp

    def experts_of(self, ep_rank: int, ep_size: int) -> range:
        """The numbers of the experts that an expert-parallel rank holds; none if the model is dense."""
        here = self.num_experts // ep_size
        return range(ep_rank * here, (ep_rank + 1) * here)

    def check_parallel(self, tp: int, pp: int, *, vpp: int = 1, ep: int = 1) -> None:
        """Raises ValueError if the model cannot be cut into tp tensor shards, pp stages of vpp chunks of equal depth
        and ep shares of the experts (each expert is whole on its rank)."""
        stage = self.num_layers // pp
        cuts = [
            ("tp", tp, self.num_attention_heads, "(attention heads)"),
            ("tp", tp, self.num_query_groups, "(key/value heads)"),
            ("pp", pp, self.num_layers, "layers"),
            ("vpp", vpp, stage, "layers of a stage"),
        ]
        if self.num_experts:
            cuts.append(("ep", ep, self.num_experts, "experts"))
        elif ep > 1:
            raise InputError(f"parallel.ep: {ep}, but a {self.family} model has no experts; use 1")
        else:
            cuts.append(("tp", tp, self.ffn_hidden_size, "(MLP width)"))
        for key, parts, size, what in cuts:
            if size % parts:
                common = math.gcd(*(other for k, _, other, _ in cuts if k == key))
                fitting = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
                raise InputError(f"parallel.{key}: {parts} does not divide the {size} {what}; use one of {fitting}")


def decoder_spec(
    config: Mapping[str, Any],
    family: str,
    layer_names: Mapping[str, tuple[str, ...]],
    architectures: Collection[str],
    fields: Collection[str] = (),
    activation: str = "silu",
    windows: tuple[int, ...] | None = None,
    head_dim: int | None = None,
    rotary_share: float = 1.0,
) -> ModelSpec:
    """The spec of a decoder from config.json's content, as far as dense models and mixtures of experts agree.

    `activation`: the only value of hidden_act. `windows`: the spec's; None: the family has none, nor may config.json.
    `architectures`: the names that config.json's field of this name may have. `fields`: further fields that the family
    reads. `head_dim`: its value if config.json has none; None: hidden size / heads. `rotary_share`: the only
    partial_rotary_factor that config.json may have. Raises ValueError naming the field that is missing, malformed or
    unknown, or that GPTModel would ignore.
    """
    check_fields(config, DECODER.union(fields), architectures)
    if flag(config, "attention_bias"):
        raise InputError("attention_bias: true is not supported")
    heads = integer(config, "num_attention_heads")
    # Required for a Qwen: without it transformers would take 32 or 4.
    groups = integer(config, "num_key_value_heads", heads if family in ("llama", "granite") else None)
    hidden = integer(config, "hidden_size")
    layers = integer(config, "num_hidden_layers")
    if heads % groups:
        raise InputError(f"num_key_value_heads: {groups} does not divide num_attention_heads {heads}")
    if config.get("head_dim") is None and head_dim is None and hidden % heads:
        raise InputError(
            f"num_attention_heads: {heads} does not divide hidden_size {hidden}, and head_dim is not given"
        )
    if config.get("hidden_act", activation) != activation:
        raise InputError(f"hidden_act: {config['hidden_act']!r} is not supported, only {activation!r}")
    if config.get("quantization_config") is not None:
        raise InputError("quantization_config: a quantised checkpoint cannot be trained; give the bf16 or fp32 one")
    if windows is None and (config.get("sliding_window") is not None or any(read_windows(config))):
        raise InputError(f"sliding_window: not supported in a {family} model; attention is over all tokens before")
    max_positions = integer(config, "max_position_embeddings")
    rope_theta, rope_scaling = read_rope(config, max_positions, rotary_share)
    return ModelSpec(
        family=family,
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=integer(config, "intermediate_size"),
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=integer(config, "head_dim", head_dim or hidden // heads),
        vocab_size=integer(config, "vocab_size"),
        max_positions=max_positions,
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tied=flag(config, "tie_word_embeddings"),
        windows=windows or (),
        activation=activation,
        qkv_bias="self_attention.linear_qkv.bias" in layer_names,
        qk_norm=any(name.startswith("self_attention.q_layernorm") for name in layer_names),
        wide_qk_norm="self_attention.q_layernorm.scales" in layer_names,
        pre_norms="input_layernorm.weight" in layer_names,
        post_norms="self_attn_bda.norm.weight" in layer_names,
        layer_names=layer_names,
        rotary_share=rotary_share,
    )


def read_windows(config: Mapping[str, Any], types: Sequence[str] = ()) -> tuple[int, ...]:
    """The spec's `windows`. `types`: of the layers if config.json has no layer_types, as that list has them. Raises
    ValueError."""
    given = types if config.get("layer_types") is None else config["layer_types"]
    kinds = {"full_attention": 0, "sliding_attention": 1}
    if not isinstance(given, list | tuple) or any(kind not in kinds for kind in given):
        raise InputError(f"layer_types: {given!r} is not a list of {' and '.join(kinds)}")
    if "sliding_attention" not in given:
        return ()
    if len(given) != integer(config, "num_hidden_layers"):
        raise InputError(f"layer_types: {len(given)} for {config['num_hidden_layers']} layers")
    return tuple(integer(config, "sliding_window") * kinds[kind] for kind in given)


def scaled_frequencies(spec: ModelSpec) -> tuple[torch.Tensor, float]:
    """(inverse frequencies [kv_channels / 2] float32, factor of cos and sin) of a model with a RoPE scaling.

    Both are transformers' own: linear interpolation, Llama 3's, YaRN (arXiv 2309.00071).
    """
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = dict(spec.rope_scaling)
    extended = parameters.get("original_max_position_embeddings", spec.max_positions) * parameters["factor"]
    config = LlamaConfig(
        hidden_size=spec.kv_channels,
        num_attention_heads=1,
        head_dim=spec.kv_channels,
        max_position_embeddings=math.ceil(extended),
        rope_theta=spec.rope_theta,
        rope_scaling=parameters,
    )
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))


# rope_type -> its parameters besides rope_theta
PARAMETERS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate", "attention_factor",
        "mscale", "mscale_all_dim",
    ),
}  # fmt: skip
COMMON = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
NULLABLE = {"attention_factor", "mscale", "mscale_all_dim"}  # null is as good as missing, for SGLang too

RopeScaling = tuple[tuple[str, Any], ...]


def read_rope(config: Mapping[str, Any], max_positions: int, share: float = 1.0) -> tuple[float, RopeScaling]:
    """Returns (theta, parameters of the scaling as (name, value) pairs: rope_type first, none for plain RoPE).

    transformers 5 writes `rope_parameters`, older versions `rope_theta` beside `rope_scaling`. Raises ValueError naming
    the field that is malformed, not supported, or read differently by versions of transformers or by SGLang: both sets
    if they differ, `mscale` 0, null except for NULLABLE. `share`: the only partial_rotary_factor that it may have.
    """
    given: dict[str, Mapping[str, Any]] = {k: config[k] for k in ("rope_scaling", "rope_parameters") if config.get(k)}
    for key, part in given.items():
        if not isinstance(part, dict) or any(isinstance(value, dict) for value in part.values()):
            raise InputError(f"{key}: {part!r} is not one set of RoPE parameters for all layers")
    if len(given) == 2 and given["rope_scaling"] != given["rope_parameters"]:
        raise InputError(
            "rope_scaling: contradicts rope_parameters, and versions of transformers differ in which of them they "
            "read; keep rope_parameters alone and add rope_scaling's keys to it"
        )
    none: tuple[str, Mapping[str, Any]] = ("rope_parameters", {})
    where, part = next(iter(given.items()), none)
    theta = number({"rope_theta": part.get("rope_theta", config.get("rope_theta", 10000.0))}, "rope_theta")
    if theta <= 1:
        raise InputError(f"rope_theta: {theta!r} is not above 1")
    if config.get("rope_theta") not in (None, theta):
        raise InputError(
            f"rope_theta: {config['rope_theta']!r} contradicts the {theta!r} in {where}, which transformers reads; "
            "remove one of them"
        )
    for holder in (config, part):
        if (factor := holder.get("partial_rotary_factor")) not in (None, share):
            raise InputError(f"partial_rotary_factor: {factor!r} is not supported, only {share}")
    kind = part.get("rope_type", part.get("type", "default"))
    if part.get("type", kind) != kind:
        raise InputError(f"{where}: type {part['type']!r} contradicts rope_type {kind!r}; remove one of them")
    if not isinstance(kind, str) or kind not in PARAMETERS:
        raise InputError(f"rope_type: {kind!r} is not supported; supported are {', '.join(PARAMETERS)}")
    for key in part:
        if key not in COMMON and key not in PARAMETERS[kind]:
            raise InputError(
                f"{key}: not a parameter of rope_type {kind!r} in {where}, which has "
                f"{', '.join(PARAMETERS[kind]) or 'none besides rope_theta'}; remove it if it has no effect"
            )
        if part[key] is None and key not in NULLABLE:
            raise InputError(f"{key}: null in {where}; remove it or give a value")
    return theta, _scaling(kind, part, max_positions)


def _scaling(kind: str, part: Mapping[str, Any], max_positions: int) -> RopeScaling:
    if kind == "default":
        return ()
    found: dict[str, Any] = {"rope_type": kind, "factor": number(part, "factor")}
    if found["factor"] < 1:
        raise InputError(f"factor: {part['factor']!r} of rope_type {kind!r} is below 1")
    if kind == "linear":
        return tuple(found.items())
    yarn = kind == "yarn"
    found["original_max_position_embeddings"] = integer(part, "original_max_position_embeddings", max_positions)
    low, high = ("beta_slow", "beta_fast") if yarn else ("low_freq_factor", "high_freq_factor")
    found[low] = number(part, low, 1.0 if yarn else None)
    found[high] = number(part, high, 32.0 if yarn else None)
    if found[high] <= found[low]:
        raise InputError(f"{high}: {found[high]!r} is not above {low} {found[low]!r}")
    if yarn:
        found["truncate"] = flag({"truncate": True, **part}, "truncate")
        scales = {key: number(part, key) for key in ("mscale", "mscale_all_dim") if part.get(key) is not None}
        implied = 0.1 * math.log(found["factor"]) + 1
        if len(scales) == 2:  # one alone has no effect
            found |= scales
            above, below = (0.1 * scale * math.log(found["factor"]) + 1 for scale in scales.values())
            implied = above / below
        if part.get("attention_factor") is not None:
            factor = number(part, "attention_factor")
            if not math.isclose(factor, implied, rel_tol=1e-6):  # left out if the others imply its value
                found["attention_factor"] = factor
    return tuple(found.items())
