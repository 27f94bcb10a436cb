"""What a machine with one GPU makes of this tree, without network: `make gpu-check`.

    python -P benchmarks/gpu_check.py [--out benchmarks/results]
    python -P benchmarks/gpu_check.py --tiny     # without a GPU: that the command works, no figures about speed

1. the kernels' tests with the compiled kernels; 2. benchmarks/head.py on two shapes; 3. three steps of `dynamo-megatron
train` with a random model of Qwen2.5-1.5B's shape through the Triton head, from recorded rollouts. Writes
gpu_check.json; exits 1 where a part fails. The third needs about 45 GB of disk under runs/ while it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves this folder out
import training_steps
from measure import machine

ROOT = Path(__file__).parents[1]
SCRATCH = ROOT / "runs" / "gpu-check"
DISK_BYTES = 45e9
HEAD_CASES = "14B/8192/tp[18]"
KERNEL_TESTS = tuple(f"tests/kernels/test_{name}.py" for name in ("gpu", "triton", "head"))
TINY_KERNEL_TESTS = ("tests/kernels/test_memory.py", "-m", "not full")
TIMEOUT = {"kernel tests": 1800, "head": 1800, "training": 1800}  # seconds
VERSIONS = ("torch", "triton", "megatron-core", "transformer-engine", "apex", "transformers", "numpy")


def kernel_tests(device: str, tests: tuple[str, ...], scratch: Path) -> dict[str, Any]:
    """pytest's outcome of `tests` with the kernels on "cuda" or, interpreted, on "cpu"."""
    report, log = scratch / "kernel-tests.xml", scratch / "kernel-tests.log"
    with open(log, "w", encoding="utf-8") as file:
        code = subprocess.run(
            [sys.executable, "-P", "-m", "pytest", *tests, f"--junitxml={report}"],
            cwd=ROOT,
            env={**os.environ, "KERNEL_TESTS_DEVICE": device},
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT["kernel tests"],
        ).returncode
    result: dict[str, Any] = {"device": device, "paths": tests, "exit code": code}
    if report.exists():
        suite = ElementTree.parse(report).getroot().find("testsuite")
        result |= {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
        result["seconds"] = float(suite.get("time"))
    if code != 0:
        result["log"] = log.read_text(encoding="utf-8").splitlines()[-30:]
    return result


def head_benchmark(arguments: list[str], scratch: Path) -> dict[str, Any]:
    """What benchmarks/head.py wrote."""
    out, log = scratch / "head", scratch / "head.log"
    command = [sys.executable, "-P", str(ROOT / "benchmarks" / "head.py"), "--out", str(out), *arguments]
    with open(log, "w", encoding="utf-8") as file:
        code = subprocess.run(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=TIMEOUT["head"]
        ).returncode
    if code != 0:
        return {"exit code": code, "log": log.read_text(encoding="utf-8").splitlines()[-30:]}
    return {"exit code": code, **json.loads((out / "head.json").read_text(encoding="utf-8"))}


def headline(result: dict[str, Any]) -> str:
    """A few lines for the terminal."""
    tests, training = result["kernel tests"], result["training"]
    lines = [
        f"kernel tests on {tests['device']}: exit code {tests['exit code']}, {tests.get('tests', 0)} run, "
        f"{tests.get('failures', 0)} failed, {tests.get('errors', 0)} in error, {tests.get('skipped', 0)} skipped"
    ]
    for case in result["head"].get("cases", []):
        for name, figures in case["contenders"].items():
            said = figures.get("skipped") or (
                f"{1000 * figures['seconds']['median']:.2f} ms, {figures['of floor']:.2f} of the GEMMs, "
                f"{figures['peak bytes'] / 1e9:.2f} GB"
            )
            lines.append(f"head {case['case']}, {name}: {said}")
    lines += [f"head: {line}" for line in result["head"].get("log", [])]
    lines += [f"training: {line}" for line in training.get("log", [])]
    if "headline" in training:
        last = training["headline"]
        mfu, memory = last["update MFU"], last["peak GPU bytes"]
        lines.append(
            f"training, step {last['step']}: {last['seconds']:.2f} s (update {last['update seconds']:.2f} s, "
            f"MFU {'unknown' if mfu is None else format(mfu, '.3f')}), peak memory "
            f"{'unknown' if memory is None else format(memory / 1e9, '.1f') + ' GB'}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small shapes; runs on a CPU")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="default: benchmarks/results; with --tiny runs/gpu-check"
    )
    options = parser.parse_args()
    tiny = options.tiny
    if not tiny and not torch.cuda.is_available():
        print("gpu-check: needs a GPU; benchmarks/gpu_check.py --tiny shows on a CPU that it works", file=sys.stderr)
        return 2
    out = options.out or (SCRATCH if tiny else ROOT / "benchmarks" / "results")
    scratch = out / "scratch" if tiny else SCRATCH
    for folder in (out, scratch):
        folder.mkdir(parents=True, exist_ok=True)
    if not tiny and shutil.disk_usage(scratch).free < DISK_BYTES:
        print(f"gpu-check: needs {DISK_BYTES / 1e9:.0f} GB of disk in {scratch}; link runs/ elsewhere", file=sys.stderr)
        return 2
    backend = "triton" if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1" else "torch"
    work = training_steps.TINY if tiny else training_steps.QWEN_1_5B
    start = time.time()
    result: dict[str, Any] = {"machine": machine(VERSIONS), "tiny": tiny}
    device, tests = ("cpu", TINY_KERNEL_TESTS) if tiny else ("cuda", KERNEL_TESTS)
    result["kernel tests"] = kernel_tests(device, tests, scratch)
    arguments = ["--tiny", "--only", "tiny"] if tiny else ["--only", HEAD_CASES]
    result["head"] = head_benchmark(arguments, scratch)
    result["training"] = training_steps.run(work, scratch / "training", backend, TIMEOUT["training"])
    result["seconds"] = time.time() - start
    result["passed"] = all(result[part]["exit code"] == 0 for part in ("kernel tests", "head", "training"))
    (out / "gpu_check.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(headline(result))
    print(f"{'passed' if result['passed'] else 'FAILED'}; written: {out / 'gpu_check.json'}")
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
