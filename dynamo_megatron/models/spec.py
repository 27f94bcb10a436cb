"""What Megatron needs to know about a model, and how a Hugging Face config.json has its RoPE."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dynamo_megatron.config import ParallelConfig
from dynamo_megatron.config.rollout import RolloutConfig
from dynamo_megatron.errors import InputError
from dynamo_megatron.models.config_fields import flag, integer, number
from dynamo_megatron.runtime.routes import RouteShape

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Bridged:
    """Of a model that Megatron-Bridge builds: the folder's tensors, and what a rank learns when it builds its part."""

    shapes: Mapping[str, tuple[int, ...]]
    # Megatron's parameters of the whole model -> the tensors that each is made of; empty before the model is built
    parameters: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Served:
    """What SGLang 0.5.23 does with a model, as far as families differ."""

    fused: bool = True  # False: it has no such family and runs transformers' modules, where nothing is fused
    windows: bool = False  # it applies them; False: it ignores them
    whole_embedding: bool = False  # every rank has all of it, without padding, and it is the head too
    head_dim: bool = True  # it reads config.json's; False: a head has hidden_size / num_attention_heads elements


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
    tied: bool
    rope_scaling: RopeScaling = ()  # as `read_rope` returns it; empty: plain RoPE
    qkv_bias: bool = False
    qk_norm: bool = False
    wide_qk_norm: bool = False  # over all heads together, not over each
    pre_norms: bool = True  # of the input of attention and MLP
    post_norms: bool = False  # of their output, before it is added to the residual
    layer_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict, repr=False, hash=False)  # as DENSE_LAYER
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
    served: Served = Served()
    bridged: Bridged | None = field(default=None, repr=False, hash=False)  # None: a family of ours

    def dimensions(self) -> dict[str, Any]:
        """The fields that determine what the model computes, as plain data that survives JSON."""
        plain = {key: value for key, value in vars(self).items() if key not in ("layer_names", "served", "bridged")}
        lists = {"windows": list(self.windows), "no_rope_layers": list(self.no_rope_layers)}
        return plain | {"rope_scaling": dict(self.rope_scaling), **lists}

    @property
    def window(self) -> int:
        """Of the layers that have one, 0: no layer has one."""
        return max(self.windows, default=0)

    def replayed(self, config: RolloutConfig) -> RouteShape | None:
        """The routes that training takes from the servers; None: none."""
        if not (self.num_experts and config.router_replay):
            return None
        return RouteShape(self.num_layers, self.router_topk, self.num_experts)

    def padded_vocab(self, tp: int) -> int:
        """Rows of Megatron's embedding: the smallest multiple of 16 * tp that holds the vocabulary."""
        return -(-self.vocab_size // (16 * tp)) * 16 * tp

    def experts_of(self, ep_rank: int, ep_size: int) -> range:
        """The numbers of the experts that an expert-parallel rank holds; none if the model is dense."""
        here = self.num_experts // ep_size
        return range(ep_rank * here, (ep_rank + 1) * here)

    def last_stages(self, pp: int, vpp: int = 1) -> list[int]:
        """The numbers of layers that the last of pp stages can have while the others have equal ones, all of them in
        vpp equal chunks; next to an equal share first."""
        step = (pp - 1) * vpp
        fits = [n for n in range(vpp, self.num_layers, vpp) if pp > 1 and (self.num_layers - n) % step == 0]
        return sorted(fits, key=lambda n: abs(n * pp - self.num_layers))

    def check_parallel(self, p: ParallelConfig) -> None:
        """Raises ValueError if the model cannot be cut into tp tensor shards, pp stages of vpp chunks and ep shares of
        the experts (each expert is whole on its rank)."""
        cuts = [
            ("tp", p.tp, self.num_attention_heads, "(attention heads)"),
            ("tp", p.tp, self.num_query_groups, "(key/value heads)"),
        ]
        fits = self.last_stages(p.pp, p.vpp)
        if p.last_stage_layers is None or not fits:
            cuts.append(("pp", p.pp, self.num_layers, "layers"))
        elif p.last_stage_layers not in fits:
            raise InputError(
                f"parallel.last_stage_layers: {p.last_stage_layers} leaves {self.num_layers - p.last_stage_layers} of "
                f"{self.num_layers} layers for {p.pp - 1} equal stages of {p.vpp} equal chunks; use one of "
                f"{', '.join(map(str, sorted(fits[:3])))}"
            )
        cuts += [("vpp", p.vpp, layers, "layers of a stage") for layers in p.stage_layers(self.num_layers)]
        if self.num_experts:
            cuts.append(("ep", p.ep, self.num_experts, "experts"))
        elif p.ep > 1:
            raise InputError(f"parallel.ep: {p.ep}, but a {self.family} model has no experts; use 1")
        else:
            cuts.append(("tp", p.tp, self.ffn_hidden_size, "(MLP width)"))
        for key, parts, size, what in cuts:
            if size % parts:
                common = math.gcd(*(other for k, _, other, _ in cuts if k == key))
                fitting = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
                other = f", or parallel.last_stage_layers={fits[0]}" if key == "pp" and fits else ""
                raise InputError(
                    f"parallel.{key}: {parts} does not divide the {size} {what}; use one of {fitting}{other}"
                )


def scaled_frequencies(spec: ModelSpec) -> tuple[torch.Tensor, float]:
    """(inverse frequencies [kv_channels / 2] float32, factor of cos and sin) of a model with a RoPE scaling.

    Both are transformers' own: linear interpolation, llama3, YaRN (arXiv 2309.00071).
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
ROPE_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate", "attention_factor"),
}
COMMON = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
NULLABLE = {"attention_factor"}  # null is as good as missing, for SGLang too

RopeScaling = tuple[tuple[str, Any], ...]


def read_rope(
    config: Mapping[str, Any], theta: float | None, kinds: Collection[str], share: float
) -> tuple[float, RopeScaling]:
    """Returns (theta, parameters of the scaling as (name, value) pairs: rope_type first, none for plain RoPE).

    transformers 5 writes `rope_parameters`, older versions `rope_theta` beside `rope_scaling`. Raises ValueError naming
    the field that is malformed, not supported, or read differently by versions of transformers or by SGLang: both sets
    if they differ, null except for NULLABLE. `theta`: if none is given. `kinds`, `share`: the values that
    rope_type and partial_rotary_factor may have.
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
    theta = number({"rope_theta": part.get("rope_theta", config.get("rope_theta", theta))}, "rope_theta")
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
    if kind not in kinds:
        raise InputError(f"rope_type: {kind!r} is not supported; supported are {', '.join(kinds)}")
    for key in part:
        if key not in COMMON and key not in ROPE_PARAMETERS[kind]:
            raise InputError(
                f"{key}: not a parameter of rope_type {kind!r} in {where}, which has "
                f"{', '.join(ROPE_PARAMETERS[kind]) or 'none besides rope_theta'}; remove it if it has no effect"
            )
        if part[key] is None and key not in NULLABLE:
            raise InputError(f"{key}: null in {where}; remove it or give a value")
    return theta, _scaling(kind, part, config)


def _scaling(kind: str, part: Mapping[str, Any], config: Mapping[str, Any]) -> RopeScaling:
    if kind == "default":
        return ()
    found: dict[str, Any] = {"rope_type": kind, "factor": number(part, "factor")}
    if found["factor"] < 1:
        raise InputError(f"factor: {part['factor']!r} of rope_type {kind!r} is below 1")
    if kind == "linear":
        return tuple(found.items())
    yarn = kind == "yarn"
    longest = integer(config, "max_position_embeddings")
    found["original_max_position_embeddings"] = integer(part, "original_max_position_embeddings", longest)
    low, high = ("beta_slow", "beta_fast") if yarn else ("low_freq_factor", "high_freq_factor")
    found[low] = number(part, low, 1.0 if yarn else None)
    found[high] = number(part, high, 32.0 if yarn else None)
    if found[high] <= found[low]:
        raise InputError(f"{high}: {found[high]!r} is not above {low} {found[low]!r}")
    if yarn:
        found["truncate"] = flag({"truncate": True, **part}, "truncate")
        implied = 0.1 * math.log(found["factor"]) + 1
        given = number(part, "attention_factor", implied)
        if not math.isclose(given, implied, rel_tol=1e-6):
            raise InputError(
                f"attention_factor: {given!r} is not the {implied:.6g} that factor implies, and SGLang ignores it; "
                "remove it to have that one"
            )
    return tuple(found.items())
