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
from collections.abc import Sequence
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
    the prompts'. All is as of `clock` (seconds)."""

    service: Service
    prompt: int
    clock: float = 0.0
    iteration: float = 0.0
    busy: float = 0.0
    prefill: float = 0.0  # seconds of it that are still to come
    context: float = 0.0
    ends: list[tuple[float, float, int]] = field(default_factory=list)

    def next_end(self) -> float:
        """When a response ends."""
        if not self.ends:
            return math.inf
        return self.clock + self.prefill + self._seconds(self.ends[0][0] - self.iteration)

    def _pace(self) -> tuple[float, float]:
        """Seconds of the next iteration, and by how much each further one takes longer."""
        service, running = self.service, len(self.ends)
        return service.base + service.each * running + service.context * self.context, service.context * running

    def _seconds(self, iterations: float) -> float:
        first, growth = self._pace()
        return first * iterations + growth * iterations**2 / 2

    def _iterations(self, seconds: float) -> float:
        """The inverse of `_seconds`."""
        first, growth = self._pace()
        return 2 * seconds / (first + math.sqrt(first**2 + 2 * growth * seconds))

    def start(self, tokens: float, step: int) -> None:
        self.prefill += self.prompt * self.service.prefill + self.service.request  # it delays all that run
        self.context += self.prompt
        heapq.heappush(self.ends, (self.iteration + tokens, self.iteration, step))

    def advance(self, now: float) -> list[int]:
        """Steps of the responses that end by then; not beyond `next_end`."""
        seconds, self.clock = now - self.clock, now
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
            self.context -= self.prompt + self.iteration - begun
            ended.append(step)
        return ended

    def interrupt(self, until: float) -> None:
        """By a push, which is over then: all that run are read again."""
        self.clock = until
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
        self.servers = [Server(service, shape.prompt) for _ in range(shape.servers)]
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
            self._until(math.inf, step)
            self._until(self.now + self.shape.collect)
            outcome.waited += self.now - before
            self._until(self.now + self.shape.train)
            self.now += self.shape.push
            for server in self.servers:
                server.interrupt(self.now)
        outcome.seconds = self.now
        outcome.idle = 1 - sum(server.busy for server in self.servers) / (self.now * len(self.servers))
        return outcome

    def _until(self, limit: float, complete: int | None = None) -> None:
        """Until then, or until all responses of the step `complete` are there."""
        self._admit()
        ends = [(server.next_end(), number) for number, server in enumerate(self.servers)]
        heapq.heapify(ends)  # the earliest end of each server
        while complete is None or self.left[complete]:
            now, number = ends[0]
            if now > limit:
                break
            server, self.now = self.servers[number], now
            for step in server.advance(now):
                self.left[step] -= 1
                if self.queue:
                    following, tokens = self.queue.pop()
                    server.start(tokens, following)
            heapq.heapreplace(ends, (server.next_end(), number))
        self.now = limit if limit < math.inf else self.now
        for server in self.servers:
            server.advance(self.now)

    def _admit(self) -> None:
        """As many as there is room for, each to the server with the fewest."""
        for server in self.servers:
            server.advance(self.now)
        loads = [(len(server.ends), number) for number, server in enumerate(self.servers)]
        heapq.heapify(loads)
        while self.queue and loads[0][0] < self.shape.concurrency:
            load, number = loads[0]
            step, tokens = self.queue.pop()
            self.servers[number].start(tokens, step)
            heapq.heapreplace(loads, (load + 1, number))


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
    """Seconds of each bound, simulated from the server's constants and the phases of bound 0, and the median
    of the measured ones: a run in which the machine was slow does not count."""
    runs, service = measured["runs"], fitted(measured["probes"])
    at_0 = [run for run in runs if run["bound"] == 0]
    push = statistics.median(run["time/reshard"] for run in at_0)
    train = statistics.median(run["time/step"] - run["time/generate"] - run["time/reshard"] for run in at_0)
    shape = Shape(1, measured["concurrency"], round(at_0[0]["prompt tokens"]), train, push)
    lengths = at_0[0]["lengths"]
    generated = Simulation(shape, service, lengths, 0).run().waited / len(lengths)
    shape = replace(shape, collect=max(0.0, statistics.median(run["time/generate"] for run in at_0) - generated))
    found = {"service": asdict(service), "shape": asdict(shape), "bounds": {}}
    for bound in sorted({run["bound"] for run in runs}):
        simulated = Simulation(shape, service, lengths, bound).run()
        seconds = statistics.median(run["seconds"] for run in runs if run["bound"] == bound)
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
