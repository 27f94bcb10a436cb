"""`dynamo-megatron compare`: trains what is left of a comparison's runs, and writes its curves, tables and picture."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_megatron.comparison.curves import arrays, read_curve, read_outcome, whole_seeds, write_curves
from dynamo_megatron.comparison.runs import Stop, carry_out, side_by_side
from dynamo_megatron.comparison.spec import Run, Spec, planned_runs, read_spec
from dynamo_megatron.comparison.statistics import find
from dynamo_megatron.comparison.table import Measured, as_markdown, as_plain, notes
from dynamo_megatron.config.files import ConfigError
from dynamo_megatron.launcher.command import program
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.runtime.plain_text import printable, show
from dynamo_megatron.runtime.whole_files import replacing
from dynamo_megatron.tracking.progress import terminal_width, wrapped

if TYPE_CHECKING:
    from dynamo_megatron.comparison.curves import Outcome


def compare(options: argparse.Namespace) -> int:
    """Returns the exit code. Raises ConfigError."""
    spec = read_spec(options.spec)
    ranks = ["--ranks", str(options.ranks)] if options.ranks else []
    runs, output = planned_runs(spec, ranks), Path(spec.output_dir)
    part = _part(options.part, len(runs))
    for line in spec.wide():
        print(f"warning: {line}; the best one may lie between them", file=sys.stderr)
    command = program(sys.executable, "compare", [options.spec, *ranks])
    if options.dry_run:
        for run in runs:
            print(shlex.join(["dynamo-megatron", "train", *run.words]))
        return 0
    outcomes = {run: _checked(read_outcome, run) for run in runs}
    if not options.table:
        stop = Stop()
        _check_shared(runs, options.jobs)
        work = side_by_side(command, options.jobs, stop) if options.jobs > 1 else _carry_out(runs, part, output, stop)
        code = asyncio.run(_watched(work, stop))
        if stop.asked is not None:
            print("stopped; the same command goes on", file=sys.stderr, flush=True)
        if code:
            return code
        outcomes = {run: read_outcome(run) for run in runs}
    if part is not None:
        return 0  # the tables are of all parts
    return write_comparison(spec, outcomes, output)


def _check_shared(runs: Sequence[Run], jobs: int) -> None:
    """Raises ConfigError where runs side by side would listen at one port, or push to the same servers."""
    if jobs == 1:
        return
    for config in (run.config for run in runs):
        reward_servers = config.reward.servers
        ports = {
            "tracking.openmetrics": config.tracking.openmetrics,
            "rollout.port": config.rollout.port,
            "reward.servers.port": reward_servers.port if reward_servers is not None else None,
        }
        for key, port in ports.items():
            if port is not None:
                raise ConfigError(
                    f"{key}: {port}: with --jobs {jobs} several runs would listen there at once; set it to null, or "
                    "leave --jobs out"
                )
        if config.rollout.placement == "external":
            raise ConfigError(
                f"rollout.placement: external: with --jobs {jobs} several runs would push their weights to the same "
                "servers at once; leave --jobs out"
            )


async def _watched(work, stop: Stop) -> int:
    stop.watch()
    code = await work
    return stop.code if stop.asked is not None else code


async def _carry_out(runs: Sequence[Run], part: tuple[int, int] | None, output: Path, stop: Stop) -> int:
    first, step = part or (1, 1)
    folder = output / "servers" / (f"part-{first}-of-{step}" if part else "")
    try:
        await carry_out(runs[first - 1 :: step], len(runs), folder, stop)
    except RolloutError as error:
        show(str(error))
        return 1
    return 0


def _part(text: str | None, runs: int) -> tuple[int, int] | None:
    """(I, N) of I/N. Raises ConfigError."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]) <= runs:
        raise ConfigError(f"--part: {text!r}; give I/N with 1 <= I <= N <= {runs}, the number of runs")
    return int(match[1]), int(match[2])


def _checked(read, *arguments):
    try:
        return read(*arguments)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def write_comparison(spec: Spec, outcomes: dict[Run, Outcome | None], output: Path) -> int:
    """Writes curves.jsonl of all runs, and the tables and the picture of the seeds that are complete; prints the text.

    Returns 0, or 1 where a run has failed that might not fail again. Raises ConfigError where files are broken, or no
    seed is complete.
    """
    from dynamo_megatron.comparison.picture import draw  # matplotlib takes a second to import

    curves = {run: _checked(read_curve, run) for run in outcomes}
    write_curves(output / "curves.jsonl", curves.values())
    seeds = whole_seeds(spec, outcomes)
    if not seeds:
        ended = sum(outcome is not None for outcome in outcomes.values())
        raise ConfigError(
            f"{output}: {ended} of {len(outcomes)} runs have ended, and all of no seed; start it without --table"
        )
    arms = _checked(arrays, spec, seeds, outcomes, curves)
    measured = Measured(spec, seeds, outcomes, curves, arms, find(arms, spec.control))
    found = as_plain(measured)
    text = as_markdown(found, notes(measured, found))
    draw(measured, found, output / "comparison.png")
    with replacing(output / "comparison.json", shared=True) as file:
        file.write(f"{json.dumps(found, indent=1)}\n".encode())
    with replacing(output / "comparison.md", shared=True) as file:
        file.write(f"{text}\n\n![scores over rollouts, and ratios](comparison.png)\n".encode())
    print(wrapped(printable(f"{text}\n\nThese tables are in {output / 'comparison.md'}."), terminal_width(sys.stdout)))
    again = [run.name for run, o in outcomes.items() if o is not None and not (o.finished or o.diverged)]
    if again:
        show(f"{len(again)} runs failed, the first {again[0]}; the same command tries them again")
    return 1 if again else 0
