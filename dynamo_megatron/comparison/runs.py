"""`dynamo-megatron compare`: trains what is left of a comparison's runs, each with `dynamo-megatron train`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import os
import secrets
import shlex
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dynamo_megatron.comparison.spec import PlannedRun, RunOutcome, planned_runs, read_outcome, read_spec, write_outcome
from dynamo_megatron.comparison.table import write_comparison
from dynamo_megatron.config import Config
from dynamo_megatron.config.files import ConfigError
from dynamo_megatron.launcher.options import program
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.rollout.servers.fleet import server_names
from dynamo_megatron.rollout.servers.server import cuda_available, listening_address
from dynamo_megatron.rollout.servers.supervisor import Supervisor
from dynamo_megatron.runtime.cores import choose_threads
from dynamo_megatron.runtime.listening import free_port, http_url
from dynamo_megatron.runtime.log_files import mark, open_log, text_since
from dynamo_megatron.runtime.plain_text import show
from dynamo_megatron.runtime.process_signals import FOR_THE_RANKS, die_with_parent
from dynamo_megatron.runtime.run_folder import is_held

KEY = "DYNAMO_MEGATRON_COMPARE_KEY"  # the environment variable with the API key of servers and runs
PART = "DYNAMO_MEGATRON_COMPARE_PART"  # the environment variable of a process of --jobs: "PART JOBS", from 0
REFUSED = 2  # exit code of a run whose configuration is refused
RELEASED_WITHIN = 60.0  # seconds to wait for the ranks of a killed comparison to release a run's folder
POLL_EVERY = 0.5  # seconds


def compare(options: argparse.Namespace) -> int:
    """Returns the exit code. Raises ConfigError."""
    spec, ranks = read_spec(options.spec), ["--ranks", str(options.ranks)] if options.ranks else []
    runs, folder = planned_runs(spec, ranks), Path(spec.output_dir) / "servers"
    if options.dry_run:
        for run in runs:
            print(shlex.join(["dynamo-megatron", "train", *run.words]))
        return 0
    if PART in os.environ:
        part, jobs = map(int, os.environ[PART].split())
        return asyncio.run(carry_out(runs[part::jobs], folder / str(part), Stop()))
    if not options.table:
        _say_what_is_left(runs)
        if options.jobs > 1:
            if any(run.config.rollout.placement == "external" for run in runs):
                raise ConfigError("rollout.placement: external: runs would share servers; leave --jobs out")
            command = program(sys.executable, "compare", [options.spec, *ranks])
            code = asyncio.run(side_by_side(command, options.jobs, Stop()))
        else:
            code = asyncio.run(carry_out(runs, folder, Stop()))
        if code:
            _say_what_is_left(runs)
            return code
    return write_comparison(spec, runs)


class Stop:
    """Receives the signal that asks this process to stop, and forwards it to the child processes."""

    def __init__(self) -> None:
        self.asked: int | None = None
        self._children: set[asyncio.subprocess.Process] = set()

    def watch(self) -> None:
        for number in FOR_THE_RANKS:
            asyncio.get_running_loop().add_signal_handler(number, self._forward, number)

    def _forward(self, number: int) -> None:
        self.asked = number
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(number)

    def code(self) -> int:
        """The exit code after a request to stop, which it reports."""
        print("stopped; the same command goes on", file=sys.stderr, flush=True)
        return 130 if self.asked == signal.SIGINT else 75

    async def child(
        self, command: Sequence[str], environment: Mapping[str, str], cores: Sequence[int] = (), **options: Any
    ) -> int:
        """Runs `command` to its end, on `cores` alone where there are any, and returns its exit code. It is killed when
        this process ends. `options`: as of `asyncio.create_subprocess_exec`."""
        child = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            process_group=0,  # this process forwards the terminal's Ctrl-C
            env=environment,
            preexec_fn=functools.partial(_in_child, os.getpid(), cores),
            **options,
        )
        self._children.add(child)
        try:
            if self.asked is not None:  # the signal came while the child was being started
                self._forward(self.asked)
            return await child.wait()
        finally:
            self._children.discard(child)


def _in_child(parent: int, cores: Sequence[int]) -> None:
    die_with_parent(signal.SIGKILL, parent)
    if cores:
        os.sched_setaffinity(0, cores)


async def carry_out(runs: Sequence[PlannedRun], folder: Path, stop: Stop) -> int:
    """Trains those of `runs` that have not ended or have failed but not diverged, one after the other, until all have
    ended or `stop` gets a signal. Returns 0 or the exit code.

    Servers that can stay up do so until a run needs other servers, or has failed: the servers may be the reason.
    `folder` gets their logs. Raises ConfigError where a run is refused.
    """
    stop.watch()
    left = runs_left(runs)
    up_for, keys = None, None
    async with contextlib.AsyncExitStack() as stack:
        for number, run in enumerate(left, len(runs) - len(left) + 1):
            if up_for != run.server_options:
                await stack.aclose()
                up_for, keys = run.server_options, None
                if keeps_servers(run.config):
                    print("starting the servers for the runs that follow", flush=True)
                    try:
                        keys = await stack.enter_async_context(servers(run.config, folder, stop))
                    except RolloutError as error:
                        show(str(error))
                        return 1
            if stop.asked is not None:
                return stop.code()
            print(f"run {number} of {len(runs)}, {run.name}: started", flush=True)
            start = time.monotonic()
            if (outcome := await _train(run, keys, stop)) is None:
                return stop.code()
            took = f"finished in {time.monotonic() - start:.0f} s"
            how = took if outcome.finished else f"failed (exit code {outcome.code}): {outcome.said}"
            print(f"run {number} of {len(runs)}, {run.name}: {how}", flush=True)
            if not outcome.finished:
                up_for = None
    return 0


def runs_left(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Those of `runs` that have not ended, or have failed but not diverged."""
    return [run for run in runs if (outcome := read_outcome(run)) is None or not outcome.final]


def _say_what_is_left(runs: Sequence[PlannedRun]) -> None:
    left = len(runs_left(runs))
    print(f"{len(runs) - left} of {len(runs)} runs have ended; left: {left}", flush=True)


async def _train(run: PlannedRun, keys: dict[str, Any] | None, stop: Stop) -> RunOutcome | None:
    """Trains one run. Returns None where it stopped on request. Raises ConfigError where the run is refused."""
    await released(run.folder)
    console = run.folder.with_name(f"{run.folder.name}.log")
    run.outcome_file.unlink(missing_ok=True)  # the outcome of an earlier, failed attempt
    own, environment = [f"rollout.{key}={value}" for key, value in (keys or {}).items()], dict(os.environ)
    if keys is not None and (gpus := visible_gpus()):  # the first ones are of the servers that stay up
        if not (left := gpus[run.config.rollout.servers * run.config.rollout.tp :]):
            raise ConfigError("rollout.servers: no GPU is left to train; use fewer, or rollout.placement=colocated")
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(left)
    start = mark(console)
    with open(open_log(console, 0o644), "ab") as log:
        command = program(sys.executable, "train", [*run.words, *own])
        code = await stop.child(command, environment, stdout=log, stderr=log)
    said = next((line for line in reversed(text_since(console, start).splitlines()) if line.strip()), "no output")
    if stop.asked is not None and code != 0:
        return None
    if code == REFUSED:
        raise ConfigError(f"{run.name}: {said} (more in {console})")
    write_outcome(run, outcome := RunOutcome(code, said))
    return outcome


async def released(folder: Path) -> None:
    """Waits until no process trains in the run's folder. Raises ConfigError after RELEASED_WITHIN seconds."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + RELEASED_WITHIN
    while is_held(folder):
        if time.monotonic() > deadline:
            raise ConfigError(f"{folder}: another process trains there; end it")
        await asyncio.sleep(POLL_EVERY)


def visible_gpus() -> list[str]:
    """The names of this process's GPUs, for CUDA_VISIBLE_DEVICES."""
    if not cuda_available():
        return []
    import torch

    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names.split(",") if names else [str(i) for i in range(torch.cuda.device_count())]


async def side_by_side(command: Sequence[str], jobs: int, stop: Stop) -> int:
    """Runs `command` once for each of `jobs` parts of the runs, each with its share of the GPUs or cores. Returns
    REFUSED where a part was refused, else the highest exit code (1 for a part that a signal ended). Raises ConfigError
    where there are fewer GPUs (or, without GPUs, cores) than jobs."""
    cores, gpus = sorted(os.sched_getaffinity(0)), visible_gpus()
    if jobs > len(gpus or cores):
        raise ConfigError(f"--jobs: {jobs} for {len(gpus or cores)} {'GPUs' if gpus else 'cores'}; give fewer")
    stop.watch()
    parts, share = [], len(gpus) // jobs
    for i in range(jobs):
        own = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[i * share : (i + 1) * share])}
        if not gpus:  # else a rank would take a share of all cores
            own = dict(os.environ)
            choose_threads(own, 1)
        parts.append(stop.child(command, {**os.environ, **own, PART: f"{i} {jobs}"}, cores[i::jobs]))
    codes = await asyncio.gather(*parts)
    return REFUSED if REFUSED in codes else max(1 if code < 0 else code for code in codes)


def keeps_servers(config: Config) -> bool:
    """Returns True where the servers can stay up between runs: where they do not share GPUs with the ranks."""
    rollout = config.rollout
    if rollout.engine != "sglang" or rollout.placement == "external":
        return False
    return rollout.placement == "split" or not cuda_available()


@contextlib.asynccontextmanager
async def servers(config: Config, folder: Path, stop: Stop) -> AsyncIterator[dict[str, Any]]:
    """Starts `rollout.servers` servers, with logs in FOLDER/logs, each at an address that it keeps when it is
    restarted. They end with the block, or with this process however it ends. Once all are up, or `stop` got a signal,
    yields the `rollout` keys for the runs that use them, with `rollout.placement: external`: each run's first
    weight sync gives the servers its weights.

    Raises RolloutError where a server does not come up, InputError where host or port cannot be used.
    """
    up, lost, names = set(), [], server_names(config.rollout.servers, 1, 0)

    def down(name: str, why: str, final: bool) -> None:
        print(f"{name} is {'not started again' if final else 'started again'}: {why}", flush=True)
        up.discard(name)
        if final:
            lost.append(f"{name}: {why}")

    port, host = config.rollout.port or free_port(len(names)), listening_address(config.rollout.host)
    urls = [http_url(host, port + i) for i in range(len(names))]
    keys = {"placement": "external", "urls": urls, "api_key_env": KEY, "port": port}
    os.environ[KEY] = secrets.token_hex(32)
    own = {"rollout": config.rollout.model_copy(update=keys), "output_dir": str(folder)}
    listener = SimpleNamespace(up=lambda endpoint: up.add(endpoint.name), down=down)
    supervisor = Supervisor(config.model_copy(update=own), names, listener)
    running = asyncio.create_task(supervisor.run())
    try:
        while len(up) < len(names) and stop.asked is None:
            if lost:
                raise RolloutError(f"{lost[0]}; see {folder / 'logs'}")
            if running.done():
                running.result()  # raises what has ended it
            await asyncio.sleep(POLL_EVERY)
        yield keys
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
