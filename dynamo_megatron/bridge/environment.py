"""Makes Megatron-Bridge importable in an interpreter of requirements/bridge.txt, on the CPU too.

Without TransformerEngine, which Bridge imports and whose layers its models are made of, layers of torch stand in: they
have TransformerEngine's names and arguments, because Bridge tells by a layer's name how it is cut.
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
# What Bridge imports and is not used of it here.
UNUSED = ("transformer_engine", "transformer_engine.pytorch", "modelopt", "nvidia_resiliency_ext")


def check_versions() -> None:
    """Raises InputError unless this interpreter has exactly the pinned versions."""
    for package, version in PINS.items():
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found = "not installed"
        if found != version:
            raise InputError(
                f"model.source: bridge needs {package} {version}, here: {found}; `make bridge` sets up .venv-bridge: "
                "start .venv-bridge/bin/dynamo-megatron"
            )


def prepare() -> None:
    """Imports Bridge, once a process: after `enable_cpu`, before models are built. Raises as `check_versions`."""
    check_versions()
    if "megatron.bridge" in sys.modules:
        return
    if not hasattr(typing, "override"):  # Python 3.11
        import typing_extensions

        typing.override = typing_extensions.override
    absent = [name for name in UNUSED if importlib.util.find_spec(name.partition(".")[0]) is None]
    for name in absent:
        sys.modules[name] = _Absent(name)
    if "transformer_engine" in absent or not torch.cuda.is_available():
        _stand_in()
    for name in ("megatron.bridge", "megatron.core.transformer.transformer_layer"):
        logging.getLogger(name).setLevel(logging.ERROR)  # what has no place is an error of ours
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    import megatron.bridge  # noqa: F401

    root.setLevel(level)  # Bridge has everything logged
    root.handlers[:] = handlers
    for name in absent:
        del sys.modules[name]


class _AnyAttribute(type):
    """The kind of a class that has a class for every name."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyAttribute(name, (torch.nn.Module,), {})


class _Absent(types.ModuleType):
    def __init__(self, name: str):
        super().__init__(name)
        self.__spec__ = importlib.util.spec_from_loader(name, None)
        self.__path__, self.__version__ = [], "2.9.0"

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}") or _AnyAttribute(name, (torch.nn.Module,), {})


def _stand_in() -> None:
    import megatron.core.extensions.transformer_engine as extension
    import megatron.core.utils
    from packaging.version import Version

    from dynamo_megatron.bridge import layers

    megatron.core.utils._te_version = Version("2.9.0")
    put = {**layers.STAND_INS, "HAVE_TE": True, "FP8GlobalStateManager": None}
    put["TECudaRNGStatesTracker"] = types.SimpleNamespace  # which no tracker is; recomputation asks
    for name, value in put.items():
        setattr(extension, name, value)
    import megatron.core.models.gpt.gpt_layer_specs  # chooses by HAVE_TE when it is imported
    import megatron.core.ssm.gated_delta_net.common as delta
    import megatron.core.ssm.gated_delta_net.gdn as gdn
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    put["TESpecProvider"] = TESpecProvider
    for module in [module for name, module in sys.modules.items() if name.startswith("megatron.core.")]:
        for name in put.keys() & vars(module).keys():  # copied when it was imported
            setattr(module, name, put[name])
    if not delta.HAVE_FLA:
        delta.HAVE_FLA, delta.l2norm = True, layers.unit_norm
        gdn.causal_conv1d, gdn.chunk_gated_delta_rule = layers.causal_conv1d, layers.chunk_gated_delta_rule
