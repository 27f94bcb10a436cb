"""Import stand-in for torchvision on CPU servers: SGLang's and transformers' image code imports it for text models too,
and the wheel on PyPI needs CUDA libraries. Only text models can be served with it."""

import enum
import sys
import types

__version__ = "0.0.0"


class Placeholder(types.ModuleType):
    """Any name in it is an empty class: image code imports it, and a text model never uses it."""

    InterpolationMode = enum.Enum("InterpolationMode", "NEAREST NEAREST_EXACT BILINEAR BICUBIC BOX HAMMING LANCZOS")

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


for path in ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    parent, _, child = f"{__name__}.{path}".rpartition(".")
    sys.modules[f"{parent}.{child}"] = Placeholder(f"{parent}.{child}")
    setattr(sys.modules[parent], child, sys.modules[f"{parent}.{child}"])
