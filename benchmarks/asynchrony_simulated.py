"""A run at a bound of `rollout.max_staleness` in discrete events, from what servers and ranks take on their own.

    python -P benchmarks/asynchrony_simulated.py

The servers decode in iterations: one token of each running response takes base + each * (responses that run) seconds.
A response that a weight sync interrupts pays for its tokens' prefill again. benchmarks/asynchrony.py measures the
constants and writes results/asynchrony.json; this writes results/asynchrony_simulated.json.
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Service:
    """Seconds of a server: of an iteration `base` and for `each` running response; for a token of a prefill."""

    base: float
    each: float
    prefill: float


@dataclass(frozen=True)
class Shape:
    """Of a run. train, push: seconds of the ranks in a step; the servers generate nothing during a push."""

    servers: int
    concurrency: int  # responses at once, at each server
    prompt: int  # tokens
    train: float
    push: float


@dataclass
class Server:
    """`ends` has the running responses as (iteration in which it ends, begun in, step)."""

    service: Service
    iteration: float = 0.0
    busy: float = 0.0
    prefill: float = 0.0  # seconds of it that are still to come
    ends: list[tuple[float, float, int]] = field(default_factory=list)

    def next_end(self) -> float:
        """Seconds until a response ends."""
        if not self.ends:
            return float("inf")
        return self.prefill + (self.ends[0][0] - self.iteration) * self.pace

    @property
    def pace(self) -> float:
        """Seconds of an iteration."""
        return self.service.base + self.service.each * len(self.ends)

    def start(self, tokens: float, prompt: int, step: int) -> None:
        self.prefill += prompt * self.service.prefill  # it delays all that run
        heapq.heappush(self.ends, (self.iteration + tokens, self.iteration, step))

    def advance(self, seconds: float) -> list[int]:
        """Steps of the responses that end by then; no more than `next_end` at once."""
        if self.ends:
            self.busy += seconds
            spent = min(self.prefill, seconds)
            self.prefill -= spent
            self.iteration += (seconds - spent) / self.pace
        ended = []
        while self.ends and self.ends[0][0] <= self.iteration + 1e-9:
            ended.append(heapq.heappop(self.ends)[2])
        return ended

    def interrupted(self, prompt: int) -> float:
        """Seconds until all responses that a push has interrupted are read again."""
        return sum(prompt + self.iteration - begun for _, begun, _ in self.ends) * self.service.prefill


@dataclass
class Outcome:
    seconds: float = 0.0
    waited: float = 0.0  # by the ranks, for rollouts
    idle: float = 0.0  # share of the servers' time


class Simulation:
    def __init__(self, shape: Shape, service: Service, lengths: Sequence[Sequence[int]], bound: int):
        """`lengths`: tokens of each response, by step."""
        self.shape, self.lengths, self.bound = shape, lengths, bound
        self.servers = [Server(service) for _ in range(shape.servers)]
        self.queue: list[tuple[int, int]] = []  # (step, tokens), the next one last
        self.left = [len(step) for step in lengths]
        self.now = 0.0

    def run(self) -> Outcome:
        outcome, sent = Outcome(), 0
        for step in range(len(self.lengths)):
            while sent <= min(step + self.bound, len(self.lengths) - 1):
                self.queue[:0] = [(sent, tokens) for tokens in reversed(self.lengths[sent])]
                sent += 1
            before = self.now
            self._until(lambda step=step: self.left[step] == 0, float("inf"))
            outcome.waited += self.now - before
            self._until(lambda: False, self.now + self.shape.train)
            again = max(server.interrupted(self.shape.prompt) for server in self.servers)
            self.now += self.shape.push + again
        outcome.seconds = self.now
        outcome.idle = 1 - sum(server.busy for server in self.servers) / (self.now * len(self.servers))
        return outcome

    def _until(self, reached: Callable[[], bool], limit: float) -> None:
        while not reached() and self.now < limit:
            self._admit()
            ahead = min((server.next_end() for server in self.servers), default=float("inf"))
            seconds = min(ahead, limit - self.now)
            for server in self.servers:
                for step in server.advance(seconds):
                    self.left[step] -= 1
            self.now += seconds

    def _admit(self) -> None:
        while self.queue:
            server = min(self.servers, key=lambda server: len(server.ends))
            if len(server.ends) >= self.shape.concurrency:
                return
            step, tokens = self.queue.pop()
            server.start(tokens, self.shape.prompt, step)


def fitted(runs: Sequence[dict]) -> Service:
    """Of the steps of bound 0, whose generation takes base * iterations + each * tokens + prefill * prompts' tokens: an
    iteration is one token of every running response, and all begin together. Least squares."""
    rows, seconds = [], []
    for run in runs:
        for lengths, generate in zip(run["lengths"], run["generate"], strict=True):
            rows.append([max(lengths), sum(lengths), len(lengths) * run["prompt tokens"]])
            seconds.append(generate)
    constants = np.linalg.lstsq(np.array(rows), np.array(seconds), rcond=None)[0]
    if constants[2] < 0:  # too small to be told from the rest
        constants = np.append(np.linalg.lstsq(np.array(rows)[:, :2], np.array(seconds), rcond=None)[0], 0.0)
    return Service(*map(float, constants))


def beside_the_measured(measured: dict) -> dict:
    """Seconds of each bound, simulated from the constants and the phases of bound 0, and the mean measured ones."""
    runs = measured["runs"]
    at_0 = [run for run in runs if run["bound"] == 0]
    service = fitted(at_0)
    push = statistics.mean(run["time/reshard"] for run in at_0)
    train = statistics.mean(run["time/step"] - run["time/generate"] - run["time/reshard"] for run in at_0)
    shape = Shape(1, measured["concurrency"], round(at_0[0]["prompt tokens"]), train, push)
    found = {"service": asdict(service), "shape": asdict(shape), "bounds": {}}
    for bound in sorted({run["bound"] for run in runs}):
        simulated = Simulation(shape, service, at_0[0]["lengths"], bound).run()
        seconds = statistics.mean(run["seconds"] for run in runs if run["bound"] == bound)
        error = simulated.seconds / seconds - 1
        of_bound = {"simulated": simulated.seconds, "measured": seconds, "error": error, "idle": simulated.idle}
        found["bounds"][bound] = of_bound
        print(f"bound {bound}: {simulated.seconds:.1f} s simulated, {seconds:.1f} s measured ({error:+.1%})")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path, default=RESULTS / "asynchrony.json")
    parser.add_argument("--out", type=Path, default=RESULTS / "asynchrony_simulated.json")
    options = parser.parse_args()
    result = beside_the_measured(json.loads(options.measured.read_text()))
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
