"""How ranks wait for each other and how a failure on one reaches all: keys in the job's TCPStore.

A rank enters a collective only when the data is there, because a collective that times out breaks its group for good
and generation may take half an hour. Meanwhile it waits in the store. A watchdog thread ends a rank that is stuck in a
collective when another rank has failed, when rank 0's heartbeat has stopped, or when the store is gone.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from dynamo_megatron.errors import InputError
from dynamo_megatron.runtime.array_sharing import share
from dynamo_megatron.runtime.late import dist
from dynamo_megatron.runtime.listening import serve_store, store_address
from dynamo_megatron.runtime.process_signals import ASK_TO_STOP

T = TypeVar("T")
ABORT, HEARTBEAT, READY, STALLED, STOP = "abort", "heartbeat", "ready", "stalled", "stop"
BEAT_EVERY = 2.0  # seconds
HEARTBEAT_TIMEOUT = 60.0  # seconds without a heartbeat of rank 0 until it counts as dead
STORE_TIMEOUT, CLOSE_TIMEOUT = 30.0, 5.0  # seconds to connect to the store; for the watchdog to end
POLL = datetime.timedelta(seconds=0.1)  # a rank that waits looks for a failure, and whether it is to stop


class StopRequested(Exception):
    """The run is to be saved and stopped here, to be resumed later; the message says who requested it."""


class RemoteFailure(RuntimeError):
    """Another rank failed; the message is that rank's."""


def connect_store(timeout: float) -> dist.TCPStore:
    """Returns the job's store at MASTER_ADDR:MASTER_PORT; rank 0 serves it there unless the launcher (torchrun) does.
    Raises InputError where rank 0's host cannot listen there."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ.get("MASTER_PORT", 29500))
    if os.environ["RANK"] != "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return dist.TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=timeout))
    try:
        return serve_store(store_address(), port, timeout)
    except OSError as error:
        raise InputError(
            f"MASTER_ADDR: rank 0 cannot listen at {host}:{port} ({error.strerror}); set it to an address of rank 0's "
            "host, and MASTER_PORT to a free port there"
        ) from None


def of_this_start(store: dist.TCPStore) -> dist.PrefixStore:
    """The keys of this start of the ranks: torchrun's store outlives those that torchrun starts again."""
    return dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _value(store: dist.Store, key: str) -> str | None:
    """Returns the value of a key; None where no rank has set it."""
    return store.get(key).decode() if store.check([key]) else None


class StopFlag:
    """Whether this process is to stop: it received SIGTERM or SIGUSR1, or has run for more than `wall_time` seconds.

    After `catch_signals` the signals do nothing else; Ctrl-C still raises KeyboardInterrupt.
    """

    def __init__(self, wall_time: float | None = None):
        self._wall_time, self._start = wall_time, time.monotonic()
        self._number: int | None = None

    def catch_signals(self) -> None:
        """Call it once there is something to save. Until then SIGTERM ends the process: a handler in Python would not
        run while C code holds the interpreter."""
        for number in ASK_TO_STOP:
            signal.signal(number, self._set)

    def _set(self, number: int, _frame) -> None:
        self._number = self._number or number

    def ignore(self) -> None:
        """From here on the signals do nothing. srun sends SIGTERM to all ranks once the first has exited with 75, which
        would kill Python while it shuts down."""
        for number in ASK_TO_STOP:
            signal.signal(number, signal.SIG_IGN)

    def check(self) -> None:
        """Raises StopRequested if this process is to stop."""
        if self._number is not None:
            raise StopRequested(signal.Signals(self._number).name)
        if self._wall_time is not None and time.monotonic() - self._start > self._wall_time:
            raise StopRequested(f"trainer.stop_when.wall_time ({self._wall_time:g} s)")


class Coordinator:
    """This rank's end of the store. `step_timeout`: seconds from one `begin_step` to the next (None: any number)."""

    def __init__(self, store: dist.TCPStore, rank: int, stop: StopFlag, step_timeout: float | None = None):
        self.rank, self.stop, self._step_timeout = rank, stop, step_timeout
        self._store = of_this_start(store)
        self.step, self._step_began = 0, None  # the step under way; 0 before the first one
        # Held while a step's time is checked, and until the process ends where it has passed.
        self._ending = threading.Lock()
        self._calls = 0  # of `on_rank_0`
        self._closed = threading.Event()
        # A connection of its own: the main thread may be blocked in the other one.
        timeout = datetime.timedelta(seconds=STORE_TIMEOUT)
        watched = dist.TCPStore(store.host, store.port, is_master=False, timeout=timeout)
        self._watch_store = of_this_start(watched)
        self._watchdog = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._watchdog.start()

    def end_step(self) -> None:
        """On rank 0: does not return where the step took longer than `step_timeout`; all ranks then exit with 75."""
        with self._ending:
            self._end_a_stalled_run()
            self._step_began = None

    def begin_step(self, number: int) -> None:
        """Sets the step that messages name from now on, and restarts the time limit of a step."""
        self.step, self._step_began = number, time.monotonic()

    # -- waiting -------------------------------------------------------------------------------------------------
    def check(self) -> None:
        """Raises RemoteFailure if another rank has failed."""
        if (message := _value(self._store, ABORT)) is not None:
            raise RemoteFailure(message)

    def check_stop(self) -> None:
        """For rank 0, which decides for all: raises as `check` does, and StopRequested if any rank was asked to
        stop."""
        self.check()
        self.stop.check()
        if (by := _value(self._store, STOP)) is not None:
            raise StopRequested(by)

    def on_rank_0(self, what: str, make: Callable[[], T], layout: Any, timeout: float = math.inf) -> T:
        """Returns on every rank what `make` returns on rank 0, passed on by `share`. All ranks make the same calls in
        the same order.

        The other ranks wait until the value is there, outside of any collective, for at most `timeout` seconds; `what`
        names it in the error message. Where `make` raises StopRequested, all ranks raise it.
        """
        self._calls += 1
        key, made = f"call-{self._calls}-{what}", None
        if self.rank == 0:
            try:
                made = make()
            except StopRequested as stopped:
                self.announce(key, f"stop {stopped}")
                raise
            self.announce(key)
        elif (said := self.wait(key, what, timeout)) != READY:
            raise StopRequested(said.removeprefix("stop "))
        return share(made, layout)

    def announce(self, key: str, value: str = READY) -> None:
        self._store.set(key, value)

    def wait(self, key: str, what: str, timeout: float) -> str:
        """Waits for `key`; returns its value. Raises RemoteFailure, or TimeoutError that says what was waited for."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                self._store.wait([key], POLL)
                return self._store.get(key).decode()
            except dist.DistStoreError:  # the key is not there yet
                self.check()
                self.pass_on_stop()
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {self.rank} waited {timeout:g} s for {what}")

    def pass_on_stop(self) -> None:
        """For the other ranks: notifies rank 0 if this rank was asked to stop."""
        try:
            self.stop.check()
        except StopRequested as stopped:
            self.announce(STOP, f"{stopped} on rank {self.rank}")

    # -- failure -------------------------------------------------------------------------------------------------
    def fail(self, message: str) -> str:
        """Notifies all ranks of this rank's failure; returns the message that all report: that of the first rank to
        fail."""
        with contextlib.suppress(RuntimeError):  # the store is gone with rank 0: there is no one to tell
            return self._store.compare_set(ABORT, "", message).decode()
        return message

    def close(self) -> None:
        """Ends the watchdog and waits for it: Python aborts if it exits while a daemon thread is inside a call of the
        store."""
        self._closed.set()
        self._watchdog.join(CLOSE_TIMEOUT)

    def _watch(self) -> None:
        last = None  # rank 0's first heartbeat may take long
        beats = unchanged = 0
        while not self._closed.wait(BEAT_EVERY / 2):
            try:
                if (message := _value(self._watch_store, ABORT)) is not None:
                    self._end(message, grace=3.0)
                if self.rank == 0:
                    beats += 1
                    self._watch_store.set(HEARTBEAT, str(beats))
                    with self._ending:
                        self._end_a_stalled_run()
                elif self._watch_store.check([STALLED]):
                    os._exit(75)
                elif (beat := _value(self._watch_store, HEARTBEAT)) != last:
                    last, unchanged = beat, 0
                elif last is not None:
                    unchanged += 1
            except RuntimeError:
                self._end("rank 0 is gone (its store does not answer)", grace=2.0)
            # Looks, not the clock: that goes on while all ranks are suspended.
            if unchanged * BEAT_EVERY / 2 > HEARTBEAT_TIMEOUT:
                print(f"rank 0 gave no sign of life for {HEARTBEAT_TIMEOUT:g} s", file=sys.stderr, flush=True)
                os._exit(1)

    def _end_a_stalled_run(self) -> None:
        """On rank 0: ends all ranks with exit code 75 where a step exceeds `step_timeout`. Nothing is saved: it is not
        known what the ranks' main threads are stuck in."""
        if self.rank > 0 or self._step_timeout is None or self._step_began is None:
            return
        if time.monotonic() - self._step_began > self._step_timeout:
            print(
                f"step {self.step} took longer than trainer.step_timeout ({self._step_timeout:g} s); the same command "
                "resumes from the last checkpoint, or starts from step 0 if there is none",
                file=sys.stderr,
                flush=True,
            )
            self._watch_store.set(STALLED, "")
            time.sleep(2 * BEAT_EVERY)  # rank 0 serves the store: the others read it there
            os._exit(75)

    def _end(self, message: str, grace: float) -> None:
        """Gives the main thread `grace` seconds to notice by itself; then ends this process, which is stuck in a
        collective."""
        if self._closed.wait(grace):
            return
        if self.rank == 0:
            print(message, file=sys.stderr, flush=True)
        os._exit(1)
