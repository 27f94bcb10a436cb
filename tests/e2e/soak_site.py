"""A run that a soak hurts, and all that stands around it: its folder, its servers' proxies, its reward service."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml
from background_run import Run
from small_disk import mounting
from soak_meter import Meter, OtherWork, kind_of
from soak_service import REWARD, RewardService

from dynamo_megatron.checkpoint.folder import latest_checkpoint

ROOT = Path(__file__).parents[2]
POLL_EVERY = 0.05  # seconds
DISK, SHARED_MEMORY = "1g", "512m"  # sizes of the file systems that a soak fills
TAIL = 1 << 16  # bytes of metrics.jsonl, more than a line has
LEFT_FOR = 30.0  # seconds until the processes of a run that has ended have ended, too
REFUSED_WITHIN = 300.0  # seconds until a start that is refused has ended
STEP_LINE = re.compile(r"step +\d+/")
SERVERS = ("server-0", "server-1")
VICTIM = "server-1"  # what hurts a server hurts this one, so that the other one lives long enough to show a leak


class Site:
    """`health_timeout`: of the run (rollout.health_timeout); freezes are measured by it. `words`: further config of the
    run. `small_disks`: whether the output folder and /dev/shm are file systems that may be filled."""

    def __init__(
        self,
        folder: Path,
        steps: int,
        seed: int,
        health_timeout: float,
        *,
        isolated: bool,
        words: Sequence[str] = (),
    ):
        self.folder, self.health_timeout = folder, health_timeout
        self.disk, self.output = folder / "disk", folder / "disk" / "run"
        self.shared_memory, self.temporary = Path("/dev/shm"), folder / "tmp"
        for made in (self.disk, self.temporary, folder / "control"):
            made.mkdir(parents=True, exist_ok=True)
        self.service = RewardService()
        self.meter = Meter(self.shared_memory, self.temporary)
        self._other_work = OtherWork()
        self.calm = False  # samples are taken in steps that no fault is part of
        self.run: Run | None = None
        self._sampled = -1
        self._words = [folder / "config.yaml", ROOT / "configs" / "methods" / "dynamo.yaml", f"seed={seed}", *words]
        with contextlib.ExitStack() as mounts:
            sizes = {self.disk: DISK, self.shared_memory: SHARED_MEMORY} if isolated else {}
            mounted = [mounts.enter_context(mounting(place, size)) for place, size in sizes.items()]
            self.small_disks = bool(mounted) and all(mounted)
            self._write(steps)
            self._mounts = mounts.pop_all()

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
        self.run = self._started()

    def _started(self) -> Run:
        return Run(self.folder, *self._words, environment={"TMPDIR": str(self.temporary)})

    def refused(self, says: str) -> str:
        """The only line that the same command has to say when it is started now, once more: it matches `says`, and its
        exit code is 2. Raises ValueError where that is not so, and where it leaves processes."""
        names = {line.partition(": ")[0] for line in self.run.text.splitlines()}  # "disk: ...": of every start
        other = self._started()
        try:
            code = other.wait(REFUSED_WITHIN)
        finally:
            if other.process.poll() is None:
                other.kill()
        lines = [line for line in other.text.splitlines() if line.strip() and line.partition(": ")[0] not in names]
        if code != 2 or len(lines) != 1 or not re.search(says, lines[0]):
            raise ValueError(f"another start ended with exit code {code} and {lines[-3:]}, not with 2 and {says!r}")
        if left := other.left_behind(within=LEFT_FOR):
            raise ValueError(f"another start left after {LEFT_FOR:g} s: {[p.name() for p in left]}")
        return lines[0]

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
            processes = [launcher, *self.run.family]
            other = self._other_work.share(processes)
            self.meter.sample(row["step"], row["time/step"], launcher.pid, processes, other)

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

    def server(self, name: str = VICTIM) -> list[psutil.Process]:
        """The processes of a server, by default the one that is hurt: the guard, the proxy, SGLang's."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and self.alive():
            found = self.run.servers().get(name, [])
            with contextlib.suppress(psutil.NoSuchProcess):
                lasting = [p for p in found if "resource_tracker" not in " ".join(p.cmdline())]
                if len(lasting) > 2:
                    return [lasting[0].parent(), *lasting]
            time.sleep(POLL_EVERY)
        raise TimeoutError(f"{name} has no processes after 120 s")

    def ports(self) -> list[int]:
        """Those of the hurt server's proxy and of its HTTP process."""
        commands = [p.cmdline() for p in self.server()[1:]]
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
    def closed(self) -> Iterator[None]:
        """Meanwhile no server starts (soak_server.py)."""
        file = self.folder / "control" / "closed"
        file.touch()
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

    def gone(self, processes: Sequence[psutil.Process]) -> bool:
        """Whether all of them have ended within LEFT_FOR seconds."""
        return self.wait(lambda: not any(map(_lives, processes)), LEFT_FOR)

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
        self._mounts.close()


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
