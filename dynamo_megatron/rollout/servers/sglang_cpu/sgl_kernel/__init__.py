"""Import stand-in for sglang-kernel on CPU: PyPI has its CUDA build only.

SGLang imports a few `*_cpu` operators by name, all for speculative decoding and KV-cache moves, which a rollout server
does not use. No torch operator is registered here, so SGLang takes its torch-native paths. In place of the package's
CPU GEMMs, linear layers in bfloat16 are summed in float32 and rounded once where the CPU has no bfloat16 arithmetic:
torch's own bfloat16 GEMM is about 10 times slower there.
"""

import torch

__version__ = "0.4.10"  # SGLang 0.5.23 refuses an older one


def __getattr__(name: str):
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name}: this CPU import stand-in has no kernels")

    return missing


_torch_linear = torch.nn.functional.linear


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if x.dtype is not torch.bfloat16:
        return _torch_linear(x, weight, bias)
    return _torch_linear(x.float(), weight.float(), None if bias is None else bias.float()).bfloat16()


if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
    torch.nn.functional.linear = _linear
