"""All data that the page shows of one or several runs, as plain data for JSON."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dynamo_megatron.config import StopConfig
from dynamo_megatron.errors import InputError
from dynamo_megatron.reports.page.allocation import allocation_view, by_source
from dynamo_megatron.reports.page.curves import curves
from dynamo_megatron.reports.page.findings import findings
from dynamo_megatron.reports.page.pairs import pairs
from dynamo_megatron.reports.page.render import as_json
from dynamo_megatron.reports.page.rollouts import Shown, has_process_rewards, rollout_view, shown_rollouts
from dynamo_megatron.reports.page.token_texts import Decode, find_decoder
from dynamo_megatron.reports.report import before_and_after
from dynamo_megatron.reports.run_record import RunRecord, read_revisits, read_run
from dynamo_megatron.reports.side_by_side import run_names
from dynamo_megatron.tracking.stopping import StopRule

MOST_RUNS = 8  # on one page
ROLLOUT_BYTES, PAIR_BYTES = 2_500_000, 800_000  # limits on the JSON of all runs together
MISSES = 20  # after this many rollouts in a row that do not fit, no more are tried: a long one takes 0.2 s


def page_data(
    folders: Sequence[Path],
    asked: Collection[str] = (),
    refresh: float | None = None,
    decoders: dict[Path, Decode | None] | None = None,
) -> dict[str, Any]:
    """The page's data. `runs`: the first MOST_RUNS of `folders` in their order. `left_out`: the other folders. `pairs`:
    as returned by `pairs`. `made`: the time. `refresh`: seconds until the page is written again, or None. `asked`: ids
    of rollouts of the first run that must be among those shown. `decoders`: decoders that are already loaded, by run
    folder; new ones are added.

    Raises ValueError for a folder that is not a run's or has no step, for a broken line in a run's files, and for ids
    in `asked` that do not exist or take too many bytes."""
    decoders = {} if decoders is None else decoders
    folders, left_out = folders[:MOST_RUNS], folders[MOST_RUNS:]
    runs = dict(zip(run_names(folders), map(read_run, folders), strict=True))
    views, found = {}, []
    for name, run in runs.items():
        if decoders.get(run.folder) is None:  # the run may have exported its model since then
            decoders[run.folder] = find_decoder(run.folder, run.config["model"]["path"])
        first = run is next(iter(runs.values()))
        rollouts = _rollouts(run, asked if first else (), decoders[run.folder], ROLLOUT_BYTES // len(runs))
        views[name] = rollouts["shown"]
        found.append({"name": name, **_run(run), "rollouts": rollouts})
    return {
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        "refresh": refresh,
        "runs": found,
        "left_out": [str(folder) for folder in left_out],
        "pairs": pairs(runs, views, PAIR_BYTES),
    }


def _run(run: RunRecord) -> dict[str, Any]:
    config, last = run.config, run.metrics[-1]["step"]
    return {
        "folder": str(run.folder),
        "step": last,
        "steps": config["trainer"]["steps"],
        "ended": _ended(run),
        "model": str(config["model"]["path"]),
        "data": str(config["data"]["source"]),
        "allocator": config["algorithm"]["allocation"]["kind"],
        "advantage": config["algorithm"].get("advantage", {}).get("kind"),
        "modulation": config["algorithm"].get("modulation") is not None,
        "scores": dict(zip(("said", "rows"), before_and_after(run), strict=True)),
        "curves": curves(run),
        "findings": findings(run, by_source(run.folder, last)),
        "allocation": allocation_view(run.folder, read_revisits(run.folder)),
    }


def _ended(run: RunRecord) -> bool:
    """Returns True where the run has made its last step, by `trainer.steps` or `stop_when`, and has evaluated it if the
    config has evaluations."""
    last = run.metrics[-1]["step"]
    evaluates = run.config.get("eval", {}).get("every") is not None
    return (last >= run.config["trainer"]["steps"] or _stopped(run)) and (
        not evaluates or any(evaluation["step"] == last for evaluation in run.evaluations)
    )


def _stopped(run: RunRecord) -> bool:
    if (rule := run.config["trainer"].get("stop_when")) is None:
        return False
    try:
        return StopRule(StopConfig(**rule)).replay(run.metrics, run.evaluations) is not None
    except ValueError:  # another version's config, or the run has no such metric and has failed for that
        return False


def _rollouts(run: RunRecord, asked: Collection[str], decode: Decode | None, most_bytes: int) -> dict[str, Any]:
    """`shown`: views of rollouts, at most `most_bytes` of JSON. `steps`: their steps. `left_out`: the number of chosen
    rollouts that did not fit. `notes`: remarks on missing data.

    A run on recorded rollouts has its rollouts in the folder that its config names."""
    source = Path(run.config["rollout"].get("recorded") or run.folder)
    last = run.metrics[-1]["step"]
    chosen = shown_rollouts(run.folder, source, last, run.config, asked)
    views: list[dict[str, Any]] = []
    size = missed = 0
    for shown in chosen:
        view = rollout_view(shown, decode)
        more = len(as_json(view))
        if size + more <= most_bytes:
            views.append(view)
            size, missed = size + more, 0
        elif "asked for" in shown.labels:
            raise InputError(f"--rollout: those named take more than {most_bytes:,} bytes; name fewer")
        elif (missed := missed + 1) == MISSES:
            break
    return {
        "shown": views,
        "steps": sorted({view["step"] for view in views}),
        "left_out": len(chosen) - len(views),
        "notes": _notes(run, source, chosen, decode),
    }


def _notes(run: RunRecord, source: Path, chosen: Sequence[Shown], decode: Decode | None) -> list[str]:
    if not chosen:
        return [f"{source} has no rollouts."]
    notes = []
    if decode is None:
        place = f"{run.config['model']['path']} and {run.folder / 'hf'}"
        notes.append(f"Tokens are shown by their ids: there is no tokenizer in {place}.")
    if not any(shown.tokens for shown in chosen):
        notes.append(
            "Entropy, modulation and the gap to the engine are not in this run's files, which have the token ids and "
            "the engine's logprobs; tracking.token_rollouts: N writes them for N rollouts a step."
        )
    if all(shown.advantage is None for shown in chosen):
        measured = any("advantage" in shown.tokens for shown in chosen)
        what = f"of kind {run.config['algorithm'].get('advantage', {}).get('kind')}"
        if has_process_rewards([shown.rollout for shown in chosen], run.config):
            what = "with process rewards"
        notes.append(
            f"Advantages {what} cannot be computed from the outcomes of a step's rollouts alone"
            + ("; those shown were recorded in training (tokens/)." if measured else ".")
        )
    return notes
