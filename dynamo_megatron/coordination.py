"""How ranks wait for each other and how a failure on one reaches all: keys in the job's TCPStore.

A rank enters a collective only when the data is there, because a collective that times out breaks its group for good
and generation may take half an hour. Meanwhile it polls the store. A watchdog thread ends a rank that is stuck in a
collective when another rank has failed, when rank 0 has stopped beating, or when the store is gone.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import sys
import threading
import time

import torch.distributed as dist

ABORT, HEARTBEAT = "abort", "heartbeat"
BEAT_EVERY = 2.0  # seconds
POLL_EVERY = 0.05  # seconds


class StopRequested(Exception):
    """SIGTERM or SIGUSR1 arrived; raised at a safe point, where the run can be saved and resumed."""

    def __init__(self, signal_number: int):
        self.signal_number = signal_number
        super().__init__(signal.Signals(signal_number).name)


class RemoteFailure(RuntimeError):
    """Another rank failed; the message is its own."""


def connect_store(timeout: float) -> dist.TCPStore:
    """The job's store at MASTER_ADDR:MASTER_PORT; rank 0 serves it unless the launcher (torchrun) does."""
    serves = os.environ["RANK"] == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ.get("MASTER_PORT", 29500)),
        is_master=serves,
        timeout=datetime.timedelta(seconds=timeout),
        wait_for_workers=False,
    )


class SignalFlag:
    """From its creation on SIGTERM and SIGUSR1 only set `number`; Ctrl-C stays KeyboardInterrupt."""

    def __init__(self):
        self.number: int | None = None
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._set)

    def _set(self, number: int, _frame) -> None:
        self.number = number


class Coordinator:
    """This rank's end of the store. `heartbeat_timeout`: seconds without a beat of rank 0 until it counts as dead."""

    def __init__(self, store: dist.TCPStore, rank: int, stop: SignalFlag, heartbeat_timeout: float = 60.0):
        self.rank, self.stop, self._heartbeat_timeout = rank, stop, heartbeat_timeout
        # torchrun's store outlives a restart of the ranks, whose keys must not be taken for today's.
        prefix = f"coordination-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._store = dist.PrefixStore(prefix, store)
        self.step = 0
        self._closed = threading.Event()
        # A connection of its own: the main thread may be blocked in the other one.
        watch = dist.TCPStore(store.host, store.port, is_master=False, timeout=datetime.timedelta(seconds=30))
        self._watch_store = dist.PrefixStore(prefix, watch)
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    # -- waiting -------------------------------------------------------------------------------------------------
    def check(self) -> None:
        """Raises RemoteFailure if another rank has failed."""
        if self._store.check([ABORT]):
            raise RemoteFailure(self._store.get(ABORT).decode())

    def check_stop(self) -> None:
        """For rank 0, which decides for all: raises StopRequested if a signal has come, else as `check`."""
        self.check()
        if self.stop.number is not None:
            raise StopRequested(self.stop.number)

    def announce(self, key: str, value: str = "ready") -> None:
        self._store.set(key, value)

    def wait(self, key: str, what: str, timeout: float) -> str:
        """Polls for `key`. Raises RemoteFailure, or TimeoutError that says what was waited for."""
        deadline = time.monotonic() + timeout
        while not self._store.check([key]):
            self.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {self.rank} waited {timeout:g} s for {what}")
            time.sleep(POLL_EVERY)
        return self._store.get(key).decode()

    # -- failure -------------------------------------------------------------------------------------------------
    def fail(self, message: str) -> str:
        """Tells all ranks of this one's failure; returns the message all report: that of the first to fail."""
        with contextlib.suppress(RuntimeError):  # the store is gone with rank 0: there is no one to tell
            return self._store.compare_set(ABORT, "", message).decode() or message
        return message

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        last, seen = b"", None  # rank 0 may take long until it beats for the first time
        beats = 0
        while not self._closed.wait(BEAT_EVERY / 2):
            try:
                if self._watch_store.check([ABORT]):
                    self._end(self._watch_store.get(ABORT).decode(), grace=3.0)
                if self.rank == 0:
                    beats += 1
                    self._watch_store.set(HEARTBEAT, str(beats))
                elif self._watch_store.check([HEARTBEAT]) and (beat := self._watch_store.get(HEARTBEAT)) != last:
                    last, seen = beat, time.monotonic()
            except RuntimeError:
                self._end("rank 0 is gone (its store does not answer)", grace=2.0)
            if seen is not None and time.monotonic() - seen > self._heartbeat_timeout:
                print(f"rank 0 gave no sign of life for {self._heartbeat_timeout:g} s", file=sys.stderr, flush=True)
                os._exit(1)

    def _end(self, message: str, grace: float) -> None:
        """The main thread has `grace` seconds to notice by itself; a rank stuck in a collective is ended."""
        if self._closed.wait(grace):
            return
        if self.rank == 0:
            print(message, file=sys.stderr, flush=True)
        os._exit(1)
