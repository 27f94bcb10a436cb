"""Makes Megatron-Bridge importable in an interpreter of requirements/bridge.txt, on the CPU too.

Without TransformerEngine, which Bridge imports and whose layers its models are made of, layers of torch stand in: they
have TransformerEngine's names and arguments, as megatron-core 0.19 gives them, because Bridge tells by a layer's name
how it is cut.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import sys
import types
import typing

from dynamo_megatron.errors import InputError
from dynamo_megatron.runtime.late import torch

PINS = {"megatron-bridge": "0.6.2", "megatron-core": "0.19.2"}
# What Bridge imports and what is not used of it here.
ABSENT = ("transformer_engine", "transformer_engine.pytorch", "modelopt", "nvidia_resiliency_ext")


def check_versions() -> None:
    """Raises InputError unless this interpreter has exactly the pinned versions."""
    for package, version in PINS.items():
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found = "not installed"
        if found != version:
            raise InputError(
                f"model.source: bridge needs {package} {version}, which is {found} here; `make bridge` sets up "
                ".venv-bridge, whose dynamo-megatron has it"
            )


def prepare() -> None:
    """Imports Bridge, once, in a rank or in the proof's process: after `enable_cpu`, before models are built. Raises
    InputError as `check_versions`."""
    check_versions()
    if "megatron.bridge" in sys.modules:
        return
    if not hasattr(typing, "override"):  # Python 3.11
        import typing_extensions

        typing.override = typing_extensions.override
    absent = [name for name in ABSENT if not _installed(name)]
    for name in absent:
        sys.modules[name] = _Absent(name)
    if "transformer_engine" in absent:
        _put_in_place()
    logging.getLogger("megatron.bridge").setLevel(logging.ERROR)  # it tells of every tensor that has no place
    logging.getLogger("megatron.core.transformer.transformer_layer").setLevel(logging.ERROR)
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    import megatron.bridge  # noqa: F401

    root.setLevel(before[0])  # Bridge has everything logged
    root.handlers[:] = before[1]
    for name in absent:
        del sys.modules[name]


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name.partition(".")[0]) is not None


class _AnyAttribute(type):
    def __getattr__(cls, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyAttribute(name, (torch.nn.Module,), {})


class _Absent(types.ModuleType):
    """Has a class for every name, which serves for `isinstance` and to derive from."""

    def __init__(self, name: str):
        super().__init__(name)
        self.__spec__ = importlib.util.spec_from_loader(name, None)
        self.__path__ = []
        self.__version__ = "2.9.0"

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        if (module := f"{self.__name__}.{name}") in ABSENT:
            return sys.modules[module]
        return _AnyAttribute(name, (torch.nn.Module,), {})


def _put_in_place() -> None:
    import megatron.core.extensions.transformer_engine as extension
    import megatron.core.utils
    from packaging.version import Version

    from dynamo_megatron.bridge import layers

    megatron.core.utils._te_version = Version("2.9.0")
    put = {**layers.STAND_INS, "HAVE_TE": True, "FP8GlobalStateManager": None}
    for name, value in put.items():
        setattr(extension, name, value)
    import megatron.core.models.gpt.gpt_layer_specs as specs
    import megatron.core.ssm.gated_delta_net.common as delta
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    put["TESpecProvider"] = TESpecProvider
    # Modules that were imported before have copied the names.
    for module in [m for name, m in sys.modules.items() if name.startswith("megatron.core.") and m is not extension]:
        for name, value in put.items():
            if hasattr(module, name) and module.__name__ != "megatron.core.extensions.transformer_engine":
                setattr(module, name, value)
    assert specs.HAVE_TE
    if not delta.HAVE_FLA:
        import megatron.core.ssm.gated_delta_net.gdn as gdn

        delta.HAVE_FLA, delta.l2norm = True, layers.unit_norm
        gdn.causal_conv1d, gdn.chunk_gated_delta_rule = layers.causal_conv1d, layers.chunk_gated_delta_rule
