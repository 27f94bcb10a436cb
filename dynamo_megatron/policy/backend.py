"""What this project changes in Megatron-core, and in torch.cuda on a machine without CUDA.

The patched names are private to Megatron; the policy tests are the guard for its upgrades.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from dynamo_megatron.errors import InputError
from dynamo_megatron.kernels import layers
from dynamo_megatron.kernels.chunked import add_product_
from dynamo_megatron.runtime.plain_text import error_line

CPU = torch.device("cpu")


def _uncompiled(model: Callable | None = None, **options: object) -> Callable:
    """As torch.compile under TORCHDYNAMO_DISABLE=1, without the compiler's import, which is 40 % of the CPU time of all
    imports of a rank."""
    return model if model is not None else lambda decorated: decorated


if not torch.cuda.is_available():
    torch.compile = _uncompiled  # Megatron's jit_fuser
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # what bound the other one before this import


def _is_cuda(device: object) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


_MATMULS = {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.nn.functional.linear}


def _run_backward(tensors, grad_tensors=None, retain_graph=None, create_graph=False, inputs=None) -> None:
    """torch.autograd.backward without its dispatch to the mode, which would not end."""
    given = (grad_tensors,) if torch.is_tensor(grad_tensors) else grad_tensors or (None,) * len(tensors)
    gradients = tuple(torch.ones_like(t) if g is None else g for t, g in zip(tensors, given, strict=True))
    torch.autograd.variable.Variable._execution_engine.run_backward(
        tensors, gradients, bool(retain_graph), create_graph, inputs or (), allow_unreachable=True, accumulate_grad=True
    )


class _CudaMeansCpu(TorchFunctionMode):
    """device="cuda" creates on the CPU; Tensor.cuda() is the identity; Tensor.type() answers torch.cuda.*.

    Where the CPU has no bfloat16 arithmetic (AVX2), torch's bfloat16 GEMM is about 10 times slower than its float32
    one; the same products are then summed in float32 GEMMs and rounded once, as a bfloat16 GEMM does.
    """

    def __init__(self):
        super().__init__()
        self._slow_bfloat16 = not torch.ops.mkldnn._is_mkldnn_bf16_supported()
        self.in_layers = False  # where layers do not need this mode: it costs as much as a small layer's operators

    def enter_layers(self, dtype: torch.dtype) -> None:
        """Layers of `dtype` run with this mode if they need it."""
        self.in_layers |= dtype == torch.bfloat16 and self._slow_bfloat16

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.autograd.backward:
            # Megatron's own backward functions run inside this call, where the mode is off.
            with self if self.in_layers else contextlib.nullcontext():
                return _run_backward(*args, **kwargs)
        if self._slow_bfloat16 and func in _MATMULS and not kwargs and args[0].dtype == args[1].dtype == torch.bfloat16:
            return func(*(None if a is None else a.float() for a in args)).bfloat16()
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.cuda:
            return args[0]
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": CPU}
            kwargs.pop("pin_memory", None)
        elif func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        return func(*args, **kwargs)


class _NoStream:
    """Stands for a CUDA stream or event: every method does nothing."""

    def __init__(self, *args, **kwargs): ...

    def __getattr__(self, name):
        return lambda *args, **kwargs: self

    def query(self) -> bool:
        return True


_mode: _CudaMeansCpu | None = None


def enable_cpu() -> None:
    """Lets Megatron-core run on the CPU. Call it in the thread that runs Megatron, before models are built."""
    global _mode
    if torch.cuda.is_available() or _mode is not None:
        return
    import megatron.core.tensor_parallel.random as megatron_random

    # One function object a name: torch._dynamo refuses the same object under two names.
    cuda = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.set_device = lambda device: None
    cuda.synchronize = lambda device=None: None
    cuda.empty_cache = lambda: None
    cuda.current_stream = lambda device=None: _NoStream()
    cuda.default_stream = lambda device=None: _NoStream()
    cuda.Stream = cuda.Event = _NoStream
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.manual_seed = cuda.random.manual_seed = lambda seed: torch.manual_seed(seed) and None
    assert hasattr(megatron_random, "_set_cuda_rng_state"), "megatron-core moved _set_cuda_rng_state"
    megatron_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    _let_experts_run()
    _mode = _CudaMeansCpu()
    _mode.__enter__()


def layer_calls() -> contextlib.AbstractContextManager:
    """Around a pass through layers: without the stand-in for CUDA where they do not need it."""
    return contextlib.nullcontext() if _mode is None or _mode.in_layers else torch._C.DisableTorchFunction()


def _let_experts_run() -> None:
    """Megatron's all-to-all needs numpy split sizes and makes them only of tensors that were on a GPU."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def to_cpu(tensor, as_numpy=False, record_stream=False):
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    assert hasattr(token_dispatcher, "maybe_move_tensor_to_cpu"), "megatron-core moved maybe_move_tensor_to_cpu"
    token_dispatcher.maybe_move_tensor_to_cpu = moe_utils.maybe_move_tensor_to_cpu = to_cpu


def use_layer_functions(dtype: torch.dtype, transformer_engine: bool) -> None:
    """Puts `kernels.layers` in place of Megatron's SwiGLU and GeGLU, and without TransformerEngine also of its RoPE of
    packed sequences, whose `freqs` is then a `rotary_table`; weight gradients are added to main_grad by their GEMM, as
    Apex's extension would, and gradient norms and clipping take all tensors at once."""
    from megatron.core.fusions import fused_bias_geglu, fused_bias_swiglu

    if _mode is not None:
        _mode.enter_layers(dtype)
    for name in ("swiglu", "swiglu_back", "weighted_swiglu", "weighted_swiglu_back", "SwiGLUFunction"):
        assert hasattr(fused_bias_swiglu, name), f"megatron-core moved {name}"
    fused_bias_swiglu.swiglu = fused_bias_swiglu.weighted_swiglu = layers.swiglu
    fused_bias_swiglu.swiglu_back = lambda gradient, y: layers.swiglu_gradient(gradient, y)[0]
    fused_bias_swiglu.weighted_swiglu_back = layers.swiglu_gradient
    if isinstance(trained := fused_bias_swiglu.SwiGLUFunction, type):  # not done yet
        fused_bias_swiglu.SwiGLUFunction = SimpleNamespace(
            apply=lambda y, *options: trained.apply(y, *options) if torch.is_grad_enabled() else layers.swiglu(y)
        )
    assert hasattr(fused_bias_geglu, "geglu") and hasattr(fused_bias_geglu, "geglu_back"), "megatron-core moved geglu"
    fused_bias_geglu.geglu, fused_bias_geglu.geglu_back = layers.geglu, layers.geglu_gradient
    if transformer_engine:
        return
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.optimizer import clip_grads
    from megatron.core.tensor_parallel import layers as linears

    assert hasattr(rope_utils, "_apply_rotary_pos_emb_thd"), "megatron-core moved _apply_rotary_pos_emb_thd"
    rope_utils._apply_rotary_pos_emb_thd = _rotate
    if not linears._grad_accum_fusion_available:
        linears.fused_weight_gradient_mlp_cuda = SimpleNamespace(
            wgrad_gemm_accum_fp32=lambda inputs, gradient, main_grad: add_product_(main_grad, gradient.t(), inputs)
        )
        linears._grad_accum_fusion_available = True
    if clip_grads.l2_norm_impl.__module__ == "megatron.core.utils":  # neither TransformerEngine's nor Apex's
        clip_grads.l2_norm_impl, clip_grads.multi_tensor_scale_impl = _norm_of_all, _scale_all


def _rotate(
    t: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor, rotary_interleaved: bool = False, **_: object
) -> torch.Tensor:
    return layers.rotate(t, freqs, rotary_interleaved)


def _norm_of_all(chunk_size: int, flag: object, lists: list[list[torch.Tensor]], *_) -> tuple[torch.Tensor, None]:
    return torch.stack(torch._foreach_norm(lists[0])).norm()[None], None


def _scale_all(chunk_size: int, flag: object, lists: list[list[torch.Tensor]], scale: float) -> None:
    assert lists[0] is lists[1], "megatron-core scales gradients in place"
    torch._foreach_mul_(lists[0], scale)


class Fusions(NamedTuple):
    """What serves this run, "transformer-engine" or "torch"."""

    norm: str  # and linears, RoPE, grouped experts, fused weight gradients, Adam
    attention: str

    @classmethod
    def detect(cls) -> Fusions:
        """Imports the packages, before Megatron does: it takes one that is only half there for one that works, or for
        none. Raises InputError for such a package."""
        if not torch.cuda.is_available() or not _imported("transformer_engine.pytorch", "transformer-engine"):
            return cls("torch", "torch")
        # cuDNN's attention takes packed sequences on these GPUs. Elsewhere TransformerEngine has flash-attn, or a path
        # whose memory grows with the square of the packed length.
        cudnn = (9, 0) <= torch.cuda.get_device_capability() < (12, 0)
        fast_attention = cudnn or _imported("flash_attn", "flash-attn")
        return cls("transformer-engine", "transformer-engine" if fast_attention else "torch")

    def __str__(self) -> str:
        return f"layers and Adam: {self.norm}, attention: {self.attention}"


def _imported(module: str, package: str) -> bool:
    """False where it is not installed. Raises InputError where it is and does not work."""
    try:
        importlib.import_module(module)
    except Exception as error:  # of a build gone wrong: ImportError, OSError, AssertionError, ...
        if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
            return False
        raise InputError(
            f"{package} is installed and cannot be imported ({error_line(error)}); build it against torch "
            f"{torch.__version__} (docs/quickstart.md), or uninstall it: a run works without it"
        ) from None
    return True
