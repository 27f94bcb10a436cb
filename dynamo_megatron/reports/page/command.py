"""`dynamo-megatron report`: writes report.html, once or while runs go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dynamo_megatron.errors import InputError
from dynamo_megatron.reports.page.data import MOST_RUNS, page_data
from dynamo_megatron.reports.page.render import chart_library, render, write_html
from dynamo_megatron.reports.page.token_texts import find_decoder
from dynamo_megatron.reports.run_record import read_config
from dynamo_megatron.runtime.run_folder import is_held

LOGS = ("metrics.jsonl", "evaluations.jsonl")
STALLED = 2 * 3600.0  # seconds without a new line in LOGS, after which a watch ends
LOOK_EVERY = 60.0  # seconds without a new line, after which it looks whether a process still trains there
SHARE = 10  # a page that takes t seconds to write is written every SHARE * t seconds at most
POLL = 1.0  # seconds


def write_page(folders: Sequence[Path], out: Path, asked: Sequence[str] = ()) -> Path:
    """Writes OUT/report.html and returns its path. `asked`: ids of rollouts that must be in it.

    Raises ValueError as `page_data`, and MissingLibrary."""
    library, path = chart_library(), out / "report.html"
    write_html(path, render(page_data(folders, asked), library))
    return path


def watch(
    folders: Sequence[Path],
    out: Path,
    seconds: float,
    asked: Sequence[str] = (),
    say: Callable[[str], None] = print,
    stalled: float = STALLED,
) -> None:
    """Writes OUT/report.html at most every `seconds`, whenever the runs have made a step or an evaluation, until all of
    them have made their last. `say` gets a line for the first writing and one for the end.

    Raises ValueError as `write_page`, and where nothing will change: for LOOK_EVERY seconds nothing has, and no process
    trains in the folders of runs that have steps to make; or nothing has for `stalled` seconds."""
    library, path = chart_library(), out / "report.html"
    shown = folders[:MOST_RUNS]
    decoders = {folder: find_decoder(folder, read_config(folder)["model"]["path"]) for folder in shown}
    seen, changed, pause, written = None, time.monotonic(), 0.0, False
    going, look = list(shown), LOOK_EVERY
    while True:
        now = _state(shown)
        if now != seen and all(now):
            begin = time.monotonic()
            try:
                data = page_data(folders, asked, seconds, decoders)
            except FileNotFoundError:  # the run has removed rollouts of an old step meanwhile (rollout.keep_last)
                time.sleep(POLL)
                continue
            going = [folder for folder, run in zip(shown, data["runs"], strict=True) if not run["ended"]]
            write_html(path, render(data | {"refresh": seconds if going else None}, library))
            look = LOOK_EVERY
            seen, changed, pause = now, time.monotonic(), max(seconds, SHARE * (time.monotonic() - begin))
            if not written:
                say(f"{path} is written, and again about every {seconds:g} s; Ctrl-C ends this, not the run")
                written = True
            if not going:
                say(f"{path}: the last step is in it")
                return
        waited = time.monotonic() - changed
        if waited > look:
            if not any(map(is_held, going)):
                raise InputError(
                    f"report --watch: no process trains in {', '.join(map(str, going))}, and the last step is not "
                    "made; call it again when the run goes on"
                )
            look += LOOK_EVERY
        if waited > stalled:
            raise InputError(
                f"report --watch: no step in {', '.join(map(str, shown))} for {waited / 60:.0f} minutes; call it "
                "again when the run goes on"
            )
        time.sleep(pause or POLL)


def _state(folders: Sequence[Path]) -> tuple[tuple[int, ...], ...]:
    """The sizes of each run's LOGS; () for a run that has no step yet."""
    sizes = [tuple(f.stat().st_size if f.is_file() else 0 for f in (folder / n for n in LOGS)) for folder in folders]
    return tuple(size if size[0] else () for size in sizes)
