"""One rank of a command from its config to its exit code: what `train` and `sft` have in common."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo_megatron.bridge import environment
from dynamo_megatron.config import Config
from dynamo_megatron.config.files import ConfigError
from dynamo_megatron.errors import InputError, StatedError
from dynamo_megatron.jobs.output_dir import OutputDir
from dynamo_megatron.jobs.start_checks import check_data, check_layout, check_room, describe_layout
from dynamo_megatron.models import ModelSpec, load_model_config
from dynamo_megatron.reward import RewardError
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.rollout.retention import after_a_stop
from dynamo_megatron.runtime.coordination import (
    Coordinator,
    RemoteFailure,
    StopFlag,
    StopRequested,
    connect_store,
    of_this_start,
)
from dynamo_megatron.runtime.late import dist, torch, uncollected
from dynamo_megatron.runtime.plain_text import printable, show, show_exception
from dynamo_megatron.runtime.user_code import UserCodeError
from dynamo_megatron.tracking.journal import Journal
from dynamo_megatron.tracking.trackers import check_trackers

if TYPE_CHECKING:
    from dynamo_megatron.policy.layout import Layout
    from dynamo_megatron.policy.policy import Policy

# Their message says it all; others come with a traceback.
FORESEEN = (InputError, RolloutError, StatedError, OSError)
# What gloo, and the client of rank 0's store, say of a rank that has been killed; its launcher says how.
LOST_CONNECTION = re.compile(r"(?s)(?:gloo/transport/|^DistNetworkError: ).*?(Connection \w+ by peer|Broken pipe)")
LOST = "ConnectionError: lost the connection to another rank"
ANOTHERS_END = (LOST, "RolloutError: ")
NEW_FOLDER = 90.0  # seconds until every node sees one: NFS clients remember for 30 to 60 s that there was none


class Job:
    """What a command does; the same calls on every rank, in this order, except where said."""

    code = 0  # exit code of a rank on which nothing has failed
    journal: Journal | None = None  # rank 0's, from `prepare` on, of a command that keeps one

    def __init__(self, config: Config, output: OutputDir | None = None):
        self.config, self.output = config, output

    def check(self, ranks: int) -> dict[str, Any]:
        """What can be checked in a moment and without writing anything; returns the derived values. Not called in
        order. Raises InputError."""
        spec = check_layout(self.config, ranks)
        check_data(self.config)
        derived = describe_layout(self.config, spec, ranks)
        if self.output is not None:
            check_trackers(self.config)
            derived["disk"] = check_room(self.config, spec)
        return derived

    def prepare(self, spec: ModelSpec) -> None:
        """Rank 0 alone, before Megatron is imported: opens data, starts processes. Raises InputError for bad input."""
        raise NotImplementedError

    def prepare_node(self) -> None:
        """The first rank of every node but rank 0's, before Megatron is imported: starts that node's processes."""

    def wait_ready(self, coordinator: Coordinator, layout: Layout) -> None:
        """On every rank, before the policy takes memory: until what `prepare` has started is up."""

    def set_up(self, policy: Policy, coordinator: Coordinator) -> None:
        """With the policy on every rank. Raises InputError for bad input."""
        raise NotImplementedError

    def run(self) -> None:
        """Raises StopRequested where asked to stop, after saving."""
        raise NotImplementedError

    def show(self, phase: str) -> None:
        """What the start is busy with, in the live line of rank 0."""
        if self.journal is not None:
            self.journal.progress.phase(phase)

    def clear_screen(self) -> None:
        """Takes a live line away: the next line may be the last one that the user sees. An interrupt may have come
        between a print and its flush."""
        with contextlib.suppress(OSError):  # its reader has ended
            sys.stdout.flush()
        if self.journal is not None:
            self.journal.progress.close()

    def next_start(self) -> str:
        """The end of the message of a run that was ended early; "" where the disk does not say."""
        with contextlib.suppress(OSError):
            return f"; {after_a_stop(self.output.path)}" if self.output is not None else ""
        return ""

    def close(self) -> None:
        """Ends what `prepare` started, whatever has happened."""
        if self.journal is not None:
            self.journal.close()


def run_rank(job: Job) -> int:
    """Carries the job out as the rank that RANK names; returns the exit code."""
    rank, config = int(os.environ["RANK"]), job.config
    stop = StopFlag(config.trainer.stop_when.wall_time if config.trainer.stop_when else None)
    coordinator = None
    running = False
    try:
        if job.output is not None and (why := job.output.finished()) is not None:
            if rank == 0:
                print(why, flush=True)
            return 0
        with uncollected():
            spec = _prepare(job, rank)
            from dynamo_megatron.policy.layout import join_ranks
            from dynamo_megatron.policy.policy import Policy

            if config.model.source == "bridge":
                from dynamo_megatron.bridge.source import build_chunks
            else:
                from dynamo_megatron.policy.model import build_chunks

        job.show("joining ranks")
        store = connect_store(config.trainer.timeout)
        _wait_for_folder(Path(config.output_dir), rank)
        coordinator = Coordinator(store, rank, stop, step_timeout=config.trainer.step_timeout)
        layout = join_ranks(config, of_this_start(store))
        # Servers on the same GPUs measure what is free when they start: nothing may be taken meanwhile.
        job.wait_ready(coordinator, layout)
        job.show("loading model")
        job.set_up(Policy(spec, config, layout, build_chunks), coordinator)
        running = True
        stop.catch_signals()
        dist.barrier(group=layout.host)  # until here a signal that one rank gets ends it, and with it the start
        job.run()
        dist.barrier(group=layout.host)
        coordinator.close()
        dist.destroy_process_group()
        return job.code
    except (KeyboardInterrupt, StopRequested) as stopped:
        job.clear_screen()
        interrupted = isinstance(stopped, KeyboardInterrupt)
        if rank == 0:
            why = "interrupted" if interrupted else f"stopped by {stopped}"
            print(f"{why}{job.next_start()}", file=sys.stderr, flush=True)
        return 130 if interrupted else 75
    except (Exception, SystemExit) as error:  # the end: whatever it was, the other ranks and the user are told
        job.clear_screen()
        return _report(error, rank, coordinator, job.next_start if running else None)
    finally:
        try:
            if coordinator is not None:
                coordinator.close()
        finally:
            job.close()
            stop.ignore()


def _prepare(job: Job, rank: int) -> ModelSpec:
    """What a rank does before it meets the others; Megatron can be imported afterwards."""
    model = job.config.model
    spec = load_model_config(model.path, model.family, model.source)
    if rank == 0:
        job.check(int(os.environ["WORLD_SIZE"]))
        if model.source == "bridge":
            print(environment.prove_folder(model.path), flush=True)
        job.prepare(spec)
    elif os.environ.get("LOCAL_RANK") == "0":
        job.prepare_node()
    job.show("loading packages")
    _set_up_backend(job.config.trainer.deterministic)
    if model.source == "bridge":
        environment.prepare()
    return spec


def _wait_for_folder(folder: Path, rank: int) -> None:
    """Until this node sees the output folder, which rank 0 has created. Raises InputError where it does not."""
    deadline = time.monotonic() + NEW_FOLDER
    while not folder.is_dir():
        if time.monotonic() > deadline:
            raise InputError(f"output_dir: rank {rank} does not see {folder}; all nodes must see it")
        time.sleep(1.0)


def _set_up_backend(deterministic: bool) -> None:
    from dynamo_megatron.policy import backend

    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS refuses to be deterministic without,
        os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # and so does TransformerEngine's attention
        torch.use_deterministic_algorithms(True)
    backend.Fusions.detect()  # refuses a package that Megatron would fail on, or do without in silence
    backend.enable_cpu()


def _report(
    error: BaseException, rank: int, coordinator: Coordinator | None, next_start: Callable[[], str] | None
) -> int:
    """Tells the other ranks; on rank 0 the last line is the message of the first rank that failed. `next_start`: None
    before the job runs."""
    refused = isinstance(error, ConfigError) or (isinstance(error, InputError) and next_start is None)
    details, text = "", str(error)
    if isinstance(error, RewardError):
        details, _, text = text.rpartition("\n")
    if (broken := LOST_CONNECTION.search(f"{type(error).__name__}: {text}")) is not None:
        text = f"{LOST} ({broken[1]})"
    message = printable(text if refused or broken is not None else f"{type(error).__name__}: {text}")
    if coordinator is not None and not refused:
        message = f"rank {rank}{f', step {coordinator.step}' if coordinator.step else ''}: {message}"
    first = message if coordinator is None else coordinator.fail(message)
    if isinstance(error, UserCodeError) and first == message:  # every rank may have called the function
        details = error.frames
    if isinstance(error, RemoteFailure):
        first = str(error)
    elif first == message and not refused and broken is None and not isinstance(error, FORESEEN):
        show_exception(type(error), error, error.__traceback__)
    if details:
        show(details)
    if next_start is not None and any(kind in first for kind in ANOTHERS_END):
        first += next_start()  # not before the other ranks know: the disk may hang
    if rank == 0 or coordinator is None:
        show(first)
    return 2 if refused else 1
