"""A stand-in for TransformerEngine in plain torch, so that the layers that Megatron builds on a GPU run on a CPU.

It has the modules that a dense GPTModel takes, with TransformerEngine's interfaces: weights of `tp_size` shards, packed
sequences, weight gradients added to main_grad, an Adam whose state begins with its first step. `calls` counts what the
layers have used.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch
import torch.nn.functional as F

VERSION = "2.11.0"
calls: Counter[str] = Counter()


class _LinearFunction(torch.autograd.Function):
    """y = x w^T. With `fuse` the weight's gradient is added to main_grad, or takes its place with `overwrite`. What is
    returned for it is memory that nothing was written to, unless `zero_out_wgrad` asks for zeros: NaN, here."""

    @staticmethod
    def forward(ctx, x, weight, fuse, overwrite):
        ctx.save_for_backward(x, weight)
        ctx.fuse, ctx.overwrite = fuse, overwrite
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, upstream):
        x, weight = ctx.saved_tensors
        flat, rows = upstream.flatten(0, -2), x.flatten(0, -2)
        if not ctx.fuse:
            return upstream @ weight, flat.T @ rows, None, None
        calls["wgrad into main_grad"] += 1
        if ctx.overwrite:
            weight.main_grad.zero_()
        weight.main_grad += flat.T @ rows
        weight.grad_added_to_main_grad = True
        unused = 0.0 if getattr(weight, "zero_out_wgrad", False) else math.nan
        return upstream @ weight, torch.full_like(weight, unused), None, None


class _Module(torch.nn.Module):
    def set_tensor_parallel_group(self, group) -> None: ...

    def get_extra_state(self):
        return None

    def set_extra_state(self, state) -> None: ...


class Linear(_Module):
    def __init__(self, in_features, out_features, *, parallel_mode, tp_size, bias, params_dtype, device, **options):
        super().__init__()
        assert tp_size == 1, "this stand-in has one tensor-parallel rank"
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.parallel_mode, self.fuse_wgrad_accumulation = parallel_mode, options["fuse_wgrad_accumulation"]
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))
        self.weight.tensor_model_parallel = parallel_mode is not None
        self.bias = torch.nn.Parameter(torch.empty(out_features, dtype=params_dtype, device=device)) if bias else None

    def forward(self, x, is_first_microbatch=None):
        calls["linear"] += 1
        fuse = self.fuse_wgrad_accumulation and torch.is_grad_enabled()
        y = _LinearFunction.apply(x, self.weight, fuse, bool(is_first_microbatch))
        return y if self.bias is None else y + self.bias


class RMSNorm(_Module):
    def __init__(self, hidden_size, eps, sequence_parallel, params_dtype, device, **options):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=params_dtype, device=device))
        self.weight.sequence_parallel = sequence_parallel

    def forward(self, x):
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


class LayerNormLinear(Linear):
    def __init__(self, in_features, out_features, *, eps, normalization, **options):
        assert normalization == "RMSNorm"
        super().__init__(in_features, out_features, **options)
        self.eps = eps
        made = {"dtype": options["params_dtype"], "device": options["device"]}
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features, **made))
        self.layer_norm_weight.sequence_parallel = options["sequence_parallel"]

    def forward(self, x, is_first_microbatch=None):
        normed = F.rms_norm(x.float(), (x.shape[-1],), self.layer_norm_weight.float(), self.eps).to(x.dtype)
        return super().forward(normed, is_first_microbatch)


class GroupedLinear(_Module): ...


class DotProductAttention(_Module):
    """Causal attention within each packed sequence."""

    def __init__(self, num_attention_heads, kv_channels, softmax_scale=None, **options):
        super().__init__()
        self.scale = softmax_scale or 1 / math.sqrt(kv_channels)

    def forward(self, query, key, value, attention_mask, *, qkv_format, cu_seqlens_q, cu_seqlens_q_padded=None, **_):
        assert qkv_format == "thd" and query.dtype is torch.bfloat16, "TransformerEngine's packed attention has 16 bits"
        calls["attention"] += 1
        if cu_seqlens_q_padded is not None:  # as TransformerEngine looks for padding between sequences
            calls["host waits for torch.equal"] += not torch.equal(cu_seqlens_q_padded[:-1], cu_seqlens_q[:-1]) or 1
        places = torch.arange(len(query), device=query.device)
        number = torch.bucketize(places, cu_seqlens_q[1:], right=True)
        allowed = (number[:, None] == number) & (places[:, None] >= places)
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        attended = F.scaled_dot_product_attention(q, k, v, allowed, scale=self.scale, enable_gqa=True)
        return attended[0].transpose(0, 1).flatten(1)


def apply_rotary_pos_emb(t, freqs, tensor_format="sbhd", *, fused, cu_seqlens, cp_size=1, cp_rank=0, **_):
    """float32 sines and cosines, one rounding, as in TransformerEngine's kernel."""
    assert tensor_format == "thd" and fused and cp_size == 1
    calls["fused RoPE"] += 1
    starts = cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff(), output_size=len(t))
    angles = freqs[torch.arange(len(t), device=t.device) - starts][:, 0].float()
    first, second = t.float().chunk(2, -1)
    return (t.float() * angles.cos() + torch.cat([-second, first], -1) * angles.sin()).to(t.dtype)


class FusedAdam(torch.optim.Optimizer):
    """AdamW; a parameter has its moments, and a group its step, from the first step on."""

    def __init__(self, params, lr, betas, eps, weight_decay, adam_w_mode=True, **_):
        assert adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            (beta1, beta2), step = group["betas"], group["step"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                state["exp_avg"].lerp_(p.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                scale = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
                p.addcdiv_(state["exp_avg"], scale, value=-group["lr"] / (1 - beta1**step))


def _unused(*_, **__):
    raise AssertionError("this stand-in does not have it")


class _Unused:
    __init__ = _unused


MODULES = {
    "transformer_engine": {"__version__": VERSION},
    "transformer_engine.common": {},
    "transformer_engine.common.recipe": {"DelayedScaling": _Unused},
    "transformer_engine.pytorch": {
        "Linear": Linear,
        "LayerNormLinear": LayerNormLinear,
        "GroupedLinear": GroupedLinear,
        "DotProductAttention": DotProductAttention,
        "RMSNorm": RMSNorm,
        "LayerNorm": _Unused,
    },
    "transformer_engine.pytorch.fp8": {
        "FP8GlobalStateManager": _Unused,
        "fp8_autocast": lambda *_, **__: nullcontext(),
        "fp8_model_init": _unused,
    },
    "transformer_engine.pytorch.distributed": {
        "CudaRNGStatesTracker": _Unused,
        "activation_recompute_forward": _unused,
        "checkpoint": _unused,
        "is_fp8_activation_recompute_enabled": lambda: False,
    },
    "transformer_engine.pytorch.attention": {},
    "transformer_engine.pytorch.attention.rope": {
        "apply_rotary_pos_emb": apply_rotary_pos_emb,
        "apply_fused_qkv_rotary_pos_emb": _unused,
    },
    "transformer_engine.pytorch.permutation": dict.fromkeys(
        (
            *("moe_permute", "moe_permute_with_probs", "moe_unpermute"),
            *("moe_sort_chunks_by_index", "moe_sort_chunks_by_index_with_probs"),
        ),
        _unused,
    ),
    "transformer_engine.pytorch.ops": {"Sequential": _Unused, "FusibleOperation": _Unused},
    "transformer_engine.pytorch.router": dict.fromkeys(
        ("fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function"), _unused
    ),
    "transformer_engine.pytorch.tensor": {"QuantizedTensor": _Unused},
    "transformer_engine.pytorch.optimizers": {"FusedAdam": FusedAdam, "FusedSGD": _Unused},
}


def install() -> None:
    """Before Megatron is imported."""
    for name, contents in MODULES.items():
        module = sys.modules[name] = ModuleType(name)
        module.__dict__.update(contents, __path__=[], __spec__=ModuleSpec(name, None, is_package=True))
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
