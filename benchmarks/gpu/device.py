"""Runs the parts of the GPU check, each in a process group of its own and with a limit, in the order of their names.

    python3 -P benchmarks/gpu/device.py PARTS [--seconds N]     # on a machine with GPUs; `make gpu-check` is the same
    python3 -P benchmarks/gpu/device.py all --tiny              # without a GPU: that the parts run, nothing about speed

PARTS: names with commas between, or a group of GROUPS; docs/gpu.md says what each part does. Needs no network and
installs nothing: what this interpreter lacks comes from .kit/*.tar.xz, where `make gpu-kit` has made them, and the
project is imported from this tree. OUT/device.json is written after each part, OUT/logs.txt has the logs, and at most
six more files come from the parts. A part that fails or is ended stops no other. Exits 0 where all parts that ran
have passed, 2 where none could run.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
KIT = ROOT / ".kit"
SPARE = 10.0  # seconds of a part's limit that it has for its figures after what it runs was ended
PATIENT = 570.0  # a part's limit where the whole run has none
LOG_LINES, LOG_BYTES, LARGEST_FILE, FILES = 25, 200_000, 15e6, 8


@dataclass(frozen=True)
class Part:
    """`limit`: seconds, for an H100. `least`: it is not started with fewer. `needs`: modules besides NEEDED, which may
    be in the archive `archive` of .kit; `optional`: without them the part does less."""

    limit: float
    least: float
    needs: tuple[str, ...] = ()
    archive: str | None = None
    gpus: int = 1
    optional: bool = False


NEEDED = (
    *("torch", "numpy", "triton", "pydantic", "megatron", "transformers", "tokenizers", "safetensors"),
    *("zstandard", "xxhash", "yaml", "jinja2", "psutil", "tqdm", "aiohttp"),
)
TE, SGLANG = ("transformer_engine",), ("sglang",)
PARTS = {
    "probe": Part(60, 10),
    "tests": Part(170, 40, ("pytest",)),
    "gemms": Part(60, 20),
    "head": Part(130, 40),
    "longest": Part(120, 30),
    "training": Part(170, 50),
    "trace": Part(170, 60),
    "syncs": Part(90, 30),
    "ncu": Part(75, 30),
    "training_te": Part(170, 50, TE, "te"),
    "trace_te": Part(170, 60, TE, "te"),
    "beside-peers": Part(360, 120, TE, "te", optional=True),
    "families": Part(240, 90),
    "smoke": Part(190, 60, SGLANG, "sglang"),
    "live-disk": Part(260, 130, SGLANG, "sglang"),
    "live-memory": Part(260, 130, SGLANG, "sglang"),
    "live-turns": Part(260, 130, SGLANG, "sglang"),
    "demo": Part(240, 120, SGLANG, "sglang"),
    "small-dynamo": Part(560, 120, SGLANG, "sglang"),
    "small-grpo": Part(560, 120, SGLANG, "sglang"),
    "layouts": Part(340, 100, gpus=2),
    "live-ranks": Part(260, 130, SGLANG, "sglang", gpus=2),
}
GROUPS = {
    "all": tuple(PARTS),
    "first": ("probe", "tests", "gemms", "head", "training", "ncu", "syncs"),
    "second": ("trace", "training_te", "trace_te", "live-turns", "demo", "live-memory", "syncs"),
    "live": ("smoke", "live-disk", "live-turns", "live-memory"),
}
# For the SGLang of the archive: fa3, its choice on Hopper, and flashinfer are not in it.
ATTENTION = ("--attention-backend", "triton", "--sampling-backend", "pytorch")
GRAPHS = (*ATTENTION, "--cuda-graph-max-bs-decode", "64", "--disable-prefill-cuda-graph")
# If a server does not start with these: no graphs, and torch's operators in place of SGLang's compiled ones.
PLAIN = (*ATTENTION, "--disable-cuda-graph")
PLAIN_ENVIRONMENT = {"SGLANG_FORCE_FUSED_OP_BACKEND": "torch"}
ARCHIVE_ENVIRONMENT = {
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",  # 0.4.5 is what loads with torch 2.11; 0.5.23 asks for 0.4.9
    "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",  # the Rust one is built for torch 2.14
}


class Sites:
    """The folders that parts import from, besides this interpreter's own. `server_python` has an SGLang of its own."""

    def __init__(self, work: Path, server_python: str | None):
        self._work, self._server_python = work, server_python
        self._project = [] if is_this_tree("dynamo_megatron") else [str(project_in(work / "project"))]

    def needs(self, part: Part) -> tuple[str, ...]:
        return () if part.needs == SGLANG and self._server_python else part.needs

    def path(self, part: Part) -> list[str]:
        folders: list[str] = []
        for archive, modules in (("base", NEEDED), (part.archive, self.needs(part))):
            if archive and lacking(modules, folders) and (folder := unpacked(archive, self._work)):
                folders.append(folder)
        return [*self._project, *folders]

    def serves_from_archive(self, part: Part) -> bool:
        return str(self._work / "sglang") in self.path(part)

    def lacking(self, part: Part) -> list[str]:
        return lacking((*NEEDED, *(() if part.optional else self.needs(part))), self.path(part))


def is_this_tree(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    return spec is not None and bool(spec.origin) and ROOT.resolve() in Path(spec.origin).resolve().parents


def project_in(site: Path) -> Path:
    """The package as setup.py lays it out: three folders of this tree are subpackages of dynamo_megatron."""
    package = site / "dynamo_megatron"
    package.mkdir(parents=True, exist_ok=True)
    besides = [ROOT / name for name in ("configs", "kernels", "launcher")]
    for source in [*(ROOT / "dynamo_megatron").iterdir(), *besides]:
        if source.name != "__pycache__" and not (package / source.name).is_symlink():
            (package / source.name).symlink_to(source.resolve())
    return site


def lacking(modules: tuple[str, ...], folders: list[str]) -> list[str]:
    """Those of `modules` that neither this interpreter nor `folders` have."""
    finder = importlib.machinery.PathFinder
    return [m for m in modules if not (importlib.util.find_spec(m) or finder.find_spec(m, folders))]


def unpacked(name: str, work: Path) -> str | None:
    """The folder of .kit/NAME.tar.xz, unpacked once; None where it is not there, or made for another Python."""
    archive, folder = KIT / f"{name}.tar.xz", work / name
    if not archive.exists() or sys.version_info[:2] != (3, 12):
        return None
    mark, state = folder.with_suffix(".unpacked"), str(archive.stat().st_size)
    if not mark.exists() or mark.read_text() != state:
        shutil.rmtree(folder, ignore_errors=True)
        with tarfile.open(archive, "r:xz") as tar:
            tar.extractall(folder, filter="data")
        mark.write_text(state)
    return str(folder)


class Run:
    """The parts' outcomes, in OUT/device.json."""

    def __init__(self, options: argparse.Namespace):
        self._options, self._begin, self.sites = options, time.monotonic(), Sites(options.work, options.server_python)
        self._file = options.out / "device.json"
        before = json.loads(self._file.read_text(encoding="utf-8")) if self._file.exists() else {}
        self.found: dict[str, Any] = {name: one for name, one in before.items() if one.get("tiny") == options.tiny}

    def left(self) -> float:
        whole = self._options.seconds
        return float("inf") if whole is None else whole - (time.monotonic() - self._begin)

    def passed(self, name: str) -> bool:
        return self.found.get(name, {}).get("exit code") == 0

    def why_not(self, name: str, gpus: int) -> str | None:
        """Why a part is left out."""
        part = PARTS[name]
        if modules := self.sites.lacking(part):
            return f"{sys.executable} has no {', '.join(modules)}"
        if gpus < part.gpus and not self._options.tiny:
            return f"it needs {part.gpus} GPUs"
        if self.left() < part.least:
            return f"{self.left():.0f} s were left, it needs {part.least:.0f}"
        return None

    def keep(self, name: str, entry: dict[str, Any]) -> None:
        self.found[name] = {"tiny": self._options.tiny, **entry}
        text = json.dumps(self.found, indent=1).replace(f"{ROOT}/", "")  # the file is kept, of whatever machine
        self._file.write_text(text + "\n", encoding="utf-8")

    def part(self, name: str) -> None:
        """One part: a process group of its own, ended after its limit or when the whole run's time is up."""
        options, part, begin = self._options, PARTS[name], time.monotonic()
        limit = PATIENT if options.seconds is None else min(part.limit, self.left() - 5)
        folder, run = options.work / "parts" / name, options.work / "runs" / name
        for before in (folder, run):
            shutil.rmtree(before, ignore_errors=True)
        (folder / "out").mkdir(parents=True)
        log, result = folder / "part.log", folder / "result.json"
        arguments, environment = self._server(name)
        command = [sys.executable, "-P", str(HERE / "parts.py"), name, str(folder), str(limit - SPARE)]
        command += [*(["--tiny"] if options.tiny else []), f"--server-args={shlex.join(arguments)}"]
        command += ["--server-python", options.server_python] if options.server_python else []
        with open(log, "w", encoding="utf-8") as file:
            process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=self._environment(part) | environment,
                cwd=ROOT,
                start_new_session=True,
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end(process)
        seconds = round(time.monotonic() - begin, 1)
        entry: dict[str, Any] = {"exit code": code, "seconds": seconds, "limit": round(limit)}
        if result.exists():
            entry["figures"] = json.loads(result.read_text(encoding="utf-8"))
        entry["log"] = tail(log, LOG_LINES)
        if code != 0:
            entry["logs"] = {f.name: tail(f, LOG_LINES) for f in self._logs(name) if f != log}
        self.keep(name, entry)
        self._bring(name, folder / "out")
        print(f"{name}: {'passed' if code == 0 else 'FAILED'}, exit code {code}, {seconds} s", flush=True)
        figures = entry.get("figures", {})
        for line in figures.get("said", []) if code == 0 else [*entry["log"], *figures.get("log", [])]:
            print(f"  {line}", flush=True)

    def _environment(self, part: Part) -> dict[str, str]:
        path = [*self.sites.path(part), *filter(None, [os.environ.get("PYTHONPATH")])]
        words = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        words |= {"TRITON_CACHE_DIR": str(self._options.work / "triton"), "PYTHONPATH": os.pathsep.join(path)}
        words.setdefault("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "4"))
        environment = {**os.environ, **words}
        if not self._options.tiny:
            environment.pop("TRITON_INTERPRET", None)  # the compiled kernels are what is asked about
        return environment

    def _server(self, name: str) -> tuple[list[str], dict[str, str]]:
        """Arguments and environment of servers on a GPU: what was given, or what the archive's SGLang needs."""
        given = dict(word.split("=", 1) for word in self._options.server_env)
        if self._options.server_args is not None:
            return shlex.split(self._options.server_args), given
        if self._options.server_python or not self.sites.serves_from_archive(PARTS[name]):
            return [], given
        chosen = self._options.work / "server.json"  # what started in `smoke`
        if name == "demo":  # heads of a size that no kernel in the archive has
            arguments, environment = list(PLAIN), PLAIN_ENVIRONMENT
        elif chosen.exists() and name != "smoke":
            arguments, environment = json.loads(chosen.read_text(encoding="utf-8"))
        else:
            arguments, environment = list(GRAPHS), {}
        return arguments, ARCHIVE_ENVIRONMENT | environment | given

    def _logs(self, name: str) -> list[Path]:
        return [log for kind in ("parts", "runs") for log in sorted((self._options.work / kind / name).rglob("*.log"))]

    def _bring(self, name: str, made: Path) -> None:
        """The part's logs, and of the folder `made` the files that are small enough, into OUT."""
        out = self._options.out
        with open(out / "logs.txt", "a", encoding="utf-8") as file:
            for log in self._logs(name):
                text = log.read_text(encoding="utf-8", errors="replace")[-LOG_BYTES:]
                file.write(f"\n===== {name}: {log.name}\n{text}\n")
        for file in sorted(made.iterdir()):
            if file.stat().st_size < LARGEST_FILE and len(list(out.iterdir())) < FILES:
                shutil.copy(file, out / file.name)


def tail(log: Path, lines: int) -> list[str]:
    return [line[:400] for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]]


def end(process: subprocess.Popen) -> None:
    """Ends a part and what it has started. It is asked first: its own children have process groups of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(5)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    process.wait()


def gpus_here(python_path: list[str]) -> int:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(python_path)}
    command = [sys.executable, "-P", "-c", "import torch; print(torch.cuda.device_count())"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return int(done.stdout) if done.returncode == 0 else 0


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="?", default="all", help=f"{', '.join(GROUPS)}, or of {', '.join(PARTS)}")
    parser.add_argument("--seconds", type=float, help="of all parts together; default: 570 for each part")
    parser.add_argument("--tiny", action="store_true", help="small shapes; runs on a CPU")
    parser.add_argument("--resume", action="store_true", help="leaves out the parts that OUT/device.json has passed")
    parser.add_argument("--server-python", metavar="PYTHON", help="an interpreter with SGLang; default: this one")
    parser.add_argument("--server-args", metavar="WORDS", help="of sglang.launch_server on a GPU, as one word")
    parser.add_argument("--server-env", action="append", default=[], metavar="NAME=VALUE", help="of the live parts")
    work = ROOT / "runs" / "gpu"
    parser.add_argument("--work", type=Path, default=work, metavar="FOLDER", help="10 GB; default: runs/gpu")
    out = os.environ.get("OUT")
    parser.add_argument("--out", type=Path, default=out, metavar="FOLDER", help="default: $OUT, or out in --work")
    options = parser.parse_args()
    options.work = options.work.absolute()
    options.out = (options.out or options.work / "out").absolute()
    names = GROUPS.get(options.parts) or options.parts.split(",")
    options.names = [name.replace("live_", "live-") for name in names]
    if unknown := [name for name in options.names if name not in PARTS]:
        parser.error(f"no part or group {', '.join(unknown)}; there are {', '.join([*GROUPS, *PARTS])}")
    return options


def main() -> int:
    options = options_of()
    for folder in (options.work, options.out):
        folder.mkdir(parents=True, exist_ok=True)
    run = Run(options)
    gpus = gpus_here(run.sites.path(PARTS["probe"]))
    if not (gpus or options.tiny):
        print("gpu-check: needs a GPU and torch; --tiny shows on a CPU that the parts run", file=sys.stderr)
        return 2
    ran = []
    for name in options.names:
        if options.resume and run.passed(name):
            continue
        if (reason := run.why_not(name, gpus)) is not None:
            print(f"{name}: left out: {reason}", flush=True)
            if not run.passed(name):
                run.keep(name, {"left out": reason})
            continue
        run.part(name)
        ran.append(name)
    print(f"written: {options.out / 'device.json'}")
    return int(not all(map(run.passed, ran))) if ran or options.resume else 2


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a part must not outlive this command
    sys.exit(main())
