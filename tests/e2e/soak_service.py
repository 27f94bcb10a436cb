"""The rewards of a soak: a function that fails when asked to, and a service behind HTTP that does."""

from __future__ import annotations

import contextlib
import http.server
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))  # python -P leaves other folders out
from alterations import KINDS, Alteration, alter

HUGE = 4 << 20  # bytes of a body that is too large
REWARD = '''"""Does the response begin with an odd digit? A file fault-NAME makes the next call fail in that way."""
import os
import resource
import signal
import subprocess
import time


def allocate():
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, hard))
    try:
        bytearray(1 << 31)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def leave():
    child = subprocess.Popen(["sleep", "1000000"], start_new_session=True)
    with open("left.tmp", "w") as file:
        file.write(str(child.pid))
    os.rename("left.tmp", "left.pid")
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS = {
    "segv": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "memory": allocate,
    "hang": lambda: time.sleep(1e6),
    "leave": leave,
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
    """A reward function behind HTTP that gives 0 for all; while `down`, it answers 503."""

    def __init__(self) -> None:
        service, self.down = self, False
        self._altered: Callable[[bytes], Alteration | None] = lambda body: None

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                samples = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["samples"]
                body = json.dumps({"rewards": [0.0] * len(samples)}).encode()
                if not service.down and (alteration := service._altered(body)) is not None:
                    time.sleep(alteration.delay)
                    with contextlib.suppress(ConnectionError):  # the run reads no more than it has use for
                        self.wfile.write(alteration.http())
                    return
                self.send_response(503 if service.down else 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @contextlib.contextmanager
    def altering(self, share: float, seed: int) -> Iterator[list[str]]:
        """Meanwhile `share` of its answers are altered; the list has what was done to each. The first one is cut off,
        so that one has no rewards for certain."""
        rng, lock, done = random.Random(seed), threading.Lock(), []

        def altered(body: bytes) -> Alteration | None:
            with lock:  # each request has a thread
                if done and rng.random() >= share:
                    return None
                alteration = alter(rng, body, kinds=KINDS if done else ("cut",), huge=HUGE)
                done.append(alteration.what)
                return alteration

        self._altered = altered
        try:
            yield done
        finally:
            self._altered = lambda body: None

    def close(self) -> None:
        self._server.shutdown()
