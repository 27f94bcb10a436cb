"""An SGLang plugin: the experts of every token are recorded on a CPU, too (--enable-return-routed-experts).

SGLang keeps them in host memory that it registers with CUDA.
"""

import torch

ALLOCATE = "sglang.srt.mem_cache.pool_host.common.alloc_with_host_register"


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(ALLOCATE, _allocate, HookType.AROUND)


def _allocate(original, dims, dtype, device, *_, **__):
    return torch.empty(dims, dtype=dtype, device=device)
