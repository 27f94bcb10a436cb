"""`dynamo-megatron compare`: trains what is left of a comparison's runs, each with `dynamo-megatron train`.

    python -P -m dynamo_megatron.comparison.runs SPEC PART JOBS RANKS

is what one of JOBS processes side by side carries out: every JOBS-th run from PART on, with servers of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import shlex
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamo_megatron.comparison.spec import PlannedRun, RunOutcome, planned_runs, read_outcome, read_spec, write_outcome
from dynamo_megatron.comparison.table import write_comparison
from dynamo_megatron.config import Config
from dynamo_megatron.config.files import ConfigError
from dynamo_megatron.launcher.options import program
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.rollout.servers.endpoint import Endpoint
from dynamo_megatron.rollout.servers.fleet import server_names
from dynamo_megatron.rollout.servers.server import cuda_available, listening_address
from dynamo_megatron.rollout.servers.supervisor import Supervisor
from dynamo_megatron.runtime.free_ports import free_port
from dynamo_megatron.runtime.listening import http_url
from dynamo_megatron.runtime.log_files import mark, open_log, text_since
from dynamo_megatron.runtime.plain_text import show
from dynamo_megatron.runtime.process_signals import FOR_THE_RANKS, die_with_parent
from dynamo_megatron.runtime.run_folder import is_held

KEY = "DYNAMO_MEGATRON_COMPARE_KEY"  # the environment variable with the API key of servers and runs
REFUSED = 2  # exit code of a run whose configuration is refused
RELEASED_WITHIN = 60.0  # seconds to wait for the ranks of a killed comparison to release a run's folder
POLL_EVERY = 0.5  # seconds


def compare(options: argparse.Namespace) -> int:
    """Returns the exit code. Raises ConfigError."""
    spec, ranks = read_spec(options.spec), str(options.ranks or "")
    runs = planned_runs(spec, ["--ranks", ranks] if ranks else [])
    if options.dry_run:
        for run in runs:
            print(shlex.join(["dynamo-megatron", "train", *run.words]))
        return 0
    if not options.table:
        if options.jobs > 1:
            if any(run.config.rollout.placement == "external" for run in runs):
                raise ConfigError("rollout.placement: external: runs would share servers; leave --jobs out")
            command = [sys.executable, "-P", "-m", "dynamo_megatron.comparison.runs", options.spec]
            code = asyncio.run(side_by_side(command, options.jobs, ranks, Stop()))
        else:
            code = asyncio.run(carry_out(runs, Path(spec.output_dir) / "servers", Stop()))
        if code:
            return code
    return write_comparison(spec, runs)


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

    def code(self) -> int:
        """The exit code after a request to stop, which it reports."""
        print("stopped; the same command goes on", file=sys.stderr, flush=True)
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
        parent = os.getpid()

        def begin() -> None:
            die_with_parent(signal.SIGKILL, parent)
            if cores:
                os.sched_setaffinity(0, cores)

        streams = {"stdin": asyncio.subprocess.DEVNULL, "stdout": output, "stderr": output}
        child = await asyncio.create_subprocess_exec(
            *command,
            **streams,
            process_group=0,  # this process forwards the terminal's Ctrl-C
            env=environment,
            preexec_fn=begin,
        )
        self._children.add(child)
        try:
            if self.asked is not None:  # the signal came while the child was being started
                self._pass_on(self.asked)
            return await child.wait()
        finally:
            self._children.discard(child)


async def carry_out(runs: Sequence[PlannedRun], folder: Path, stop: Stop) -> int:
    """Trains those of `runs` that have not ended or have failed but not diverged, one after the other, until all have
    ended or `stop` gets a signal. Returns 0 or the exit code.

    Servers that can stay up do so until a run needs other servers, or has failed: the servers may be the reason.
    `folder` gets their logs. Raises ConfigError where a run is refused.
    """
    stop.watch()
    left = [run for run in runs if (outcome := read_outcome(run)) is None or not outcome.final]
    if len(left) < len(runs):
        print(f"{len(runs) - len(left)} of {len(runs)} runs have ended before", flush=True)
    up_for, keys = None, None
    async with contextlib.AsyncExitStack() as stack:
        for number, run in enumerate(left, len(runs) - len(left) + 1):
            if up_for != run.server_options:
                await stack.aclose()
                keys = None
                if keeps_servers(run.config):
                    print("starting the servers for the runs that follow", flush=True)
                    try:
                        keys = await stack.enter_async_context(servers(run.config, folder, stop))
                    except RolloutError as error:
                        show(str(error))
                        return 1
                up_for = run.server_options
            if stop.asked is not None:
                return stop.code()
            print(f"run {number} of {len(runs)}, {run.name}: started", flush=True)
            outcome = await _train(run, keys, stop)
            if outcome is None:
                return stop.code()
            how = "finished" if outcome.finished else f"failed (exit code {outcome.code}): {outcome.said}"
            print(f"run {number} of {len(runs)}, {run.name}: {how}", flush=True)
            if not outcome.finished:
                up_for = None
    return 0


async def _train(run: PlannedRun, keys: dict[str, Any] | None, stop: Stop) -> RunOutcome | None:
    """Trains one run. Returns None where it stopped on request. Raises ConfigError where the run is refused."""
    await released(run.folder)
    console = run.folder.with_name(f"{run.folder.name}.log")
    run.outcome_file.unlink(missing_ok=True)  # the outcome of an earlier, failed attempt
    own = [f"rollout.{key}={value}" for key, value in (keys or {}).items()]
    environment = dict(os.environ)
    if keys is not None and (gpus := visible_gpus()):  # the first ones are of the servers that stay up
        if not (left := gpus[run.config.rollout.servers * run.config.rollout.tp :]):
            raise ConfigError("rollout.servers: no GPU is left to train; use fewer, or rollout.placement=colocated")
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(left)
    descriptor, start = open_log(console, 0o644), mark(console)
    try:
        code = await stop.child(program(sys.executable, "train", [*run.words, *own]), environment, descriptor)
    finally:
        os.close(descriptor)
    lines = [line for line in text_since(console, start).splitlines() if line.strip()]
    said = lines[-1] if lines else "no output"
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


async def side_by_side(command: Sequence[str], jobs: int, ranks: str, stop: Stop) -> int:
    """Runs `command PART JOBS RANKS` for every part, each with its share of the GPUs or cores. Returns REFUSED where a
    part was refused, else the highest exit code. Raises ConfigError where there are fewer GPUs (or, without GPUs,
    cores) than jobs."""
    cores, gpus = sorted(os.sched_getaffinity(0)), visible_gpus()
    if jobs > len(gpus or cores):
        raise ConfigError(f"--jobs: {jobs} for {len(gpus or cores)} {'GPUs' if gpus else 'cores'}; give fewer")
    stop.watch()

    async def part(i: int) -> int:
        environment, share = dict(os.environ), len(gpus) // jobs
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[i * share : (i + 1) * share])
        else:
            environment.setdefault("OMP_NUM_THREADS", "1")  # else a rank would take a share of all cores
        return await stop.child([*command, str(i), str(jobs), ranks], environment, cores=cores[i::jobs])

    codes = await asyncio.gather(*(part(i) for i in range(jobs)))
    return REFUSED if REFUSED in codes else max(codes)


def keeps_servers(config: Config) -> bool:
    """Returns True where the servers can stay up between runs: where they do not share GPUs with the ranks."""
    rollout = config.rollout
    if rollout.engine != "sglang" or rollout.placement == "external":
        return False
    return rollout.placement == "split" or not cuda_available()


class _Listener:
    """Records which servers are up; the supervisor calls it."""

    def __init__(self) -> None:
        self.up_now: set[str] = set()
        self.lost: dict[str, str] = {}  # servers that will not be restarted: name -> reason

    def up(self, endpoint: Endpoint) -> None:
        self.up_now.add(endpoint.name)

    def down(self, name: str, why: str, final: bool) -> None:
        print(f"{name} is {'not started again' if final else 'started again'}: {why}", flush=True)
        self.up_now.discard(name)
        self.lost |= {name: why} if final else {}


@contextlib.asynccontextmanager
async def servers(config: Config, folder: Path, stop: Stop) -> AsyncIterator[dict[str, Any]]:
    """Starts `rollout.servers` servers, with logs in FOLDER/logs, each at an address that it keeps when it is
    restarted. They end with the block, or with this process however it ends. Once all are up, or `stop` got a signal,
    yields the `rollout` keys for the runs that use them, with `rollout.placement: external`: each run's first
    weight sync gives the servers its weights.

    Raises RolloutError where a server does not come up, ConfigError where host or port cannot be used.
    """
    names = server_names(config.rollout.servers, 1, 0)
    try:
        port, host = config.rollout.port or free_port(len(names)), listening_address(config.rollout.host)
        urls = [http_url(host, port + i) for i in range(len(names))]
        keys = {"placement": "external", "urls": urls, "api_key_env": KEY, "port": port}
        os.environ[KEY] = secrets.token_hex(32)
        rollout, listener = config.rollout.model_copy(update=keys), _Listener()
        own = config.model_copy(update={"rollout": rollout, "output_dir": str(folder)})
        supervisor = Supervisor(own, names, listener)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    running = asyncio.create_task(supervisor.run())
    limit = config.rollout.start_timeout
    deadline = time.monotonic() + limit
    try:
        while (missing := sorted(set(names) - listener.up_now)) and stop.asked is None:
            if listener.lost or time.monotonic() > deadline:
                why = next(iter(listener.lost.values()), f"not up within rollout.start_timeout ({limit:g} s)")
                raise RolloutError(f"{', '.join(missing)}: {why}; see {folder / 'logs'}")
            await asyncio.sleep(POLL_EVERY)
        yield keys
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def main(word: str, part: int, jobs: int, ranks: str) -> int:
    spec = read_spec(word)
    runs = planned_runs(spec, ["--ranks", ranks] if ranks else [])
    try:
        return asyncio.run(carry_out(runs[part::jobs], Path(spec.output_dir) / "servers" / str(part), Stop()))
    except ConfigError as error:
        show(str(error))
        return REFUSED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
