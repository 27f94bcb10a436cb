"""The policy network: Megatron's GPTModel from a Hugging Face config, one packed forward path for every layout.

`PolicyModel` is one chunk of the network: a stage of the pipeline or, with interleaved stages, a part of one.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from dynamo_megatron.config import Config, ParallelConfig
from dynamo_megatron.kernels import layers
from dynamo_megatron.models import ModelSpec
from dynamo_megatron.models.mapping import is_expert
from dynamo_megatron.models.spec import scaled_frequencies
from dynamo_megatron.policy.attention import PackedAttention, SegmentPlan, Segments
from dynamo_megatron.policy.backend import Fusions, layer_calls, use_layer_functions
from dynamo_megatron.policy.batch import MicroBatch
from dynamo_megatron.policy.layout import Layout
from dynamo_megatron.policy.lora import Adapter, sharded_adapters
from dynamo_megatron.policy.norms import ResidualAdd, RMSNorm, WideNorm
from dynamo_megatron.policy.routing import Routing


class PackedRotary(torch.nn.Module):
    """In place of GPTModel's RotaryEmbedding, which computes the angles of as many positions as the first method says:
    the table of a micro-batch's own positions comes with it, once for all layers. `local`, if layers with a window have
    RoPE of their own: the factor of the others' table, and their inverse frequencies."""

    def __init__(self, inv_freq: torch.Tensor, local: tuple[float, torch.Tensor] | None):
        super().__init__()
        self.inv_freq, self.local = inv_freq, local

    def get_rotary_seq_len(self, context, decoder, decoder_input, config, packed_seq_params: Segments) -> torch.Tensor:
        return packed_seq_params.rotary

    def forward(self, table: torch.Tensor, **_) -> torch.Tensor:
        return table


class LocalRotaryAttention(SelfAttention):
    """Megatron's, for a model whose layers with a window have RoPE of their own."""

    def forward(self, *args, rotary_pos_emb=None, packed_seq_params: Segments, **kwargs):
        if self.core_attention.window[0] >= 0:
            rotary_pos_emb = packed_seq_params.local_rotary
        return super().forward(*args, rotary_pos_emb=rotary_pos_emb, packed_seq_params=packed_seq_params, **kwargs)


class PolicyModel(GPTModel):
    """GPTModel whose last stage returns hidden states [t, h], complete on every tensor-parallel rank.

    The policy head (`dynamo_megatron.kernels`) takes them with `head_weight`. The head's gradient of the hidden states
    is already summed over the tensor-parallel ranks, so nothing is reduced in the backward pass.
    """

    logit_scale = 1.0

    def _postprocess(self, hidden_states, **kwargs):
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            hidden_states = tensor_parallel.gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        hidden_states = hidden_states.squeeze(1)
        return hidden_states if self.logit_scale == 1.0 else hidden_states * self.logit_scale

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None) -> dict:
        """With `model.lora`, of the adapters alone."""
        return sharded_adapters(self, metadata) or super().sharded_state_dict(prefix, sharded_offsets, metadata)

    @property
    def adapters(self) -> dict[str, Adapter]:
        """By the name of the weight that each changes."""
        found = self.named_modules()
        return {f"{n.removesuffix('.adapter')}.weight": module for n, module in found if isinstance(module, Adapter)}

    @property
    def layer_offset(self) -> int:
        """The number, in the whole model, of the first layer of this chunk."""
        return get_transformer_layer_offset(self.config, vp_stage=self.vp_stage)

    @property
    def head_weight(self) -> torch.Tensor:
        """[padded vocab / tp, h]"""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def forward_packed(self, micro_batch: MicroBatch, routing: Routing | None = None) -> torch.Tensor:
        """`routing`: of a mixture of experts whose routes are counted, and replayed where they are known."""
        # Every position belongs to a segment, padding too, so the padded bounds are the same. If they were not passed,
        # TransformerEngine would compare the two on the host, in every layer.
        padded = micro_batch.cu_seqlens if self.config.context_parallel_size > 1 else None
        longest, cp, plan = int(micro_batch.lengths.max()), self.pg_collection.cp, None
        attentions = (getattr(layer.self_attention, "core_attention", None) for layer in self.decoder.layers)
        if any(isinstance(attention, PackedAttention) and not attention.at_once for attention in attentions):
            window = self.config.window_size[0] + 1 if self.config.window_size else 0
            plan = SegmentPlan.of(micro_batch.lengths, cp.rank(), cp.size(), micro_batch.tokens.device, window)
        rotary = local_rotary = None
        if isinstance(getattr(self, "rotary_pos_emb", None), PackedRotary):
            rotary = layers.rotary_table(micro_batch.positions[0], self.rotary_pos_emb.inv_freq)
            if self.rotary_pos_emb.local is not None:
                factor, frequencies = self.rotary_pos_emb.local
                rotary, local_rotary = factor * rotary, layers.rotary_table(micro_batch.positions[0], frequencies)
        packed = Segments(
            qkv_format="thd",
            cu_seqlens_q=micro_batch.cu_seqlens,
            cu_seqlens_kv=micro_batch.cu_seqlens,
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            local_rotary=local_rotary,
            plan=plan,
            rotary=rotary,
            routing=routing,
        )
        with layer_calls():
            return self(micro_batch.tokens, micro_batch.positions, None, packed_seq_params=packed)


def run_settings(p: ParallelConfig, dtype: torch.dtype, recompute: str = "none") -> dict[str, Any]:
    """TransformerConfig's arguments that are the same for all models: layout, dtype, `trainer.recompute`."""
    cuda = torch.cuda.is_available()
    return {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": p.tp,
        "pipeline_model_parallel_size": p.pp,
        "virtual_pipeline_model_parallel_size": p.vpp if p.vpp > 1 else None,
        "num_layers_in_last_pipeline_stage": p.last_stage_layers,
        "context_parallel_size": p.cp,
        "expert_model_parallel_size": p.ep,
        "sequence_parallel": p.cuts_sequences,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "calculate_per_token_loss": True,
        "variable_seq_lengths": True,
        "recompute_granularity": None if recompute == "none" else recompute,
        "recompute_method": "uniform" if recompute == "full" else None,
        "recompute_num_layers": 1 if recompute == "full" else None,
        "use_cpu_initialization": not cuda,
        # No random initialisation, yet Megatron's initialiser must run: it marks the tensor-parallel parameters.
        **dict.fromkeys(("init_method", "output_layer_init_method", "embedding_init_method"), lambda weight: weight),
        # The interleaved schedule overlaps its sends with compute, which excludes batching them.
        "overlap_p2p_comm": p.vpp > 1,
        "batch_p2p_comm": cuda and p.vpp == 1,
        "batch_p2p_sync": cuda,
        # gloo's isend reads a buffer that would be freed, unless stages exchange shapes before (variable_seq_lengths).
        "deallocate_pipeline_outputs": cuda,
    }


def transformer_config(spec: ModelSpec, config: Config) -> TransformerConfig:
    """Megatron's config for a model under the configured layout."""
    dtype = getattr(torch, config.model.dtype)
    return TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.ffn_hidden_size,
        num_attention_heads=spec.num_attention_heads,
        num_query_groups=spec.num_query_groups,
        kv_channels=spec.kv_channels,
        layernorm_epsilon=spec.norm_eps,
        add_qkv_bias=spec.qkv_bias,
        qk_layernorm=spec.qk_norm,
        normalization="RMSNorm",
        layernorm_zero_centered_gamma=spec.zero_centered_norms,
        gated_linear_unit=True,
        activation_func=F.silu if spec.activation == "silu" else F.gelu,
        window_size=(spec.window - 1, 0) if spec.window else None,
        window_attn_skip_freq=[int(window > 0) for window in spec.windows] or None,
        add_bias_linear=False,
        softmax_scale=rotation(spec)[1],
        rotary_interleaved=spec.rotary_interleaved,
        no_rope_freq=[int(layer in spec.no_rope_layers) for layer in range(spec.num_layers)],
        bias_activation_fusion=True,  # SwiGLU, GeGLU
        # TransformerEngine's linears have a switch of their own (`_set_up_transformer_engine`).
        gradient_accumulation_fusion=not _uses_transformer_engine(spec, config),
        apply_rope_fusion=_uses_transformer_engine(spec, config),
        deterministic_mode=config.trainer.deterministic and torch.cuda.is_available(),
        **run_settings(config.parallel, dtype, config.trainer.recompute),
        **_experts(spec, config),
    )


def rotation(spec: ModelSpec) -> tuple[torch.Tensor | None, float | None]:
    """(inverse frequencies [kv_channels / 2] float32, softmax scale) with which the model is built. None: Megatron's
    own value is right (plain RoPE, kv_channels ** -0.5). YaRN multiplies both q and k by a factor, here in the scale.
    What RoPE leaves as it is has the frequency 0.
    """
    if spec.rotary_share < 1:
        turned = int(spec.kv_channels * spec.rotary_share)
        frequencies = 1.0 / spec.rope_theta ** (torch.arange(0, turned, 2, device="cpu").float() / turned)
        return F.pad(frequencies, (0, (spec.kv_channels - turned) // 2)), spec.attention_scale
    if not spec.rope_scaling:
        return None, spec.attention_scale
    frequencies, factor = scaled_frequencies(spec)
    scale = spec.attention_scale or spec.kv_channels**-0.5
    plain = factor == 1.0 or spec.local_rope_theta is not None  # if it is not of all layers, it is in their table
    return frequencies, spec.attention_scale if plain else factor**2 * scale


def local_rotation(spec: ModelSpec) -> tuple[float, torch.Tensor] | None:
    """PackedRotary's `local`."""
    if spec.local_rope_theta is None:
        return None
    factor = scaled_frequencies(spec)[1] if spec.rope_scaling else 1.0
    return factor, spec.local_rope_theta ** -(torch.arange(0, spec.kv_channels, 2) / spec.kv_channels)


# TransformerConfig's arguments for every mixture of experts. No token is dropped, and no expert is cut.
EXPERT_SETTINGS = {
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_dtype": "fp32",
    # An auxiliary loss's gradient would not be scaled as the policy loss is, by weights over the mini-batch.
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "expert_tensor_parallel_size": 1,
}


def _experts(spec: ModelSpec, config: Config) -> dict:
    """TransformerConfig's arguments for a mixture of experts."""
    if not spec.num_experts:
        return {"moe_token_dispatcher_type": "alltoall"}  # required with variable lengths
    return EXPERT_SETTINGS | {
        "num_moe_experts": spec.num_experts,
        "moe_ffn_hidden_size": spec.moe_ffn_hidden_size,
        "moe_router_topk": spec.router_topk,
        "moe_router_pre_softmax": not spec.norm_topk_prob,
        "moe_grouped_gemm": _uses_transformer_engine(spec, config),
        "moe_permute_fusion": _uses_transformer_engine(spec, config),
    }


def _uses_transformer_engine(spec: ModelSpec, config: Config) -> bool:
    """Adapters are beside Megatron's own linears. TransformerEngine's linears begin with a norm, its RoPE is one for
    all layers, and Megatron does not tell it of interleaved pairs in packed sequences."""
    ours = config.model.lora is not None or not spec.pre_norms or spec.zero_centered_norms
    ours = ours or spec.local_rope_theta is not None or spec.rotary_interleaved
    return Fusions.detect().norm == "transformer-engine" and not ours


def _layer_spec(spec: ModelSpec, config: Config, megatron: TransformerConfig) -> tuple[ModuleSpec, type]:
    """The layer and the last norm: TransformerEngine's modules on a GPU that has them, else Megatron's own."""
    experts = spec.num_experts or None
    if _uses_transformer_engine(spec, config):
        from megatron.core.extensions.transformer_engine import TENorm as norm

        layer = get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts, moe_grouped_gemm=experts is not None, qk_layernorm=spec.qk_norm
        )
        # TransformerEngine's attention of packed sequences supports 16-bit types alone, and a window not with every way
        # of context parallelism.
        split_window = spec.window > 0 and config.parallel.cp > 1
        if split_window or megatron.params_dtype == torch.float32 or Fusions.detect().attention == "torch":
            layer.submodules.self_attention.submodules.core_attention = PackedAttention
    else:
        layer, norm = get_gpt_layer_local_spec(num_experts=experts, normalization="RMSNorm"), RMSNorm
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm if spec.pre_norms else IdentityOp
        if experts is not None:  # no linear to fuse this norm into: a checkpoint has it under its own name, as on a GPU
            del parts.sharded_state_dict_keys_map["pre_mlp_layernorm."]
        if spec.local_rope_theta is not None:
            parts.self_attention.module = LocalRotaryAttention
        attention = parts.self_attention.submodules
        attention.core_attention = PackedAttention
        if spec.wide_qk_norm:
            heads = (spec.num_attention_heads, spec.num_query_groups)
            tp = config.parallel.tp
            attention.q_layernorm, attention.k_layernorm = (ModuleSpec(WideNorm, {"heads": n // tp}) for n in heads)
        elif spec.qk_norm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    add = ModuleSpec(ResidualAdd, {"config": megatron, "norm": spec.post_norms, "scale": spec.residual_scale})
    layer.submodules.self_attn_bda = layer.submodules.mlp_bda = add
    return layer, norm


def _set_up_transformer_engine(chunks: list[PolicyModel]) -> None:
    """Its linears add their weight gradients to main_grad inside the GEMM, without Apex. Its attention, which has no
    dropout here, saves and restores no random state in each layer."""
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True
                # Else a first micro-batch, by Megatron's count, would overwrite main_grad, which DDP sets to zero.
                module.disable_parameter_transpose_cache = True
            if hasattr(module, "attention_dropout_ctx"):
                module.attention_dropout_ctx = contextlib.nullcontext


def _on_one_rank(linear: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, None]:
    """`forward` of a linear that is not cut over tensor-parallel ranks."""
    adapter = linear._modules.get("adapter")
    low_rank = (adapter.a, adapter.b, adapter.scale) if adapter is not None and adapter.on else None
    return layers.linear(x, linear.weight, linear.bias, low_rank), None


def build_chunks(spec: ModelSpec, config: Config, layout: Layout) -> list[PolicyModel]:
    """This rank's shard of its pipeline stage, with parameters not loaded yet: one chunk, or `parallel.vpp` of them."""
    if not hasattr(moe_utils, "te_general_gemm"):  # megatron-core 0.16.1 without TransformerEngine: all routers read it
        moe_utils.te_general_gemm = None
    megatron, count = transformer_config(spec, config), config.parallel.vpp
    use_layer_functions(megatron.params_dtype, transformer_engine=_uses_transformer_engine(spec, config))
    layer, norm = _layer_spec(spec, config, megatron)
    chunks = [
        PolicyModel(
            megatron,
            TransformerBlockSubmodules(
                layer_specs=[layer] * get_num_layers_to_build(megatron, vp_stage=chunk if count > 1 else None),
                layer_norm=norm,
            ),
            pre_process=layout.is_first_stage and chunk == 0,
            post_process=layout.is_last_stage and chunk == count - 1,
            vp_stage=chunk if count > 1 else None,
            vocab_size=spec.padded_vocab(config.parallel.tp),
            max_sequence_length=spec.max_positions,
            share_embeddings_and_output_weights=spec.tied,
            position_embedding_type="rope",
            rotary_base=spec.rope_theta,
        ).to(layout.device)
        for chunk in range(count)
    ]
    if _uses_transformer_engine(spec, config):
        _set_up_transformer_engine(chunks)
    megatron.qk_layernorm = spec.qk_norm and not spec.wide_qk_norm  # whether gradients of these norms are summed
    for chunk in chunks:
        chunk.logit_scale = spec.logit_scale
        if chunk.pre_process and spec.embedding_scale != 1.0:
            chunk.embedding.register_forward_hook(lambda _, __, output: output * spec.embedding_scale)
        for module in chunk.modules():
            if isinstance(module, WideNorm):
                module.group = layout.tp
            elif isinstance(module, ColumnParallelLinear | RowParallelLinear) and module.tp_group.size() == 1:
                module.forward = functools.partial(_on_one_rank, module)
        if (frequencies := rotation(spec)[0]) is not None:  # Megatron has some scalings, with constants of its own
            chunk.rotary_pos_emb.inv_freq = frequencies
        if not _uses_transformer_engine(spec, config):
            if (local := local_rotation(spec)) is not None:
                local = local[0], local[1].to(layout.device)
            chunk.rotary_pos_emb = PackedRotary(chunk.rotary_pos_emb.inv_freq.to(layout.device), local)
        for name, parameter in chunk.named_parameters():
            if is_expert(name):
                # Every rank that holds an expert holds it whole and sees tokens of its own, so the gradient must be
                # reduced over all of these ranks. With ep 1 Megatron would treat the expert as a dense parameter and
                # leave out the tensor-parallel ranks.
                parameter.allreduce = False
    return chunks
