"""A soak: a run that is hurt every few steps until its steps are done or its time is over, and what came of it."""

from __future__ import annotations

import random
import re
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from soak_faults import FAULTS, NEED_SMALL_DISKS, Fault, order
from soak_site import LEFT_FOR, SERVERS, Site

from dynamo_megatron.rollout.result import group_id, rollout_id
from dynamo_megatron.rollout.store import RolloutStore
from dynamo_megatron.tracking.metrics import read_rows
from dynamo_megatron.types import NOT_TRAINED

STEP_LIMIT = 600.0  # seconds for two steps, a restart of the run or a server included
END_LIMIT = 60.0  # seconds until a run that a fault ends has ended
TRACEBACK = "Traceback (most recent call last)"


@dataclass
class Soak:
    """`problems`: what was not as it should be, a line each; a soak without any has passed. It ends after `minutes`, or
    once each kind of fault has occurred `rounds` times; None: neither ends it."""

    site: Site
    every: int  # steps between two faults
    steps: int
    minutes: float | None
    rounds: int | None = None
    problems: list[str] = field(default_factory=list)
    faults: list[dict[str, Any]] = field(default_factory=list)
    audited: dict[int, int] = field(default_factory=dict)  # step -> rollouts

    def run(self, kinds: Sequence[Fault], rng: random.Random) -> None:
        site, started = self.site, time.monotonic()
        over = started + 60 * self.minutes if self.minutes is not None else float("inf")
        site.start()
        going = self._recovers()
        if not going:
            self.problems.append(f"the run did not start: {self._last_words()}")
        due = site.step + self.every
        count = self.steps // self.every + 1 if self.rounds is None else self.rounds * len(kinds)
        for fault in order(list(kinds), count, rng) if going else []:
            site.calm = True
            site.wait(lambda due=due: site.step >= due, max(0.0, min(over - time.monotonic(), self.every * STEP_LIMIT)))
            site.calm = False
            if time.monotonic() > over or site.step + 2 * self.every > self.steps:
                break
            if not site.alive():
                self.problems.append(f"step {site.step}: the run ended by itself: {self._last_words()}")
                going = self._starts_again()
            else:
                going = self._carry_out(fault, random.Random(rng.random()))
            self._audit(site.saved)
            if not going:
                self.problems.append(f"step {site.step}: the run does not go on: {self._last_words()}")
                break
            due = max(due + self.every, site.step + self.every // 2)
        if going:
            self._end()

    def _carry_out(self, fault: Fault, rng: random.Random) -> bool:
        """Whether the run goes on, by itself or started again."""
        site, problems = self.site, []
        begun, before, start = time.monotonic(), site.step, len(site.run.text)
        try:
            what = fault.hurt(site, rng)
        except (OSError, ValueError, psutil.Error) as error:  # or it met the run in a state that cannot be hurt
            what = "not as it should be"
            problems.append(f"{type(error).__name__}: {error}")
        hurt = time.monotonic()
        self._wait_for_an_end(fault)
        going = site.alive() and self._recovers()
        if site.alive() and not going:
            problems.append(f"not two steps with both servers in {STEP_LIMIT:g} s: {self._last_words()}")
            site.kill()
        code, lines = site.run.process.poll(), site.new_lines(start)
        if code not in fault.codes:
            how = "did not end" if code is None else f"ended with exit code {code}"
            problems.append(f"the run {how}: {self._last_words()}")
        if not going and (left := site.run.left_behind(within=LEFT_FOR)):
            problems.append(f"left behind after {LEFT_FOR:g} s: {[p.name() for p in left]}")
        if fault.litters:
            site.meter.ignore_unused(site.processes() if going else [])
        if not going:
            going = self._starts_again()
            if fault.leaves:
                lines += [line for line in site.new_lines(0) if re.search(fault.says, line)]
        problems += judged(fault, lines)
        record = {"fault": fault.name, "what": what, "step": before, "seconds": hurt - begun, "exit code": code}
        self.faults.append({**record, "recovery": time.monotonic() - hurt, "lines": lines, "problems": problems})
        self.problems += [f"step {before}: {fault.name}: {what}: {problem}" for problem in problems]
        said = "; ".join(problems) or "ok"
        print(f"step {before}: {fault.name}: {what}; {time.monotonic() - hurt:.0f} s; {said}", flush=True)
        return going

    def _wait_for_an_end(self, fault: Fault) -> None:
        """Where the fault may end the run."""
        site, begun = self.site, self.site.step
        goes_on = None in fault.codes
        if fault.codes != (None,):
            site.wait(lambda: not site.alive() or (goes_on and site.step >= begun + 2), END_LIMIT)

    def _starts_again(self) -> bool:
        saved = self.site.saved  # the run does the later steps once more
        self.audited = {step: rollouts for step, rollouts in self.audited.items() if step <= saved}
        self.site.start()
        return self._recovers()

    def _recovers(self) -> bool:
        """Whether two more steps are done, the last one with rollouts of both servers."""
        site, begun = self.site, self.site.step
        if not site.wait(lambda: site.step != begun, STEP_LIMIT):
            return False
        first = site.step
        return site.wait(lambda: site.step >= first + 2 and site.both_answer(), STEP_LIMIT) and site.alive()

    def _end(self) -> None:
        """Steps that are done are done; else the run is asked to stop, as at the end of a job's time."""
        site = self.site
        if site.step + 2 * self.every < self.steps:
            site.run.process.send_signal(signal.SIGTERM)
        site.wait(lambda: not site.alive(), STEP_LIMIT)
        if (code := site.run.process.poll()) not in (0, 75):
            self.problems.append(f"the run ended with exit code {code}: {self._last_words()}")
        self._audit(site.step)

    def _last_words(self) -> str:
        lines = self.site.run.text.splitlines()
        return lines[-1] if lines else "it said nothing"

    def _audit(self, last: int) -> None:
        rollouts, problems = audit(self.site.output, [n for n in range(1, last + 1) if n not in self.audited])
        self.audited |= rollouts
        self.problems += problems

    def result(self) -> dict[str, Any]:
        growths = self.site.meter.growths()
        grown = [f"{g.what} grew from {g.first:g} to {g.last:g}" for g in growths if not g.flat]
        return {
            "steps": self.site.step,
            "rollouts audited": sum(self.audited.values()),
            "steps beside other work": self.site.meter.beside,
            "servers": len(SERVERS),
            "problems": self.problems + grown,
            "faults": self.faults,
            "growth": [asdict(g) for g in growths],
            "largest": self.site.meter.largest(),
        }


def judged(fault: Fault, lines: Sequence[str]) -> list[str]:
    """What is wrong with the lines that the console has of a fault."""
    told = [line for line in lines if re.search(fault.says, line)]
    problems = [f"a line of something else: {line!r}" for line in lines if line not in told][:3]
    if not told and not fault.silent:
        problems.append(f"no line matches {fault.says!r}")
    if len(told) > fault.most:
        problems.append(f"{len(told)} lines instead of {fault.most}: {told}")
    if any(TRACEBACK in line for line in lines):
        problems.append("a traceback on the console")
    return problems


def audit(output: Path, steps: Sequence[int]) -> tuple[dict[int, int], list[str]]:
    """The number of rollouts allocated in each of these steps, and a line for each step where not every one of them is
    on disk once, or where what was not trained is not what the metrics count."""
    allocated: dict[int, list[int]] = defaultdict(list)
    for row in read_rows(output / "allocation.jsonl"):
        allocated[row["step"]].append(row["n"])
    rows = {row["step"]: row for row in read_rows(output / "metrics.jsonl")}
    rollouts, problems, store = {}, [], RolloutStore(output)
    for step in steps:
        wanted = {rollout_id(group_id(step, i), k) for i, n in enumerate(allocated[step]) for k in range(n)}
        rollouts[step] = len(wanted)
        try:
            found = [r for r in store.lines(step) if r.status != "partial"]
        except ValueError as error:
            problems.append(f"step {step}: {error}")
            continue
        written = Counter(r.rollout_id for r in found if r.status != "rejected")  # a second line, of one on disk
        last = {r.rollout_id: r for r in found}
        if last.keys() != wanted or max(written.values(), default=0) > 1:
            missing, twice = len(wanted - last.keys()), sum(n > 1 for n in written.values())
            strange = len(last.keys() - wanted)
            problems.append(
                f"step {step}: of {len(wanted)} rollouts {missing} missing, {twice} twice, {strange} others"
            )
        lost = sum(r.status in NOT_TRAINED for r in last.values())
        counted = sum(rows[step][f"rollout/{kind}"] for kind in ("aborted", "failed", "rejected")) * len(wanted)
        if lost != round(counted):
            problems.append(f"step {step}: {lost} rollouts on disk were not trained, the metrics count {counted:g}")
    return rollouts, problems


def named(names: Sequence[str]) -> list[Fault]:
    """The faults of these names; none: all. Raises ValueError for an unknown name."""
    if unknown := set(names) - {fault.name for fault in FAULTS}:
        raise ValueError(f"no such fault: {sorted(unknown)[0]}; there are: {', '.join(f.name for f in FAULTS)}")
    return [fault for fault in FAULTS if not names or fault.name in names]


def possible(site: Site, kinds: Sequence[Fault]) -> list[Fault]:
    """Those that this machine can make."""
    return [fault for fault in kinds if site.small_disks or fault.name not in NEED_SMALL_DISKS]
