"""An SGLang plugin: the latent attention of DeepSeek-V3 on a CPU.

SGLang 0.5.23 has its torch_native backend compute prompts as Triton's does, from keys and values of each head beside
the cache. But torch_native reads the latents in the cache in their place: where their widths agree, as in a small
model, the attention is silently wrong, else the server fails. Here every token attends to the latents (absorbed MLA).
"""

import sys

BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
METHODS = "sglang.srt.models.deepseek_common.attention_backend_handler"
ROPE = "sglang.srt.layers.rotary_embedding.factory.get_rope_wrapper"


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{BACKEND}.__init__", _choose, HookType.AFTER)
    HookRegistry.register(ROPE, _rope, HookType.AROUND)


def _choose(*_, **__):
    """Once the model is there: few models import these methods, which takes seconds."""
    if methods := sys.modules.get(METHODS):
        methods.AttentionBackendRegistry.register("torch_native", methods._dispatch_mla_subtype)


def _rope(original, *sizes, **given):
    """Its CPU path fails without YaRN."""
    if given["rope_scaling"] is None:
        given["device"] = None
    return original(*sizes, **given)
