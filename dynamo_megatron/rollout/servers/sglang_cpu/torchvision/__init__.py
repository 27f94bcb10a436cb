"""Import stand-in for torchvision on CPU servers: SGLang's and transformers' image code imports it for text models too,
and the wheel on PyPI needs CUDA libraries. Only text models can be served with it."""

import enum
import sys
import types

__version__ = "0.0.0"


class InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class Placeholder(types.ModuleType):
    """Any name in it is an empty class: image code imports it, and a text model never uses it."""

    InterpolationMode = InterpolationMode

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


for path in ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    parent, _, child = f"{__name__}.{path}".rpartition(".")
    sys.modules[f"{parent}.{child}"] = Placeholder(f"{parent}.{child}")
    setattr(sys.modules[parent], child, sys.modules[f"{parent}.{child}"])
