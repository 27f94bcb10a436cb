"""Carries out a comparison's runs one after the other, each with `dynamo-megatron train`."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dynamo_megatron.comparison.curves import Outcome, console_file, outcome_file, to_do, write_outcome
from dynamo_megatron.comparison.fleet import keeps_servers, servers
from dynamo_megatron.comparison.spec import Run
from dynamo_megatron.config import Config
from dynamo_megatron.config.files import ConfigError
from dynamo_megatron.launcher.command import program
from dynamo_megatron.rollout.servers.server import cuda_available
from dynamo_megatron.runtime.log_files import mark, open_log, text_since
from dynamo_megatron.runtime.process_signals import FOR_THE_RANKS, die_with_parent

RESUMABLE = (75, 130)  # exit codes of a run that stopped on request
REFUSED = 2  # exit code of a run whose configuration is refused
RELEASED_WITHIN = 60.0  # seconds to wait for the ranks of a killed comparison to release a run's folder
POLL_EVERY = 0.5  # seconds


class Stop:
    """Receives the signal that asks this process to stop, and forwards it to the child processes."""

    def __init__(self) -> None:
        self.asked: int | None = None
        self._children: set[asyncio.subprocess.Process] = set()

    def watch(self) -> None:
        for number in FOR_THE_RANKS:
            asyncio.get_running_loop().add_signal_handler(number, self._pass_on, number)

    def _pass_on(self, number: int) -> None:
        self.asked = number
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(number)

    @property
    def code(self) -> int:
        """The exit code after a request to stop."""
        return 130 if self.asked == signal.SIGINT else 75

    async def child(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: int | None = None,
        cores: Sequence[int] = (),
    ) -> int:
        """Runs `command` to its end and returns its exit code. stdout and stderr go to the descriptor `output` (None:
        this process's). The command runs on `cores` (empty: this process's), and is killed when this process ends."""
        child = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,  # this process forwards the terminal's Ctrl-C
            env=environment,
            preexec_fn=partial(_begin, os.getpid(), cores),
        )
        self._children.add(child)
        try:
            if self.asked is not None:  # the signal came while the child was being started
                self._pass_on(self.asked)
            return await child.wait()
        finally:
            self._children.discard(child)


def _begin(parent: int, cores: Sequence[int]) -> None:
    die_with_parent(signal.SIGKILL, parent)
    if cores:
        os.sched_setaffinity(0, cores)


async def carry_out(runs: Sequence[Run], every: int, folder: Path, stop: Stop) -> None:
    """Trains the unfinished runs among `runs`, until all have ended or `stop` gets a signal. The comparison has `every`
    runs in all its parts.

    Servers that can stay up do so until a run needs other servers, or has failed: the servers may be the reason.
    `folder` gets their logs. Raises ConfigError where a run is refused, ValueError as `to_do`, RolloutError where
    servers do not come up.
    """
    left = to_do(runs)
    if len(left) < len(runs):
        print(f"{len(runs) - len(left)} of {len(runs)} runs have ended before", flush=True)
    up_for, keys = None, None
    async with contextlib.AsyncExitStack() as stack:
        for number, run in enumerate(left, len(runs) - len(left) + 1):
            if up_for != run.server_options:
                await stack.aclose()
                keys = None
                if keeps_servers(run.config):
                    count = run.config.rollout.servers
                    print(f"starting {count} server{'s' * (count > 1)} for the runs that follow", flush=True)
                    made = servers(run.config, folder, partial(print, flush=True), lambda: stop.asked is not None)
                    keys = await stack.enter_async_context(made)
                up_for = run.server_options
            if stop.asked is not None:
                return
            share = f" ({every} in all parts)" if every > len(runs) else ""
            print(f"run {number} of {len(runs)}{share}, {run.name}: started", flush=True)
            outcome = await _train(run, keys, stop)
            if outcome is None:
                return
            how = "finished" if outcome.finished else f"failed (exit code {outcome.code}): {outcome.said}"
            print(f"run {number} of {len(runs)}{share}, {run.name}: {how}", flush=True)
            if not outcome.finished:
                up_for = None


async def _train(run: Run, keys: dict[str, Any] | None, stop: Stop) -> Outcome | None:
    """Trains one run. Returns None where it stopped on request. Raises ConfigError where the run is refused."""
    await _released(run.folder)
    console = console_file(run)
    outcome_file(run).unlink(missing_ok=True)  # the outcome of an earlier, failed attempt
    own = [f"rollout.{key}={value}" for key, value in (keys or {}).items()]
    environment = {**os.environ, **(_gpus_left(run.config) if keys is not None else {})}
    descriptor, start = open_log(console, 0o644), mark(console)
    began = time.monotonic()
    try:
        code = await stop.child(program(sys.executable, "train", [*run.words, *own]), environment, descriptor)
    finally:
        os.close(descriptor)
    lines = [line for line in text_since(console, start).splitlines() if line.strip()]
    said = lines[-1] if lines else "it said nothing"
    if stop.asked is not None and code != 0:
        return None
    if code == REFUSED:
        raise ConfigError(f"{run.name}: {said} (more in {console})")
    if code in RESUMABLE:
        said = f"{said} (after {time.monotonic() - began:.0f} s)"
    outcome = Outcome(code, said)
    write_outcome(run, outcome)
    return outcome


def _gpus_left(config: Config) -> dict[str, str]:
    """The environment variables with which a run leaves the first GPUs to the servers that stay up."""
    if not cuda_available():
        return {}
    visible, taken = visible_gpus(), config.rollout.servers * config.rollout.tp
    if taken >= len(visible):
        raise ConfigError(
            f"rollout.servers: {config.rollout.servers} of {config.rollout.tp} ranks need {taken} of {len(visible)} "
            "GPUs and leave none to train; use fewer, or rollout.placement=colocated"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[taken:])}


def visible_gpus() -> list[str]:
    """The names of this process's GPUs, for CUDA_VISIBLE_DEVICES."""
    if not cuda_available():
        return []
    import torch

    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names.split(",") if names else [str(i) for i in range(torch.cuda.device_count())]


async def _released(folder: Path) -> None:
    """Waits until no process trains in the run's folder. Raises ConfigError after RELEASED_WITHIN seconds."""
    lock, deadline = folder / ".lock", time.monotonic() + RELEASED_WITHIN
    if not lock.is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        return
    with lock.open("r+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return  # closing the file releases the lock
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"{folder}: waited {RELEASED_WITHIN:g} s for another process to stop training there; end it"
                    ) from None
            await asyncio.sleep(POLL_EVERY)


async def side_by_side(command: Sequence[str], jobs: int, stop: Stop) -> int:
    """Runs `command` `jobs` times with `--part I/JOBS`, each with its share of the GPUs or cores. Returns REFUSED where
    a part was refused, else the highest exit code. Raises ConfigError where there are fewer GPUs (or, without GPUs,
    cores) than jobs."""
    cores, gpus = sorted(os.sched_getaffinity(0)), visible_gpus()
    if jobs > len(gpus or cores):
        raise ConfigError(f"--jobs: {jobs} for {len(gpus or cores)} {'GPUs' if gpus else 'cores'}; give fewer")

    async def part(i: int) -> int:
        environment, share = dict(os.environ), len(gpus) // jobs
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[i * share : (i + 1) * share])
        else:
            environment.setdefault("OMP_NUM_THREADS", "1")  # else a rank would take a share of all cores
        words = [*command, "--part", f"{i + 1}/{jobs}"]
        return await stop.child(words, environment, cores=cores[i::jobs])

    codes = await asyncio.gather(*(part(i) for i in range(jobs)))
    return REFUSED if REFUSED in codes else max(codes)
