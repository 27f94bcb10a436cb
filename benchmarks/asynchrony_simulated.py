"""A run at a bound of `rollout.max_staleness` in discrete events, from what servers and ranks take on their own.

    python -P benchmarks/asynchrony_simulated.py

The servers decode in iterations, each one token of every running response. A response that a weight sync interrupts is
read again before it continues. benchmarks/asynchrony.py measures what a server takes for requests that come together,
what ranks take without a bound, and how long runs last; it writes results/asynchrony.json. Of these runs only those
without a bound enter the constants. This writes results/asynchrony_simulated.json.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Service:
    """Seconds of a server: of an iteration `base`, for `each` running response, and for each token of `context` that
    these have; for a token of a `prefill`, and for a `request`."""

    base: float
    each: float
    context: float
    prefill: float
    request: float


@dataclass(frozen=True)
class Shape:
    """Of a run. train, push: seconds of the ranks in a step; the servers generate nothing during a push. collect:
    seconds from the last response of a step until the ranks have all of them."""

    servers: int
    concurrency: int  # responses at once, at each server
    prompt: int  # tokens
    train: float
    push: float
    collect: float = 0.0


@dataclass
class Server:
    """`ends` has the running responses as (iteration in which it ends, begun in, step). `context`: their tokens, with
    the prompts'."""

    service: Service
    iteration: float = 0.0
    busy: float = 0.0
    prefill: float = 0.0  # seconds of it that are still to come
    context: float = 0.0
    ends: list[tuple[float, float, int]] = field(default_factory=list)

    def next_end(self) -> float:
        """Seconds until a response ends."""
        return self.prefill + self.seconds(self.ends[0][0] - self.iteration) if self.ends else float("inf")

    def _pace(self) -> tuple[float, float]:
        """Seconds of the next iteration, and by how much each further one takes longer."""
        service, running = self.service, len(self.ends)
        return service.base + service.each * running + service.context * self.context, service.context * running

    def seconds(self, iterations: float) -> float:
        first, growth = self._pace()
        return first * iterations + growth * iterations**2 / 2

    def _iterations(self, seconds: float) -> float:
        """The inverse of `seconds`."""
        first, growth = self._pace()
        return 2 * seconds / (first + math.sqrt(first**2 + 2 * growth * seconds))

    def start(self, tokens: float, prompt: int, step: int) -> None:
        self.prefill += prompt * self.service.prefill + self.service.request  # it delays all that run
        self.context += prompt
        heapq.heappush(self.ends, (self.iteration + tokens, self.iteration, step))

    def advance(self, seconds: float, prompt: int) -> list[int]:
        """Steps of the responses that end by then; no more than `next_end` at once."""
        if self.ends:
            self.busy += seconds
            spent = min(self.prefill, seconds)
            self.prefill -= spent
            iterations = self._iterations(seconds - spent)
            self.iteration += iterations
            self.context += iterations * len(self.ends)
        ended = []
        while self.ends and self.ends[0][0] <= self.iteration + 1e-9:
            _, begun, step = heapq.heappop(self.ends)
            self.context -= prompt + self.iteration - begun
            ended.append(step)
        return ended

    def interrupt(self) -> None:
        """By a push: all that run are read again."""
        self.prefill = self.context * self.service.prefill + len(self.ends) * self.service.request


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
            self._until(lambda: False, self.now + self.shape.collect)
            outcome.waited += self.now - before
            self._until(lambda: False, self.now + self.shape.train)
            for server in self.servers:
                server.interrupt()
            self.now += self.shape.push
        outcome.seconds = self.now
        outcome.idle = 1 - sum(server.busy for server in self.servers) / (self.now * len(self.servers))
        return outcome

    def _until(self, reached: Callable[[], bool], limit: float) -> None:
        while not reached() and self.now < limit:
            self._admit()
            ahead = min((server.next_end() for server in self.servers), default=float("inf"))
            seconds = min(ahead, limit - self.now)
            for server in self.servers:
                for step in server.advance(seconds, self.shape.prompt):
                    self.left[step] -= 1
            self.now += seconds

    def _admit(self) -> None:
        while self.queue:
            server = min(self.servers, key=lambda server: len(server.ends))
            if len(server.ends) >= self.shape.concurrency:
                return
            step, tokens = self.queue.pop()
            server.start(tokens, self.shape.prompt, step)


def fitted(probes: Sequence[dict[str, float]]) -> Service:
    """Of requests that come together: the first token comes with the prefill, each other one of all of them with an
    iteration. Least squares of the relative errors; no constant below 0."""
    rows, seconds = [], np.array([probe["seconds"] for probe in probes])
    for probe in probes:
        running, prompt, iterations = probe["running"], probe["prompt"], probe["tokens"] - 1
        context = running * iterations * (prompt + 1 + iterations / 2)
        rows.append([iterations, iterations * running, context, running * prompt, running])
    constants, _ = nnls(np.array(rows) / seconds[:, None], np.ones(len(rows)))
    return Service(*map(float, constants))


def beside_the_measured(measured: dict) -> dict:
    """Seconds of each bound, simulated from the server's constants and the phases of bound 0, and the mean measured
    ones."""
    runs, service = measured["runs"], fitted(measured["probes"])
    at_0 = [run for run in runs if run["bound"] == 0]
    push = statistics.mean(run["time/reshard"] for run in at_0)
    train = statistics.mean(run["time/step"] - run["time/generate"] - run["time/reshard"] for run in at_0)
    shape = Shape(1, measured["concurrency"], round(at_0[0]["prompt tokens"]), train, push)
    lengths = at_0[0]["lengths"]
    generated = Simulation(shape, service, lengths, 0).run().waited / len(lengths)
    shape = replace(shape, collect=max(0.0, statistics.mean(run["time/generate"] for run in at_0) - generated))
    found = {"service": asdict(service), "shape": asdict(shape), "bounds": {}}
    for bound in sorted({run["bound"] for run in runs}):
        simulated = Simulation(shape, service, lengths, bound).run()
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
