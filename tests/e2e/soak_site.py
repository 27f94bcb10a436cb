"""A run that a soak hurts, and all that stands around it: its folder, its servers' proxies, its reward service."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml
from background_run import Run
from soak_meter import Meter, kind_of

from dynamo_megatron.checkpoint.folder import latest_checkpoint

ROOT = Path(__file__).parents[2]
POLL_EVERY = 0.05  # seconds
DISK, SHARED_MEMORY = "1g", "512m"  # sizes of the file systems that a soak fills
TAIL = 1 << 16  # bytes of metrics.jsonl, more than a line has
STEP_LINE = re.compile(r"step +\d+/")
SERVERS = ("server-0", "server-1")
VICTIM = "server-1"  # what hurts a server hurts this one, so that the other one lives long enough to show a leak
REWARD = '''"""Does the response begin with an odd digit? A file fault-NAME makes the next call fail in that way."""
import os
import resource
import signal
import time


def allocate():
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, hard))
    try:
        bytearray(1 << 31)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


FAULTS = {
    "segv": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "memory": allocate,
    "hang": lambda: time.sleep(1e6),
}


def odd(prompt, response):
    for name, fail in FAULTS.items():
        try:
            os.rename("fault-" + name, "done-" + name)  # one worker gets it
        except FileNotFoundError:
            continue
        fail()
    return float(response[:1] in "13579" and response != "")
'''


class RewardService:
    """A reward function behind HTTP that gives 0 for all; while `down`, 503."""

    def __init__(self) -> None:
        service, self.down = self, False

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                samples = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["samples"]
                body = json.dumps({"rewards": [0.0] * len(samples)}).encode()
                self.send_response(503 if service.down else 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()


def mounted(path: Path, size: str) -> bool:
    """Whether a file system of its own, in memory, could be put at `path`."""
    path.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "soak", str(path)], capture_output=True)
    return done.returncode == 0


class Site:
    """`health_timeout`: of the run (rollout.health_timeout); freezes are measured by it. `small_disks`: whether the
    output folder and /dev/shm are file systems that may be filled."""

    def __init__(self, folder: Path, steps: int, seed: int, health_timeout: float, *, isolated: bool):
        self.folder, self.health_timeout = folder, health_timeout
        self.disk, self.output = folder / "disk", folder / "disk" / "run"
        self.shared_memory, self.temporary = Path("/dev/shm"), folder / "tmp"
        for made in (self.disk, self.temporary, folder / "control"):
            made.mkdir(parents=True, exist_ok=True)
        self.small_disks = isolated and mounted(self.disk, DISK) and mounted(self.shared_memory, SHARED_MEMORY)
        self.service = RewardService()
        self.meter = Meter(self.shared_memory, self.temporary)
        self.calm = False  # samples are taken in steps that no fault is part of
        self.run: Run | None = None
        self._sampled = -1
        self._words = [folder / "config.yaml", ROOT / "configs" / "methods" / "dynamo.yaml", f"seed={seed}"]
        self._write(steps)

    def _write(self, steps: int) -> None:
        task, control = self.folder / "task", self.folder / "control"
        subprocess.run([sys.executable, "-P", ROOT / "tools" / "demo_task.py", task], check=True, timeout=300)
        server = self.folder / "server"
        command = [sys.executable, "-P", str(Path(__file__).parent / "soak_server.py"), str(control)]
        server.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        server.chmod(0o755)
        (self.folder / "soak_reward.py").write_text(REWARD)
        config = yaml.safe_load((ROOT / "configs" / "demo" / "rl.yaml").read_text())
        del config["eval"]
        config["model"]["path"], config["data"]["source"] = str(task / "model"), str(task / "pool.jsonl")
        config["rollout"] |= {"servers": 2, "health_timeout": self.health_timeout, "python": str(server)}
        functions = ["soak_reward:odd", self.service.url]
        config["reward"] = {"functions": functions, "on_error": "zero", "deadline": 5.0, "fusion": "sum"}
        config["optimizer"]["lr"] = 1e-6  # at 1e-5 the reward is learnt after 200 steps, and nothing is left to train
        config["trainer"]["steps"], config["checkpoint"] = steps, {"every": 10, "keep_last": 2}
        config["output_dir"] = str(self.output)
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config))

    # -- the run ---------------------------------------------------------------------------------------------------
    def start(self) -> None:
        self.run = Run(self.folder, *self._words, environment={"TMPDIR": str(self.temporary)})

    def last_row(self) -> dict[str, Any]:
        """Metrics of the last step that is done; {} before the first."""
        with contextlib.suppress(OSError), open(self.output / "metrics.jsonl", "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            lines = file.read().split(b"\n")[:-1]  # a torn line has no newline
            return json.loads(lines[-1]) if lines else {}
        return {}

    @property
    def step(self) -> int:
        return self.last_row().get("step", 0)

    @property
    def saved(self) -> int:
        found = latest_checkpoint(self.output / "checkpoints")
        return found[0] if found is not None else 0

    def alive(self) -> bool:
        return self.run is not None and self.run.process.poll() is None

    def watch(self) -> None:
        """Notes new processes, and takes a sample where a step has ended since the last one."""
        self.run.look(every=1.0)
        row = self.last_row() if self.calm else {}
        if row and row["step"] != self._sampled:
            self._sampled = row["step"]
            launcher = psutil.Process(self.run.process.pid)
            self.meter.sample(row["step"], row["time/step"], launcher.pid, [launcher, *self.run.family])

    def pause(self, seconds: float) -> None:
        self.wait(lambda: False, seconds)

    def wait(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Whether it came true before the run ended and `timeout` seconds were over."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and self.alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                self.watch()
            if condition():
                return True
            time.sleep(POLL_EVERY)
        return condition()

    def both_answer(self) -> bool:
        """Whether rollouts of the last step come from each server."""
        row = self.last_row()
        return all(row.get(f"fleet/{name}/rollouts", 0) > 0 for name in SERVERS)

    # -- its processes -----------------------------------------------------------------------------------------------
    def processes(self) -> list[psutil.Process]:
        """All that live, the launcher first."""
        self.run.look()
        return [p for p in (psutil.Process(self.run.process.pid), *self.run.family) if p.is_running()]

    def one(self, kind: str) -> psutil.Process:
        """The only process of this class (soak_meter.kind_of)."""
        (found,) = (p for p in self.processes() if self._kind(p) == kind)
        return found

    def _kind(self, process: psutil.Process) -> str:
        with contextlib.suppress(psutil.Error):
            return kind_of(process, self.run.process.pid)
        return ""

    def victim(self) -> list[psutil.Process]:
        """The processes of the server that is hurt: the guard, the proxy, SGLang's."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and self.alive():
            found = self.run.servers().get(VICTIM, [])
            with contextlib.suppress(psutil.NoSuchProcess):
                lasting = [p for p in found if "resource_tracker" not in " ".join(p.cmdline())]
                if len(lasting) > 2:
                    return [lasting[0].parent(), *lasting]
            time.sleep(POLL_EVERY)
        raise TimeoutError(f"{VICTIM} has no processes after 120 s")

    def ports(self) -> list[int]:
        """Those of the hurt server's proxy and of its HTTP process."""
        commands = [p.cmdline() for p in self.victim()[1:]]
        return [int(words[words.index("--port") + 1]) for words in commands if "--port" in words]

    # -- what stands around it -----------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def proxy(self, **fault: Any) -> Iterator[None]:
        """Meanwhile the hurt server's proxy does this (soak_server.py)."""
        file = self.folder / "control" / f"{VICTIM}.json"
        aside = file.with_suffix(".tmp")
        aside.write_text(json.dumps(fault))
        aside.rename(file)
        try:
            yield
        finally:
            file.unlink()

    @contextlib.contextmanager
    def full(self, folder: Path) -> Iterator[None]:
        """Meanwhile the file system of `folder` has no free byte."""
        file, zeros = folder / ".full", bytes(1 << 20)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT)
        try:
            with contextlib.suppress(OSError):  # full
                while True:
                    os.write(descriptor, zeros)
            yield
        finally:
            os.close(descriptor)
            file.unlink()

    def new_lines(self, start: int) -> list[str]:
        """Of the console from character `start` on, without those of steps."""
        return [line for line in self.run.text[start:].splitlines() if line.strip() and not STEP_LINE.match(line)]

    def kill(self) -> None:
        """SIGKILL to every process of the run."""
        for process in reversed(self.processes()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.run.process.wait()

    def close(self) -> None:
        if self.alive():
            self.kill()
        self.service.close()
        if self.small_disks:
            for folder in (self.disk, self.shared_memory):
                subprocess.run(["umount", "-l", str(folder)], check=False)
