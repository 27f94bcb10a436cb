"""What a machine with GPUs makes of this tree, without network: `make gpu-check`.

    python -P benchmarks/gpu_check.py [--part NAME] [--resume] [--server-python PYTHON] [--out benchmarks/results]
    python -P benchmarks/gpu_check.py --tiny     # without a GPU: that the command works, no figures about speed

tests: the kernels' tests with the compiled kernels; head: benchmarks/head.py on two shapes; training: three steps of
`dynamo-megatron train` with a random model of Qwen2.5-1.5B's shape through the Triton head, from recorded rollouts;
the peak of its tensors is held to what `dynamo-megatron plan` says of it; live-disk, live-memory, live-turns: five
steps of that shape with an SGLang server on the same GPU (live_steps.py), where `--server-python` names an interpreter
that has SGLang. With several GPUs also layouts: the training on all of them, data parallel and with tensor parallelism
of two, whose gradient norms must agree; live-ranks: live-turns on all of them, with servers on each.
Writes gpu_check.json after each part, with what the planner expects beside what was measured; `--part` runs one and
leaves what the file says of the others, `--resume` leaves out the parts that have passed. A part is ended after ten
minutes. Exits 1 where a part fails, 2 where something that it needs is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves this folder out

ROOT = Path(__file__).parents[1]
SCRATCH = ROOT / "runs" / "gpu-check"
DISK_BYTES = 15e9  # the training's model and the weights it writes for a server
# Modules that a part imports; the distribution has the same name where it is not told.
SHARED = ("torch", "numpy", "triton", "pydantic", "dynamo_megatron.kernels")
TRAINING = (
    *(*SHARED, "megatron.core", "transformers", "tokenizers", "safetensors"),
    *("yaml", "jinja2", "psutil", "tqdm", "aiohttp"),
)
NEEDED = {
    "tests": (*SHARED, "pytest"),
    "head": (*SHARED, "megatron.core"),
    "training": TRAINING,
    "live-disk": TRAINING,
    "live-memory": TRAINING,
    "live-turns": TRAINING,
    "layouts": TRAINING,
    "live-ranks": TRAINING,
}
OF_SEVERAL_GPUS = ("layouts", "live-ranks")
DISTRIBUTIONS = {"dynamo_megatron.kernels": "dynamo-megatron", "megatron.core": "megatron-core", "yaml": "pyyaml"}
HEAD_CASES = "14B/8192/tp[18]"
GPU_TESTS = "test_gpu"  # these must run: they show what nothing else does
KERNEL_TESTS = tuple(f"tests/kernels/test_{name}.py" for name in ("gpu", "triton", "head"))
TINY_KERNEL_TESTS = ("tests/kernels/test_memory.py", "-m", "not full")
TINY_RANKS = 2  # in place of the machine's GPUs
NORM_BAR = 1e-2  # how far the gradient norm of step 1 of one layout may be from another's, of itself
PLAN_BAR = 0.1  # how far the peak of a step's tensors may be from what `plan` says
TIMEOUT = 570.0  # seconds a part, so that each fits a machine that is lent for ten minutes a command


def missing(parts: list[str]) -> list[str]:
    """Distributions that `parts` need and this Python does not have."""

    def there(module: str) -> bool:
        package = module.partition(".")[0]
        return importlib.util.find_spec(package) is not None and importlib.util.find_spec(module) is not None

    modules = dict.fromkeys(module for part in parts for module in NEEDED.get(part, TRAINING))
    return [DISTRIBUTIONS.get(m, m.replace("_", "-")) for m in modules if not there(m)]


def kernel_tests(device: str, tests: tuple[str, ...], scratch: Path) -> dict[str, Any]:
    """pytest's outcome of `tests` with the kernels on "cuda" or, interpreted, on "cpu"."""
    from measure import run_logged

    report = scratch / "kernel-tests.xml"
    report.unlink(missing_ok=True)
    ended = run_logged(
        [sys.executable, "-P", "-m", "pytest", *tests, f"--junitxml={report}"],
        scratch / "kernel-tests.log",
        TIMEOUT,
        cwd=ROOT,
        env={**os.environ, "KERNEL_TESTS_DEVICE": device},
    )
    result: dict[str, Any] = {"device": device, "paths": tests, **ended}
    passed = ended["exit code"] == 0
    if report.exists():
        suite = ElementTree.parse(report).getroot().find("testsuite")
        result |= {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
        result["skipped because"] = sorted({found.get("message") for found in suite.iter("skipped")})
        result["test seconds"] = float(suite.get("time"))
        if device == "cuda":
            of_gpu = [test for test in suite.iter("testcase") if GPU_TESTS in test.get("classname")]
            passed = passed and bool(of_gpu) and all(test.find("skipped") is None for test in of_gpu)
    return {**result, "passed": passed}


def head_benchmark(arguments: list[str], scratch: Path) -> dict[str, Any]:
    """What benchmarks/head.py wrote, as far as it came."""
    from measure import run_logged

    figures = scratch / "head" / "head.json"
    figures.unlink(missing_ok=True)
    command = [sys.executable, "-P", str(ROOT / "benchmarks" / "head.py"), "--out", str(figures.parent), *arguments]
    ended = run_logged(command, scratch / "head.log", TIMEOUT, cwd=ROOT)
    found = json.loads(figures.read_text(encoding="utf-8")) if figures.exists() else {}
    return {**found, **ended, "passed": ended["exit code"] == 0}


def training(tiny: bool, scratch: Path) -> dict[str, Any]:
    """Three steps' figures."""
    import training_steps

    backend = training_steps.backend_here()
    work = training_steps.TINY if tiny else training_steps.QWEN_1_5B
    result = training_steps.run(work, scratch / "training", backend, TIMEOUT)
    ratio = result.get("peak over plan")
    as_planned = ratio is None or abs(ratio - 1) <= PLAN_BAR
    return {**result, "passed": len(result.get("steps", [])) == work.steps and as_planned}


def ranks_here(tiny: bool) -> int:
    import torch

    return TINY_RANKS if tiny else torch.cuda.device_count()


def layouts(tiny: bool, scratch: Path) -> dict[str, Any]:
    """Three steps' figures on all GPUs, data parallel and with tensor parallelism of two."""
    import training_steps

    backend = training_steps.backend_here()
    work = training_steps.TINY if tiny else training_steps.QWEN_1_5B
    found = {}
    for name, parallel in (("dp", {}), ("tp2", {"tp": 2})):
        ran = training_steps.run(work, scratch / name, backend, TIMEOUT / 2, ranks_here(tiny), parallel)
        found[name] = ran
        if ran["exit code"] != 0:
            break
    wrong = wrong_layouts(found)
    return {"layouts": found, "exit code": ran["exit code"], "wrong": wrong, "passed": not wrong}


def wrong_layouts(found: dict[str, dict[str, Any]]) -> list[str]:
    """What the layouts' figures must not be, a line each."""
    wrong = [f"{name}: exit code {ran['exit code']}" for name, ran in found.items() if ran["exit code"] != 0]
    if not wrong:
        dp, tp2 = (found[name]["steps"][0]["gradient norm"] for name in ("dp", "tp2"))
        if not abs(tp2 / dp - 1) <= NORM_BAR:
            wrong.append(f"step 1: gradient norm {dp:.6g} data parallel, {tp2:.6g} with tensor parallelism of two")
    return wrong


def live(way: str, tiny: bool, scratch: Path, server_python: str | None) -> dict[str, Any]:
    """Figures of steps with a server."""
    import live_steps
    import training_steps

    work = training_steps.TINY if tiny else training_steps.QWEN_1_5B
    ranks = ranks_here(tiny) if way in OF_SEVERAL_GPUS else 1
    result = live_steps.run(way, work, scratch / way, server_python, TIMEOUT, ranks)
    return {**result, "passed": result["exit code"] == 0 and not result["wrong"]}


def run_part(part: str, tiny: bool, scratch: Path, server_python: str | None) -> dict[str, Any]:
    from measure import VERSIONS, machine

    start, before = time.time(), machine(VERSIONS)
    if part == "tests":
        device, tests = ("cpu", TINY_KERNEL_TESTS) if tiny else ("cuda", KERNEL_TESTS)
        result = kernel_tests(device, tests, scratch)
    elif part == "head":
        result = head_benchmark(["--tiny", "--only", "tiny"] if tiny else ["--only", HEAD_CASES], scratch)
    elif part == "training":
        result = training(tiny, scratch)
    elif part == "layouts":
        result = layouts(tiny, scratch)
    else:
        result = live(part, tiny, scratch, server_python)
    return {"tiny": tiny, "machine": before, "seconds": time.time() - start, **result}


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small shapes; runs on a CPU")
    parser.add_argument("--part", choices=tuple(NEEDED), help="default: all, one after another")
    parser.add_argument("--resume", action="store_true", help="leaves out the parts that the file says have passed")
    parser.add_argument("--server-python", metavar="PYTHON", help="an interpreter with SGLang, for the live parts")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="default: benchmarks/results; with --tiny runs/gpu-check"
    )
    options = parser.parse_args()
    if options.out is not None:
        options.out = options.out.absolute()  # runs have working folders of their own
    return options


def parts_of(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """(the parts to run, those that are left out because no interpreter for servers is given). Raises ValueError."""
    parts = [options.part] if options.part else list(NEEDED)
    if options.part is None and not options.tiny and "torch" not in missing(["tests"]):
        parts = [part for part in parts if ranks_here(False) > 1 or part not in OF_SEVERAL_GPUS]
    serverless = [part for part in parts if "live" in part and not (options.tiny or options.server_python)]
    if serverless and options.part:
        raise ValueError(f"{options.part} needs --server-python, which names an interpreter with SGLang")
    return [part for part in parts if part not in serverless], serverless


def place_of(options: argparse.Namespace, parts: list[str]) -> tuple[Path, Path]:
    """(the folder of the JSON, that of the runs), which exist. Raises ValueError where something that the parts need is
    missing."""
    if lacking := missing(parts):
        raise ValueError(f"{sys.executable} has no {', '.join(lacking)}, which {', '.join(parts)} need")
    import torch

    if not options.tiny:
        if not torch.cuda.is_available():
            raise ValueError("needs a GPU; benchmarks/gpu_check.py --tiny shows on a CPU that it works")
        os.environ.pop("TRITON_INTERPRET", None)  # the compiled kernels are what is asked about
    out = options.out or (SCRATCH if options.tiny else ROOT / "benchmarks" / "results")
    scratch = out / "scratch" if options.tiny else SCRATCH
    for folder in (out, scratch):
        folder.mkdir(parents=True, exist_ok=True)
    if not options.tiny and "training" in parts and shutil.disk_usage(scratch).free < DISK_BYTES:
        raise ValueError(f"needs {DISK_BYTES / 1e9:.0f} GB of disk in {scratch}; link runs/ elsewhere")
    return out, scratch


class Figures:
    """gpu_check.json: what is known of each part; a new file unless `keeps`."""

    def __init__(self, file: Path, *, tiny: bool, keeps: bool):
        self._file = file
        before = json.loads(file.read_text(encoding="utf-8")) if keeps and file.exists() else {}
        self._of = {part: found for part, found in before.items() if found["tiny"] == tiny}

    def passed(self, part: str) -> bool:
        return part in self._of and self._of[part]["passed"]

    def keep(self, part: str, result: dict[str, Any]) -> None:
        self._of[part] = result
        self._file.write_text(json.dumps(self._of, indent=1) + "\n", encoding="utf-8")
        print(said(part, result), flush=True)


def plan_line(found: dict[str, Any]) -> str:
    """What the planner expects beside what was measured (`planned.compared`)."""
    if found["reason"]:
        return f"plan: no expected figures: {found['reason']}"
    pairs = (
        f"{name} {one['planned']:.3g} planned, {one['measured']:.3g} measured"
        for name, one in found["figures"].items()
        if one["measured"] is not None
    )
    return f"plan for {found['gpu']}: {'; '.join(pairs)}"


def said(part: str, result: dict[str, Any]) -> str:
    """A part's outcome in a few lines for the terminal."""
    lines = [f"{part}: {'passed' if result['passed'] else 'FAILED'}, exit code {result['exit code']}"]
    if "tests" in result:
        lines[0] += (
            f", on {result['device']} {result['tests']} tests, {result['failures']} failed, "
            f"{result['errors']} in error, {result['skipped']} skipped"
        )
    lines += [f"skipped: {reason}" for reason in result.get("skipped because", [])]
    for name, ran in result.get("layouts", {}).items():
        if last := ran.get("headline"):
            mfu = "unknown" if last["update MFU"] is None else f"{last['update MFU']:.3f}"
            lines.append(
                f"{name} on {ran['ranks']} ranks, step {last['step']}: {last['seconds']:.2f} s (update "
                f"{last['update seconds']:.2f} s, MFU {mfu}), gradient norm {last['gradient norm']:.4g}"
            )
        if plan := ran.get("plan"):
            lines.append(f"{name}, {plan_line(plan)}")
    if plan := result.get("plan"):
        lines.append(plan_line(plan))
    lines += result.get("wrong", [])
    if "headline" in result and "way" in result:
        last = result["headline"]
        lines.append(
            f"{part}, step {last['step']}: {last['seconds']:.2f} s (generate {last['generate seconds']:.2f} s, push "
            f"{last['push seconds']:.2f} s), {last['tokens a second and GPU']:.0f} tokens a second and GPU, gap "
            f"{last['gap']:.1e}"
        )
    elif "headline" in result:
        last = result["headline"]
        mfu, memory = last["update MFU"], last["peak GPU bytes"]
        lines.append(
            f"training, step {last['step']}: {last['seconds']:.2f} s (update {last['update seconds']:.2f} s, "
            f"MFU {'unknown' if mfu is None else format(mfu, '.3f')}), peak memory "
            f"{'unknown' if memory is None else format(memory / 1e9, '.1f') + ' GB'}, "
            f"planned {result['planned peak GPU bytes'] / 1e9:.1f} GB"
        )
    return "\n".join([*lines, *result.get("log", [])])


def main() -> int:
    options = options_of()
    try:
        parts, serverless = parts_of(options)
        out, scratch = place_of(options, parts)
    except ValueError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 2
    written = out / "gpu_check.json"
    figures = Figures(written, tiny=options.tiny, keeps=options.part or options.resume)
    due = [part for part in parts if not (options.resume and figures.passed(part))]
    for part in due:
        figures.keep(part, run_part(part, options.tiny, scratch, options.server_python))
    if serverless:
        print(f"left out: {', '.join(serverless)}, which need --server-python")
    print(f"written: {written}")
    return 0 if all(figures.passed(part) for part in parts) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a part must not outlive this command
    sys.exit(main())
