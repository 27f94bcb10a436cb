"""`dynamo-megatron report`: report.md, report.png and report.html."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from plotly.offline import get_plotlyjs

from dynamo_megatron.data.templates import load_tokenizer
from dynamo_megatron.errors import ConfigError, InputError
from dynamo_megatron.evaluation.results import markdown
from dynamo_megatron.reports.figures import Figure, allocation_figures, draw, metric_figures, plain
from dynamo_megatron.reports.run_record import RunRecord, read_revisits, read_runs
from dynamo_megatron.reports.samples import message_text, pairs_of
from dynamo_megatron.reports.tables import Section, sections
from dynamo_megatron.rollout.store import read_rollouts, step_files, tokens_file
from dynamo_megatron.rollout.token_spans import character_ends
from dynamo_megatron.runtime.plain_text import printable
from dynamo_megatron.tracking.token_rows import read_token_rows
from dynamo_megatron.types import NOT_TRAINED, Rollout

IN_PICTURE = ("Reward", "Policy entropy", "Response length", "Rollouts by earlier success rate")
STEPS, EACH = 12, 2  # steps that rollouts are shown of; best, worst, truncated and failed ones of each
MOST_TOKENS, MOST_TEXT = 2000, 20_000  # of a response, and characters of a text, that are shown
SURPRISE = "surprise, -logprob of the engine"  # the statistic that tokens are coloured by at first
HTML_IN_JSON = {ord(c): f"\\u{ord(c):04x}" for c in "<>&"}

Decode = Callable[[Sequence[int]], str]


def write_report(folders: Sequence[Path], out: Path, asked: Collection[str] = ()) -> str:
    """Writes OUT/report.md, OUT/report.png and OUT/report.html; returns the text of report.md. `asked`: ids of rollouts
    of the first run that must be in the page.

    Runs may differ in anything. Raises ValueError for a folder that is not a run's, has no step or is named twice, for
    a broken line in a run's files, and for an asked rollout that is not there.
    """
    runs = read_runs(folders)
    revisits = {name: seen for name, run in runs.items() if (seen := read_revisits(run.folder)) is not None}
    title, tables = f"Report of {', '.join(runs)}", sections(runs)
    parts = [[f"## {s.title}", s.text, markdown(s.rows) if s.rows else ""] for s in tables]
    text = "\n\n".join([f"# {title}", *(part for section in parts for part in section if part)])
    figures = [*metric_figures(runs), *allocation_figures(revisits)]
    page = _page(runs, title, tables, figures, asked)
    try:
        out.mkdir(parents=True, exist_ok=True)
        draw([each for each in figures if each["title"] in IN_PICTURE], title, out / "report.png")
        (out / "report.md").write_text(f"{text}\n\n![curves](report.png)\n", encoding="utf-8")
        (out / "report.html").write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{out}: {error.strerror}; name a folder to write to with --out") from None
    return text


def _page(
    runs: Mapping[str, RunRecord],
    title: str,
    tables: Sequence[Section],
    figures: Sequence[Figure],
    asked: Collection[str],
) -> str:
    """An HTML page that loads nothing from elsewhere."""
    shown, pairs = [], {}
    for r, (name, run) in enumerate(runs.items()):
        decode, of_several = _decoder(run), [name] if len(runs) > 1 else []
        for rollout, labels, statistics, pair in _chosen(run, asked if r == 0 else ()):
            shown.append(rollout_view(rollout, [*labels, *of_several], statistics, decode))
            if pair is not None:
                group = "/".join([*of_several, pair["id"]])  # runs have groups of the same id
                pairs[group] = {**pair, "id": group}
    data = {"figures": figures, "tokens": [view["tokens"] for view in shown], "pairs": [*pairs.values()]}
    source = (resources.files("dynamo_megatron.reports") / "page.html").read_text(encoding="utf-8")
    return jinja2.Template(source, autoescape=True).render(
        title=title,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        sections=tables,
        figures=figures,
        rollouts=shown,
        pairs=len(pairs),
        kinds=list(dict.fromkeys(kind for view in shown for kind in (SURPRISE, *view["tokens"]["values"]))),
        data=json.dumps(data, allow_nan=False).translate(HTML_IN_JSON),
        plotly=get_plotlyjs(),
    )


def _chosen(
    run: RunRecord, asked: Collection[str]
) -> list[tuple[Rollout, list[str], dict[str, list[float]], dict[str, str] | None]]:
    """Returns (rollout, why it is shown, its statistics by name, one number a response token, the `pairs_of` its
    group): those asked for, then of the newest step, of the first, and of steps between them the best, the worst and
    what else stands out."""
    source = Path(run.config["rollout"].get("recorded") or run.folder)
    files = {step: path for step, path in step_files(source).items() if step <= run.metrics[-1]["step"]}
    places = np.linspace(len(files) - 1, 0, min(STEPS, len(files))).round().astype(int)
    of_asked = {int(name.split("-")[0]) for name in asked if name.split("-")[0].isdecimal()} & files.keys()
    found = []
    for step in dict.fromkeys([*of_asked, *(list(files)[place] for place in places)]):
        rollouts = read_rollouts(files[step], routes=False)
        pairs = {pair["id"]: pair for pair in pairs_of(rollouts)}
        rollouts.sort(key=lambda r: r.rollout_id)
        # A run on recorded rollouts has them by ids of its own.
        statistics = read_token_rows(tokens_file(run.folder, step)) if source == run.folder else {}
        scored = sorted((r for r in rollouts if r.status == "ok"), key=lambda r: r.reward)
        kinds = {
            "asked for": [r for r in rollouts if r.rollout_id in asked],
            "token statistics": [r for r in rollouts if r.rollout_id in statistics],
            "best": scored[: -EACH - 1 : -1],
            "worst": scored[:EACH],
            "truncated": [r for r in rollouts if r.finish_reason == "length"][:EACH],
            "not trained on": [r for r in rollouts if r.status in NOT_TRAINED][:EACH],
            "not scored": [r for r in rollouts if r.status not in ("ok", *NOT_TRAINED)][:EACH],
        }
        for rollout in {r.rollout_id: r for its in kinds.values() for r in its}.values():
            labels = [kind for kind, its in kinds.items() if rollout in its]
            found.append((rollout, labels, statistics.get(rollout.rollout_id, {}), pairs.get(rollout.group_id)))
    if missing := set(asked) - {rollout.rollout_id for rollout, *_ in found}:
        raise InputError(f"--rollout: {source} has no rollout {min(missing)!r}; ids begin with the step")
    return sorted(found, key=lambda each: "asked for" not in each[1])


def rollout_view(
    rollout: Rollout, labels: Sequence[str], statistics: Mapping[str, list[float]], decode: Decode | None
) -> dict[str, Any]:
    """The texts of one rollout for the page, and of its first MOST_TOKENS response `tokens` the `texts` and `values`:
    name -> a number for each."""
    ids = rollout.response_tokens[:MOST_TOKENS]
    engine = np.array(rollout.engine_logprobs[: len(ids)], np.float64)
    numbers = {name: np.array(values[: len(ids)], np.float64) for name, values in sorted(statistics.items())}
    if "logprob" in numbers:
        numbers["gap, policy - engine"] = numbers.pop("logprob") - engine
    versions = np.full(len(ids), np.nan)
    for version, start, end in rollout.weight_versions:
        versions[start:end] = version
    numbers |= {SURPRISE: -engine, "version of the weights": versions}
    parts = "".join(f", {name} {value:g}" for name, value in rollout.reward_parts.items())
    head = f"{rollout.rollout_id}: reward {rollout.reward:g}{parts}; {len(rollout.response_tokens)} tokens, ended by "
    messages = [] if rollout.episode is None else rollout.episode.messages or []
    before = [(f"Prompt {rollout.prompt_id}", rollout.prompt or "")]
    before += [(f"Message {number}", message_text(message)) for number, message in enumerate(messages, 1)]
    return {
        "head": printable(f"{head}{rollout.finish_reason}, status {rollout.status} ({', '.join(labels)})"),
        "before": [(printable(title), _cut(text)) for title, text in before],
        "episode": bool(messages),
        "answer": _cut(rollout.answer if isinstance(rollout.answer, str) else json.dumps(rollout.answer)),
        "tokens": {
            "texts": [f"[{i}]" for i in ids] if decode is None else [*map(printable, token_texts(ids, decode))],
            "values": {name: plain(each) for name, each in numbers.items()},
        },
    }


def _cut(text: str) -> str:
    more = f"\n[cut: {len(text) - MOST_TEXT:,} more characters]" if len(text) > MOST_TEXT else ""
    return printable(text[:MOST_TEXT]) + more


def _decoder(run: RunRecord) -> Decode | None:
    """Of the tokenizer of the run's model, or of its exported model; None where neither loads here."""
    for place in (Path(run.config["model"]["path"]), run.folder / "hf"):
        try:
            tokenizer = load_tokenizer(place)
        except InputError:
            continue
        return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return None


def token_texts(ids: Sequence[int], decode: Decode) -> list[str]:
    """One piece of text per token; joined they are the whole text. Where several tokens form a character, the last of
    them gets it and the others get ""."""
    text, ends = decode(ids), character_ends(ids, decode)
    return [text[start:end] for start, end in pairwise([0, *ends[:-1], len(text)][: len(ids) + 1])]
