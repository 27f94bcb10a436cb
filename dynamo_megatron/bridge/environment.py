"""What has to hold before Megatron-Bridge builds a model: an interpreter of requirements/bridge.txt, the proof of the
config, and what Bridge imports. Without TransformerEngine, whose layers its models are made of, layers of torch stand
in (bridge/layers.py)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import subprocess
import sys
import types
import typing
from unittest import mock

import typing_extensions

from dynamo_megatron.errors import InputError
from dynamo_megatron.runtime.late import torch

PINS = {"megatron-bridge": "0.6.2", "megatron-core": "0.19.2"}  # what is changed here is these versions'
# What Bridge imports and is not used of it here.
UNUSED = ("transformer_engine", "transformer_engine.pytorch", "modelopt", "nvidia_resiliency_ext")
TIMEOUT = 900  # seconds of a proof
REFUSED = 3  # its exit code where the model is not transformers'


def check_versions() -> None:
    """Raises InputError unless this interpreter has exactly the pinned versions of Bridge and megatron-core."""
    for package, pin in PINS.items():
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found = "not installed"
        if found != pin:
            raise InputError(
                f"model.source: bridge needs {package} {pin}, here: {found}; `make bridge` sets up .venv-bridge: "
                "start .venv-bridge/bin/dynamo-megatron"
            )


def prove_folder(folder: str) -> str:
    """Runs bridge/proof.py in a process of its own, on the CPU; returns the line that a run prints. Raises InputError,
    one line, unless Bridge's model computes what transformers' does."""
    check_versions()
    command = [sys.executable, "-P", "-m", "dynamo_megatron.bridge.proof", folder]
    on_cpu = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(command, env=on_cpu, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        raise InputError(f"{folder}: the proof of Bridge's model took more than {TIMEOUT} seconds") from None
    if done.returncode:
        why = done.stderr.strip().rpartition("\n")[2]
        if done.returncode == REFUSED:
            raise InputError(f"{folder}/config.json: refused with model.source: bridge: {why}")
        raise InputError(f"{folder}: the proof of Bridge's model failed with exit code {done.returncode}: {why}")
    gap = done.stdout.splitlines()[-1]
    return f"Megatron-Bridge: logits of a small model of this config.json are within {gap}"


def prepare() -> None:
    """Imports Bridge, once a process: after `enable_cpu`, before models are built. Raises as `check_versions`."""
    check_versions()
    if "megatron.bridge" in sys.modules:
        return
    typing.override = typing_extensions.override  # absent in Python 3.11
    absent = [name for name in UNUSED if importlib.util.find_spec(name.partition(".")[0]) is None]
    for name in absent:
        sys.modules[name] = _Absent(name)
    if "transformer_engine" in absent or not torch.cuda.is_available():
        _stand_in()
    for name in ("megatron.bridge", "megatron.core.transformer.transformer_layer"):
        logging.getLogger(name).setLevel(logging.ERROR)  # what has no place is an error of ours
    with mock.patch("logging.basicConfig"):  # of megatron.training: everything
        import megatron.bridge  # noqa: F401
    for name in absent:
        del sys.modules[name]


class _Absent(types.ModuleType):
    """Has a class for every name, or a module."""

    def __init__(self, name: str):
        super().__init__(name)
        self.__spec__ = importlib.util.spec_from_loader(name, None)
        self.__path__, self.__version__ = [], "2.9.0"

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (torch.nn.Module,), {}) if name[0].isupper() else _Absent(name)


def _stand_in() -> None:
    import megatron.core.extensions.transformer_engine as extension
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.ssm.gated_delta_net.common as delta
    import megatron.core.ssm.gated_delta_net.gdn as gdn
    import megatron.core.utils
    from packaging.version import Version

    from dynamo_megatron.bridge import layers

    megatron.core.utils._te_version = Version("2.9.0")
    put = {**layers.TE_LAYERS, "HAVE_TE": True, "FP8GlobalStateManager": None}
    put["TECudaRNGStatesTracker"] = types.SimpleNamespace  # which no tracker is; recomputation asks
    vars(extension).update(put)
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    put["TESpecProvider"] = TESpecProvider
    for module in [module for name, module in sys.modules.items() if name.startswith("megatron.core.")]:
        if module.__name__.startswith("megatron.core.dist_checkpointing"):
            continue  # with HAVE_TE it would use a class of TransformerEngine's tensors
        for name in put.keys() & vars(module).keys():  # copied when it was imported
            setattr(module, name, put[name])
    if not delta.HAVE_FLA:
        delta.HAVE_FLA, delta.l2norm = True, lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
        gdn.causal_conv1d, gdn.chunk_gated_delta_rule = layers.causal_conv1d, layers.chunk_gated_delta_rule
