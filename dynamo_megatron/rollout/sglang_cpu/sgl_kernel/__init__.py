"""Import stand-in for sglang-kernel on CPU: PyPI has its CUDA build only.

SGLang imports a few `*_cpu` operators by name, all for speculative decoding and KV-cache moves, which a rollout server
does not use. No torch operator is registered here, so SGLang takes its torch-native paths.
"""

__version__ = "0.4.10"  # SGLang 0.5.23 refuses an older one


def __getattr__(name: str):
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name}: this CPU import stand-in has no kernels")

    return missing
