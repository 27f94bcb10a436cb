"""The package versions that this repository's tests ran with, and the oldest that can work. No other file has them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from dynamo_megatron.preflight.findings import Finding, failed, note


@dataclass(frozen=True)
class Package:
    """`tested` None: no version was tested yet. `at_least` None: any version may work. `gives`: what the package is
    for. `cost`: for an optional package, what a run on GPUs loses without it. `tested_too`: other versions
    that the tests which use the package ran with."""

    name: str
    tested: str | None
    at_least: str | None
    gives: str
    needed: bool = True
    gpu_only: bool = False
    cost: str = ""
    tested_too: tuple[str, ...] = ()


TRAINER = (
    Package("torch", "2.13.0", "2.10", "tensors, autograd, process groups"),
    Package(
        "megatron-core",
        "0.16.1",
        "0.16.1",
        "the model, its parallelism, the optimizer, checkpoints",
        tested_too=("0.19.2",),
    ),
    Package("transformers", "5.19.0", "4.57", "tokenizers"),
    Package("safetensors", "0.8.0", None, "the model's files"),
    Package("pydantic", "2.14.3", "2.11", "the configuration"),
    Package("aiohttp", "3.14.5", None, "requests to the server and to reward services"),
    Package("mpmath", "1.3.0", None, "the reward `math`", needed=False),
    Package("reasoning_gym", "0.1.25", None, "procedural problems and the reward `reasoning_gym`", needed=False),
    Package("triton", "3.9.0", None, "the policy head's kernels (kernels.backend: torch does without)", gpu_only=True),
    Package(
        "transformer-engine",
        None,
        "2.9",
        "fused norms, cuDNN and flash attention, fused Adam, grouped GEMMs of experts; without it plain torch layers "
        "and torch's Adam run",
        needed=False,
        gpu_only=True,
        cost="training may take two to three times as long (an estimate): attention takes a call for each distinct "
        "length of a sequence, norms are not fused, and there is no context parallelism; docs/install.md says how to "
        "build it",
    ),
    Package(
        "apex",
        None,
        None,
        "fused Adam where transformer-engine is absent, and weight gradients added to the main gradient inside the "
        "GEMM (fused_weight_gradient_mlp_cuda)",
        needed=False,
        gpu_only=True,
    ),
    Package(
        "flash-attn",
        None,
        None,
        "attention of packed sequences on GPUs before Hopper, where transformer-engine has no other fast one",
        needed=False,
        gpu_only=True,
    ),
    Package("wandb", None, "0.31", "tracking.backends: wandb", needed=False),
    Package("tensorboard", "2.21.0", None, "tracking.backends: tensorboard", needed=False),
    Package("mlflow-skinny", None, "3.17", "tracking.backends: mlflow", needed=False),
    Package("pyarrow", "26.0.1", None, "data from .parquet"),
    Package("zstandard", "0.25.0", None, "rollouts on disk"),
    Package("datasets", "5.2.0", None, "data from datasets:NAME", needed=False),
    Package("ray", "2.60.0", "2.60", "`launch ray`", needed=False),
    Package("nemo-run", "0.11.1", "0.11.1", "`launch nemo`", needed=False),
)
SERVER = (
    Package("sglang", "0.5.23", "0.5.23", "rollouts; older ones have another protocol for new weights"),
    Package("torch", None, None, "what SGLang runs on; its wheel pins the version"),
    Package("sglang-kernel", None, None, "SGLang's CUDA kernels", gpu_only=True),
    Package("flashinfer-python", None, None, "SGLang's attention on GPUs", needed=False, gpu_only=True),
)
OLD_NAMES = {"sglang-kernel": "sgl-kernel"}  # package -> its earlier name


def installed(name: str, version_of: Callable[[str], str | None]) -> str | None:
    """A package's version under its present name or its old one."""
    return version_of(name) or (version_of(OLD_NAMES[name]) if name in OLD_NAMES else None)


def same_release(found: str, tested: str) -> bool:
    """Returns True where both versions are the same release; build (+cpu, +cu130) and post-release are ignored."""
    return _release(found) == _release(tested)


def costs(packages: tuple[Package, ...], version_of: Callable[[str], str | None]) -> Iterator[str]:
    """A line for each missing package without which a run on GPUs is slow."""
    for package in packages:
        if package.cost and installed(package.name, version_of) is None:
            yield f"WITHOUT {package.name}: {package.cost}"


def faults(
    packages: tuple[Package, ...], version_of: Callable[[str], str | None], where: str, mend: str, *, cuda: bool
) -> Iterator[Finding]:
    """Yields a failure for each needed package that is missing and each package that is too old. Yields a note for each
    untested version, and for each missing package without which a run on GPUs is slow.

    `version_of` returns a package's installed version or None. `where` names the interpreter, and `mend` is the command
    that installs into it.
    """
    for package in packages:
        found = installed(package.name, version_of)
        if found is None:
            if package.needed and (cuda or not package.gpu_only):
                wanted = f"=={package.tested}" if package.tested else ""
                yield failed(f"{package.name} is not installed in {where}; {mend} '{package.name}{wanted}'")
        elif package.at_least and _older(found, package.at_least):
            yield failed(
                f"{package.name} {found} in {where} is older than {package.at_least}, the oldest that can work; "
                f"{mend} '{package.name}{f'=={package.tested}' if package.tested else f'>={package.at_least}'}'"
            )
        elif package.tested is None and package.gpu_only:
            yield note(f"{package.name} {found} in {where}: no version of it has been tested here")
        elif package.tested and not any(same_release(found, v) for v in (package.tested, *package.tested_too)):
            tested = " and ".join((package.tested, *package.tested_too))
            yield note(f"{package.name} {found} in {where} is untested; the tests ran with {tested}")
    if cuda:
        yield from map(note, costs(packages, version_of))


def _release(version: str) -> str:
    return re.split(r"\+|\.post", version)[0]


def _older(found: str, least: str) -> bool:
    try:
        return Version(found) < Version(least)
    except InvalidVersion:  # a custom build: its version cannot be compared
        return False
