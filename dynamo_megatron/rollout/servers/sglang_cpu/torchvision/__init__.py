"""Import stand-in for torchvision on CPU servers: SGLang's and transformers' image code imports it for text models too,
and the wheel on PyPI needs CUDA libraries. Only text models can be served with it."""

from torchvision import io, transforms

__all__ = ["io", "transforms"]
__version__ = "0.0.0"


def placeholder(name: str) -> type:
    """An empty class for a name that image code imports and a text model never uses."""
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
