"""One part of the GPU check, as device.py starts it:  python -P benchmarks/gpu/parts.py NAME FOLDER SECONDS [--tiny]

FOLDER gets result.json, the logs, and in out/ the files that are to be kept. Exits 0 where the part has passed.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import dataclasses
import gzip
import importlib.util
import itertools
import json
import os
import platform
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

# python -P leaves these folders out
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
import live_steps
import psutil
import torch
import training_beside_peers
import training_steps
from device import HERE, KIT, PLAIN, PLAIN_ENVIRONMENT, ROOT, unpacked
from measure import VERSIONS, interleaved, machine, run_logged
from training_steps import QWEN_1_5B, TINY, Work

CUDA = torch.cuda.is_available()
SMALL_GPU = 100e9  # bytes: below it, server and rank share a GPU with the smaller of two settings
HEAD_CASES = "14B/8192/tp[18]"
GPU_TESTS = "test_gpu"  # these must run: they show what nothing else does
KERNEL_TESTS = (
    *(f"tests/kernels/test_{name}.py" for name in ("gpu", "layers", "triton", "head")),
    "tests/policy/test_gpu_attention.py",
)
TINY_KERNEL_TESTS = ("tests/kernels/test_memory.py", "-m", "not full")
FAMILY = dataclasses.replace(TINY, layers=4, hidden=128, ffn=256, dtype="bfloat16", prompts=4, response_tokens=(20, 40))
METHODS = {  # of training, besides that of all parameters, on qwen2
    "lora": ("model.lora.rank=4",),
    "critic": (str(ROOT / "configs" / "methods" / "ppo.yaml"),),
    "cpu_offload": ("optimizer.cpu_offload=true",),
}
FAMILY_BAR = 0.05  # how far a step's gradient norm in bfloat16 may be from that of float32 on the CPU, of itself
TINY_RANKS = 2  # in place of the machine's GPUs
NORM_BAR = 1e-2  # how far the gradient norm of step 1 of one layout may be from another's, of itself
PLAN_BAR = 0.1  # how far the peak of a step's tensors may be from what `plan` says
PROGRAMS = ("make", "gcc", "g++", "nvcc", "ninja", "ncu", "xz", "nvidia-smi", "compute-sanitizer")
NCU_SECTIONS = ("SpeedOfLight", "Occupancy", "LaunchStats", "MemoryWorkloadAnalysis", "WarpStateStats")
PROMPTS, SMOKE_TOKENS = (1, 64), 256


@dataclasses.dataclass(frozen=True)
class Options:
    name: str
    folder: Path
    end: float  # of the part's time, in seconds since the epoch
    tiny: bool
    server_python: str | None
    server_args: tuple[str, ...]

    @property
    def seconds(self) -> float:
        return max(1.0, self.end - time.time())

    @property
    def work(self) -> Work:
        return TINY if self.tiny else QWEN_1_5B

    @property
    def ranks(self) -> int:
        return TINY_RANKS if self.tiny else torch.cuda.device_count()

    @property
    def run(self) -> Path:
        """The folder of the part's run, beside which the model is made."""
        return self.folder.parents[1] / "runs" / self.name

    def out(self, name: str) -> Path:
        """A file that is kept."""
        return self.folder / "out" / name


def probe(options: Options) -> dict[str, Any]:
    """What there is on the machine, and the GPU's ceilings: a product and a copy."""
    found: dict[str, Any] = {
        "glibc": platform.libc_ver(),
        "programs": {name: shutil.which(name) for name in PROGRAMS},
        "free disk bytes": shutil.disk_usage(options.folder).free,
        "shared memory bytes": shutil.disk_usage("/dev/shm").total,
    }
    device, size = (torch.device("cuda"), 8192) if CUDA else (torch.device("cpu"), 64)
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    b = torch.randn_like(a)
    x = torch.empty(1 << (30 if CUDA else 20), device=device, dtype=torch.uint8)
    y = torch.empty_like(x)
    calls = {"product": lambda: a @ b, "copy": lambda: y.copy_(x)}
    seconds = {name: taken["median"] for name, taken in interleaved(calls, device, warm_up=2, rounds=(5, 5)).items()}
    found[f"TFLOP/s of a bfloat16 product of {size}"] = 2 * size**3 / seconds["product"] / 1e12
    found["copy GB/s"] = 2 * x.numel() / seconds["copy"] / 1e9
    return {**found, "exit code": 0}


def tests(options: Options) -> dict[str, Any]:
    """pytest's outcome of the kernels' tests, with compiled kernels where there is a GPU."""
    device, paths = ("cpu", TINY_KERNEL_TESTS) if options.tiny else ("cuda", KERNEL_TESTS)
    report = options.folder / "kernel-tests.xml"
    # By file: test_gpu.py takes 20 GB of a GPU at once, test_triton.py 9.
    spread = ("-n", "3", "--dist", "loadfile") if importlib.util.find_spec("xdist") else ()
    command = [sys.executable, "-P", "-m", "pytest", *paths, *spread, f"--junitxml={report}"]
    environment = {**os.environ, "KERNEL_TESTS_DEVICE": device}
    ended = run_logged(command, options.folder / "kernel-tests.log", options.seconds, cwd=ROOT, env=environment)
    result: dict[str, Any] = {"device": device, "paths": paths, **ended}
    if report.exists():
        suite = ElementTree.parse(report).getroot().find("testsuite")
        result |= {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
        result["skipped because"] = sorted({found.get("message") for found in suite.iter("skipped")})
        counts = ", ".join(f"{result[name]} {name}" for name in ("tests", "failures", "errors", "skipped"))
        result["said"] = [f"on {device} {counts}", *(f"skipped: {reason}" for reason in result["skipped because"])]
        if device == "cuda":
            of_gpu = [test for test in suite.iter("testcase") if GPU_TESTS in test.get("classname")]
            all_ran = bool(of_gpu) and all(test.find("skipped") is None for test in of_gpu)
            result["passed"] = ended["exit code"] == 0 and all_ran
    return result


def gemms(options: Options) -> dict[str, Any]:
    import gemms

    found = gemms.figures(*((16, 300, 16) if options.tiny else (8192, 152064, 5120)))
    failed = any("failed" in one for name, chunk in found.items() if name.startswith("chunk") for one in chunk.values())
    return {**found, "exit code": 0, "passed": not (failed and CUDA)}


def head(options: Options) -> dict[str, Any]:
    """What benchmarks/head.py wrote, as far as it came."""
    arguments = ["--only", "tiny" if options.tiny else HEAD_CASES] if options.name == "head" else ["--longest"]
    arguments += ["--tiny"] if options.tiny else []
    command = [sys.executable, "-P", str(ROOT / "benchmarks" / "head.py"), "--quick"]
    command += ["--out", str(options.folder), *arguments]
    ended = run_logged(command, options.folder / "head.log", options.seconds, cwd=ROOT)
    figures = options.folder / "head.json"
    found = json.loads(figures.read_text(encoding="utf-8")) if figures.exists() else {}
    if (table := options.folder / "head.md").exists():
        shutil.copy(table, options.out(f"{options.name}.md"))
    return {**found, **ended}


def training(options: Options) -> dict[str, Any]:
    """Three steps' figures."""
    backend = training_steps.backend_here()
    result = training_steps.run(options.work, options.run, backend, options.seconds)
    ratio = result.get("peak over plan")
    as_planned = ratio is None or abs(ratio - 1) <= PLAN_BAR
    return {**result, "passed": result["exit code"] == 0 and as_planned}


def beside_peers(options: Options) -> dict[str, Any]:
    """Three updates of ours, TRL and verl on the same rollouts; a peer that is not installed is left out."""
    python, out = training_beside_peers.peers_python(), options.out("beside_peers.json")
    site = unpacked("peers", options.folder.parents[1]) if python == sys.executable else None
    return training_beside_peers.run(options.work, options.run, python, site, options.seconds, out)


def families(options: Options) -> dict[str, Any]:
    """Steps of a small model of every family, and of one family by every way of training, all at once: in bfloat16 on
    the GPU, and of the same weights in float32 on the CPU, whose gradient norms must agree."""
    from transformers import AutoTokenizer  # noqa: F401  here, since two threads cannot import it at once

    from dynamo_megatron.models import FAMILIES

    cases = {name: (name, ()) for name in FAMILIES if name != "mistral"}  # SGLang would ignore its window
    cases |= {name: ("qwen2", words) for name, words in METHODS.items()}
    if options.tiny:
        cases = {name: cases[name] for name in ("gemma3_text", "qwen3_moe", "lora", "critic")}
    os.environ["OMP_NUM_THREADS"] = "1"
    here = ("gpu", training_steps.backend_here(), (), {})
    cpu = ("cpu", "torch", ("model.dtype=float32",), {"CUDA_VISIBLE_DEVICES": ""})

    def train(name: str) -> dict[str, list[Any]]:
        work, found = dataclasses.replace(FAMILY, family=cases[name][0]), {"log": []}
        for where, backend, more, environment in (here, cpu):
            folder, words = options.run / name / where, (*cases[name][1], *more)
            ran = training_steps.run(work, folder, backend, options.seconds, words=words, environment=environment)
            found["log"] += ran.get("log", [])[-2:]
            found[where] = [step["gradient norm"] for step in ran.get("steps", [])]
        return found

    with ThreadPoolExecutor(2 if options.tiny else os.cpu_count()) as pool:
        found = dict(zip(cases, pool.map(train, cases), strict=True))
    wrong = []
    for name, norms in found.items():
        off = [abs(gpu / cpu - 1) for gpu, cpu in zip(norms["gpu"], norms["cpu"], strict=False)]
        if len(off) != FAMILY.steps or not max(off) <= FAMILY_BAR:
            wrong.append(f"{name}: gradient norms and logs {norms}")
    return {"gradient norms": found, "exit code": int(bool(wrong)), "wrong": wrong}


def imports_te(options: Options) -> dict[str, Any]:
    """Without a GPU TransformerEngine computes nothing; its libraries can be loaded."""
    words = "import transformer_engine.pytorch; import megatron.core.extensions.transformer_engine"
    return run_logged([sys.executable, "-P", "-c", words], options.folder / "import.log", options.seconds)


def trace(options: Options) -> dict[str, Any]:
    """Three steps, the last one under torch's profiler, whose events are kept."""
    folder, backend = options.run, training_steps.backend_here()
    ran = training_steps.run(options.work, folder, backend, options.seconds, profile_steps=[3])
    result = {name: ran[name] for name in ("exit code", "log", "steps") if name in ran}
    if events := sorted(folder.glob("profile/*.json.gz")):
        result |= summary(events[0])
        shutil.copy(events[0], options.out(f"{options.name}.events.json.gz"))
        busy, whole = result["GPU busy seconds"], result["seconds traced"]
        result["said"] = [f"of {whole:.2f} s the GPU was busy for {busy:.2f} s, {result['launches']} launches"]
    return {**result, "passed": ran["exit code"] == 0 and bool(events)}


def summary(trace: Path) -> dict[str, Any]:
    """Of a Chrome trace: seconds in which the GPU ran something (union over streams), launches, what the host called
    and read, and the kernels that took longest."""
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    busy = end = 0.0
    for event in sorted(kernels, key=lambda e: e["ts"]):
        stop = event["ts"] + event["dur"]
        busy += max(0.0, stop - max(event["ts"], end))
        end = max(end, stop)
    times: dict[str, list[float]] = collections.defaultdict(list)
    for event in kernels:
        times[event["name"]].append(event["dur"])
    whole = [e for e in events if "ts" in e and "dur" in e]
    calls = collections.Counter(e["name"] for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver"))
    operators = collections.Counter(e["name"] for e in events if e.get("cat") == "cpu_op")
    longest = sorted(times.items(), key=lambda row: -sum(row[1]))[:25]
    return {
        "seconds traced": (max(e["ts"] + e["dur"] for e in whole) - min(e["ts"] for e in whole)) / 1e6,
        "GPU busy seconds": busy / 1e6,
        "launches": len(kernels),
        "host calls": dict(calls.most_common(20)),
        "items read by the host": operators["aten::_local_scalar_dense"],
        "operators": dict(operators.most_common(25)),
        "kernels": [
            {"kernel": name[:110], "count": len(taken), "ms": sum(taken) / 1e3, "of busy": sum(taken) / busy}
            for name, taken in longest
        ],
    }


def syncs(options: Options) -> dict[str, Any]:
    """Where a rank waits for the GPU: torch's warnings, once a place, of a model of two layers."""
    work = options.work if options.tiny else dataclasses.replace(QWEN_1_5B, layers=2, steps=2, prompts=2)
    hook = {"PYTHONPATH": os.pathsep.join([str(HERE / "hooks" / "syncs"), os.environ.get("PYTHONPATH", "")])}
    ran = training_steps.run(work, options.run, training_steps.backend_here(), options.seconds, environment=hook)
    lines = (options.run / "train.log").read_text(encoding="utf-8", errors="replace").splitlines()
    places = [f"{line} {following}" for line, following in itertools.pairwise(lines) if "synchroniz" in line]
    return {"exit code": ran["exit code"], "places": places}


def _version(package: str) -> tuple[int, ...]:
    return tuple(map(int, metadata.version(package).split(".")[:2]))


def ncu(options: Options) -> dict[str, Any]:
    """What Nsight Compute says of the head's two kernels; without a GPU only the program that it would look at."""
    words = ["ncu", "--clock-control", "none", "-k", "regex:statistics_kernel|gradient_kernel", "-s", "2", "-c", "2"]
    words += [word for section in NCU_SECTIONS for word in ("--section", section)]
    shape, interpreted = (("8", "272"), {"TRITON_INTERPRET": "1"}) if options.tiny else (("1024", "152064"), {})
    program = [sys.executable, "-P", str(ROOT / "benchmarks" / "head_kernels.py"), *shape]
    if options.tiny and _version("triton") < (3, 7) and _version("numpy") >= (2, 4):  # as in tests/conftest.py
        return {"exit code": 0, "said": ["Triton's interpreter before 3.7 does not work with NumPy 2.4 and later"]}
    log = options.folder / "ncu.log"
    command = program if options.tiny else [*words, *program]
    ended = run_logged(command, log, options.seconds, cwd=ROOT, env=os.environ | interpreted)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return {**ended, "sections": lines}


def smoke(options: Options) -> dict[str, Any]:
    """A server alone: whether it starts and how fast it generates, with what it is given or else without CUDA graphs
    and compiled kernels. What starts is kept for the parts after this one."""
    attempts: list[dict[str, Any]] = []
    for arguments, environment in ((options.server_args, {}), (PLAIN, PLAIN_ENVIRONMENT)):
        os.environ |= environment
        attempts.append({"arguments": arguments, **served(options, arguments, options.seconds)})
        if attempts[-1]["passed"]:
            if CUDA and options.server_args:
                chosen = options.folder.parents[1] / "server.json"
                chosen.write_text(json.dumps([arguments, environment]), encoding="utf-8")
            break
        if not CUDA:
            break
    return {"attempts": attempts, "exit code": int(not attempts[-1]["passed"])}


def served(options: Options, arguments: Sequence[str], seconds: float) -> dict[str, Any]:
    """Seconds until a server answers, and tokens a second of 1 and 64 requests."""
    from dynamo_megatron.config import ModelConfig, RolloutConfig
    from dynamo_megatron.rollout.client import SGLangClient, open_session
    from dynamo_megatron.rollout.result import RolloutError
    from dynamo_megatron.rollout.servers.server import SGLangServer

    options.run.mkdir(parents=True, exist_ok=True)
    model, _ = training_steps.write_model(options.work, options.run)
    config = RolloutConfig(
        python=options.server_python,
        server_args=list(arguments) if CUDA else [],
        memory_fraction=0.2,
        max_new_tokens=SMOKE_TOKENS,
        start_timeout=max(1.0, seconds - 20.0),
        offload=False,
    )
    server = SGLangServer(config, ModelConfig(path=str(model), dtype=options.work.dtype), options.run / "server.log")
    found: dict[str, Any] = {"passed": False}

    async def ask() -> None:
        await server.wait_ready()
        found["seconds to answer"] = time.monotonic() - begin
        async with open_session() as session:
            client = SGLangClient(session, server.endpoint, config, [])
            for count, turn in itertools.product(PROMPTS, ("first", "second")):
                start = time.monotonic()
                requests = [client.generate(f"{count}-{turn}-{i}", list(range(1, 9))) for i in range(count)]
                responses = await asyncio.gather(*requests)
                made = sum(len(response.tokens) for response in responses)
                found[f"tokens a second of {count}, {turn}"] = made / (time.monotonic() - start)
        found["passed"] = not any(response.error for response in responses)

    begin = time.monotonic()
    server.start()
    try:
        asyncio.run(asyncio.wait_for(ask(), seconds))
    except (RolloutError, TimeoutError) as error:
        found["failed"] = str(error) or "time was up"
    finally:
        server.stop()
    return found


def live(options: Options) -> dict[str, Any]:
    """Figures of steps with a server. On 80 GB both need to be smaller: `plan` has 84 GiB for what an H200 gets."""
    work, server = options.work, live_steps.Servers(options.server_python, options.server_args)
    if CUDA and torch.cuda.get_device_properties(0).total_memory < SMALL_GPU:
        work = dataclasses.replace(work, micro_batch_tokens=4096)
        server = dataclasses.replace(server, memory_fraction=0.2)
    ranks = options.ranks if options.name == "live-ranks" else 1
    result = live_steps.run(options.name, work, options.run, server, options.seconds, ranks)
    return {**result, "passed": result["exit code"] == 0 and not result["wrong"]}


def demo(options: Options) -> dict[str, Any]:
    """The demo's RL on one rank: 64 steps in float32, its metrics and evaluations."""
    task = options.run / "task"
    subprocess.run([sys.executable, "-P", str(ROOT / "tools" / "demo_task.py"), str(task)], check=True, cwd=ROOT)
    words = ["configs/demo/rl.yaml", "configs/methods/dynamo.yaml", "parallel.tp=1"]
    words += [f"data.source={task}/pool.jsonl", f"eval.data={task}/held_out.jsonl"]
    words += ["trainer.steps=3", "eval.every=3"] if options.tiny else []
    if CUDA:
        server = ",".join(["--disable-radix-cache", *options.server_args])
        words += ["rollout.memory_fraction=0.3", "rollout.offload=false", f"rollout.server_args=[{server}]"]
        words += ["eval.limit=256"]  # all 1,024 problems take 12 s, twice
    return trained(words, options)


def small_run(options: Options) -> dict[str, Any]:
    """SmolLM2-135M on GSM8K, its metrics: the weights and the problems are in .kit (docs/gpu.md) or in models."""
    options.run.mkdir(parents=True, exist_ok=True)
    if options.tiny:
        model, problems = training_steps.write_model(options.work, options.run)
        words = [f"model.path={model}", "model.dtype=float32", "rollout.max_new_tokens=8", "trainer.steps=2"]
        words += ["data.batch_prompts=2", "algorithm.allocation.budget=8"]
    else:
        model, problems = ROOT / "models" / "smollm2-135m", KIT / "gsm8k_train.jsonl"
        if pieces := sorted(KIT.glob("smollm2.gguf.*")):
            unpack_smollm2(pieces, model)
        if missing := [str(path) for path in (model / "config.json", problems) if not path.exists()]:
            return {"said": [f"skipped: no {', '.join(missing)}"], "exit code": 0}
        words = ["data.batch_prompts=64", "algorithm.allocation.rollout_n_min=1"] * (options.name == "small-dynamo")
        words += [f"rollout.server_args=[{','.join(['--disable-radix-cache', *options.server_args])}]"]
    words.append(f"data.source={problems}")
    method = f"configs/methods/{options.name.removeprefix('small-')}.yaml"
    return trained(["configs/smollm2_gsm8k.yaml", method, *words], options)


def unpack_smollm2(pieces: list[Path], model: Path) -> None:
    if not model.exists():
        gguf = model.with_name("smollm2.gguf")
        gguf.parent.mkdir(exist_ok=True)
        gguf.write_bytes(b"".join(piece.read_bytes() for piece in pieces))
        aside = model.with_name(".smollm2.unfinished")
        aside.mkdir(exist_ok=True)
        runpy.run_path(str(ROOT / "tools" / "smollm2_to_hf.py"))["convert"](gguf, aside)
        aside.rename(model)


def trained(words: list[str], options: Options) -> dict[str, Any]:
    """`dynamo-megatron train` with these words on one rank; its metrics and evaluations."""
    words = [*words, f"output_dir={options.run / 'run'}"]
    words += [f"rollout.python={options.server_python}"] if options.server_python else []
    command = [sys.executable, "-P", "-m", "dynamo_megatron.cli", "train", *words]
    result: dict[str, Any] = run_logged(command, options.run / "train.log", options.seconds, cwd=ROOT)
    for name in ("metrics", "evaluations"):
        if (file := options.run / "run" / f"{name}.jsonl").exists():
            result[name] = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return result


def layouts(options: Options) -> dict[str, Any]:
    """Three steps' figures on all GPUs, data parallel and with tensor and pipeline parallelism of two, the latter with
    recomputed head gradients."""
    found, backend = {}, training_steps.backend_here()
    for name, parallel, words in (
        ("dp", {}, ()),
        ("tp2", {"tp": 2}, ()),
        ("pp2", {"pp": 2}, ("kernels.gradient=recompute",)),
    ):
        limit, folder = options.seconds / 3, options.run / name
        found[name] = training_steps.run(options.work, folder, backend, limit, options.ranks, parallel, words=words)
    wrong = [f"{name}: exit code {ran['exit code']}" for name, ran in found.items() if ran["exit code"] != 0]
    if not wrong:
        norms = {name: ran["steps"][0]["gradient norm"] for name, ran in found.items()}
        if not all(abs(norm / norms["dp"] - 1) <= NORM_BAR for norm in norms.values()):
            wrong.append(f"step 1: gradient norms {', '.join(f'{name} {norm:.6g}' for name, norm in norms.items())}")
    return {"layouts": found, "exit code": int(bool(wrong)), "wrong": wrong}


PARTS: dict[str, Callable[[Options], dict[str, Any]]] = {
    "probe": probe,
    "tests": tests,
    "gemms": gemms,
    "head": head,
    "longest": head,
    "training": training,
    "training_te": training,
    "beside-peers": beside_peers,
    "families": families,
    "trace": trace,
    "trace_te": trace,
    "syncs": syncs,
    "ncu": ncu,
    "smoke": smoke,
    **dict.fromkeys(live_steps.WAYS, live),
    "demo": demo,
    "small-dynamo": small_run,
    "small-grpo": small_run,
    "layouts": layouts,
}


def said(name: str, result: dict[str, Any]) -> list[str]:
    """A part's outcome in a few lines for the terminal."""
    lines = list(result.get("said", []))
    for layout, ran in {"": result, **result.get("layouts", {})}.items():
        if last := ran.get("headline"):
            figures = (f"{key} {value:.4g}" for key, value in last.items() if isinstance(value, float))
            lines.append(f"{layout or name}: {', '.join(figures)}")
        if (ratio := ran.get("peak over plan")) is not None:
            lines.append(f"peak GPU bytes over those planned: {ratio:.3g}")
    return [*lines, *result.get("wrong", [])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=tuple(PARTS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("seconds", type=float, help="since this process began")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--server-python")
    parser.add_argument("--server-args", type=lambda words: tuple(shlex.split(words)), default=())
    given = vars(parser.parse_args())
    options = Options(end=psutil.Process().create_time() + given.pop("seconds"), **given)
    before = machine(VERSIONS)
    result = (imports_te if options.tiny and options.name.endswith("_te") else PARTS[options.name])(options)
    result = {**result, "machine": before, "said": said(options.name, result)}
    result.setdefault("passed", result["exit code"] == 0)  # of parts that ask for no more
    (options.folder / "result.json").write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what a part has started must not outlive it
    sys.exit(main())
