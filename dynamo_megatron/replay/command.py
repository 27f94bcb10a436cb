"""`dynamo-megatron replay RUN`: the counts that each allocator would have given, as tables, JSON and a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dynamo_megatron.config import AllocationConfig
from dynamo_megatron.config.files import ConfigError
from dynamo_megatron.evaluation.results import markdown
from dynamo_megatron.replay import what_if
from dynamo_megatron.replay.allocators import base_allocator, parse_allocator
from dynamo_megatron.replay.dumps import read_slime, read_verl, slime_files, verl_files
from dynamo_megatron.replay.recording import Recording, read_run
from dynamo_megatron.reports.figures import (
    COLOURS,
    DASHES,
    draw,
    figure,
    moving_average,
    plain,
    rate_bins,
    rate_classes,
    window_of,
)

DEFAULT_ALLOCATORS = ("uniform", "waterfill", "neyman", "neyman,variance=energy", "knapsack", "cero", "gvm", "cures")
MEANING = (
    "p is a prompt's success rate over the whole record, known only afterwards; the rollouts that an allocator learned "
    "from are among those that it is evaluated on. Expected variance is sum p(1-p)/n, not the gradient's. The oracle "
    "knows p; it has the step's budget and {} to {} rollouts for a prompt. Every allocator saw what was sampled, not "
    "what it would have asked for."
)


def write_replay(
    folder: Path, allocators: Sequence[str] | None, threshold: float | None, reward_key: str | None, out: Path | None
) -> str:
    """Writes replay.md, replay.json and replay.png into `out` (None: `folder`). Returns the text of replay.md, and
    where the files are.

    `threshold` and `reward_key` are for the dumps of other trainers. Raises ValueError (one line) for a folder without
    rollouts, for a broken line in it, and for an allocator that cannot be parsed.
    """
    recording = _read(folder, threshold, reward_key)
    base = base_allocator(recording)
    counts, difference = replay_all(recording, base, allocators or DEFAULT_ALLOCATORS)
    rates = what_if.success_rates(recording.steps)
    measures = _measures(rates, counts)
    text = "\n\n".join([_heading(recording, rates, difference), _tables(rates, counts, measures, base)])
    found = _plain(recording, rates, counts, measures, difference)
    out = out or folder
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "replay.md").write_text(f"{text}\n\n![variance and rollouts](replay.png)\n", encoding="utf-8")
        (out / "replay.json").write_text(json.dumps(found, ensure_ascii=False) + "\n", encoding="utf-8")
        draw(_figures(recording, rates, counts), f"What each allocator would have given: {folder}", out / "replay.png")
    except OSError as error:
        raise ConfigError(f"{out}: {error.strerror}; name a folder to write to with --out") from None
    return f"{text}\n\nThis text is in {out}/replay.md, every prompt in replay.json, the picture in replay.png."


def _read(folder: Path, threshold: float | None, reward_key: str | None) -> Recording:
    if (folder / "config.yaml").is_file():
        if threshold is not None or reward_key is not None:
            raise ConfigError(
                f"{folder}: a run of ours, whose rollouts say themselves if they succeeded; leave out "
                "--success-threshold and --reward-key"
            )
        return read_run(folder)
    threshold = 1.0 if threshold is None else threshold
    if verl_files(folder):
        return read_verl(folder, threshold, reward_key)
    if slime_files(folder):
        return read_slime(folder, threshold, reward_key)
    raise ConfigError(
        f"{folder}: no run (config.yaml), no rollouts of verl (trainer.rollout_data_dir, STEP.jsonl) and none of slime "
        "(--save-debug-rollout-data, .pt)"
    )


def replay_all(
    recording: Recording, base: AllocationConfig, asked: Sequence[str]
) -> tuple[dict[str, np.ndarray], what_if.Difference | str]:
    """(name -> rollouts of every visit, int64 [V], of the record, uniform, the allocators `asked` and the oracle; the
    first visit at which a replay of the run's own allocator differs from the record, "none", or "not checked").

    Raises ValueError for an allocator that cannot be parsed or does not fit the budget.
    """
    steps, difference = recording.steps, "not checked"
    # Not reproducible: a record has only estimates of energies, and with cost: tokens not the step's budget in tokens.
    by_energy = base.kind in ("gvm", "cures") or base.variance == "energy"
    if recording.trainer == "dynamo-megatron" and not by_energy and base.cost == "rollouts":
        difference = what_if.first_difference(steps, what_if.replay(steps, base, recording.strata)) or "none"
    counts = {"as recorded": what_if.given(steps)}
    for text in dict.fromkeys(["uniform", *asked]):
        counts[text] = what_if.replay(steps, parse_allocator(text, recording), recording.strata)
    counts["oracle"] = what_if.oracle(steps, what_if.success_rates(steps), base)
    return counts, difference


def _measures(rates: np.ndarray, counts: dict[str, np.ndarray]) -> dict[str, dict[str, Any]]:
    """name -> plain numbers, the variance also relative to uniform's and the oracle's (None where that is 0)."""
    variance = {name: float(what_if.expected_variance(rates, each).sum()) for name, each in counts.items()}
    even, least = variance["uniform"], variance["oracle"]
    return {
        name: {
            "rollouts": int(each.sum()),
            "expected_variance": variance[name],
            "to_uniform": variance[name] / even if even else None,
            "to_oracle": variance[name] / least if least else None,
            "degenerate_expected": float(what_if.degenerate_chance(rates, each).mean()),
        }
        for name, each in counts.items()
    }


def _heading(recording: Recording, rates: np.ndarray, difference: what_if.Difference | str) -> str:
    steps, prompts = len(recording.step_numbers), len(set(recording.prompt_ids))
    lines = [
        f"{steps} step{'s' * (steps > 1)} of {recording.trainer} with {sum(s.budget for s in recording.steps)} "
        f"rollouts: {len(rates)} visits to {prompts} prompts. On a first visit nothing is known of a prompt; "
        f"{len(rates) - prompts} visits are later ones."
    ]
    if isinstance(difference, what_if.Difference):
        lines.append(
            f"NOT REPRODUCED: replaying the run's own allocator first differs at step {difference.step}, prompt "
            f"{difference.prompt_id!r}: {difference.given} in allocation.jsonl, {difference.replayed} replayed; other "
            "code or other files than those of the run."
        )
    elif difference == "none":
        lines.append(f"Replaying the run's own allocator gives all {len(rates)} counts of allocation.jsonl exactly.")
    return f"# Replay of {recording.folder}\n\n" + "\n\n".join(lines + recording.notes)


def _tables(
    rates: np.ndarray, counts: dict[str, np.ndarray], measures: dict[str, dict[str, Any]], base: AllocationConfig
) -> str:
    head = ["allocator", "rollouts", "expected variance, uniform = 1", "oracle = 1", "all right or all wrong, %"]
    rows = [head]
    for name, m in measures.items():
        ratios = ("-" if m[key] is None else f"{m[key]:.3f}" for key in ("to_uniform", "to_oracle"))
        rows.append([name, str(m["rollouts"]), *ratios, f"{100 * m['degenerate_expected']:.1f}"])
    classes = [["success rate p", "visits", *counts]]
    for name, members in rate_classes(rates).items():
        means = [f"{each[members].mean():.2f}" if members.any() else "-" for each in counts.values()]
        classes.append([name, str(members.sum()), *means])
    meaning = MEANING.format(base.rollout_n_min, base.rollout_n_max)
    return (
        f"## Allocators on the same rollouts\n\n{markdown(rows)}\n\n{meaning}\n\n"
        f"## Mean rollouts of a visit\n\n{markdown(classes)}"
    )


def _plain(
    recording: Recording,
    rates: np.ndarray,
    counts: dict[str, np.ndarray],
    measures: dict[str, dict[str, Any]],
    difference: what_if.Difference | str,
) -> dict[str, Any]:
    """The content of replay.json. Lists of counts have an entry per visit of a prompt."""
    visits: dict[str, list[int]] = {}
    for visit, prompt_id in enumerate(recording.prompt_ids):
        visits.setdefault(prompt_id, []).append(visit)
    prompts = [
        {
            "prompt_id": prompt_id,
            "prompt": recording.texts.get(prompt_id),
            "success_rate": float(rates[its[0]]),
            "steps": recording.step_numbers[recording.step_index[its]].tolist(),
            "rollouts": {name: each[its].tolist() for name, each in counts.items()},
        }
        for prompt_id, its in visits.items()
    ]
    differs = isinstance(difference, what_if.Difference)
    return {
        **{"folder": str(recording.folder), "trainer": recording.trainer, "notes": recording.notes},
        "reproduced": None if difference == "not checked" else not differs,
        "first_difference": difference._asdict() if differs else None,
        **{"allocators": measures, "prompts": prompts},
    }


def _figures(recording: Recording, rates: np.ndarray, counts: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    steps, of_step = recording.step_numbers, recording.step_index
    bins, window = rate_bins(rates), window_of(len(steps))
    members = [bins == b for b in np.unique(bins)]
    by_step = {name: np.bincount(of_step, what_if.expected_variance(rates, each)) for name, each in counts.items()}
    even, variance, rollouts = moving_average(by_step["uniform"], window), [], []
    for i, (name, each) in enumerate(counts.items()):
        line = {"color": COLOURS[i % len(COLOURS)], "width": 2, "dash": DASHES[i // len(COLOURS) % len(DASHES)]}
        shown = {"name": name, "mode": "lines+markers", "line": line}
        smooth = moving_average(by_step[name], window)
        ratio = np.divide(smooth, even, out=np.ones(len(even)), where=even > 0)
        variance.append({"x": steps.tolist(), "y": plain(ratio), **shown, "mode": "lines"})
        x, y = ([values[its].mean() for its in members] for values in (rates, each))
        rollouts.append({"x": plain(x), "y": plain(y), **shown})
    return [
        figure("Expected variance from the same budget", "sum p(1-p)/n, uniform = 1", variance),
        figure("Rollouts by success rate", "rollouts of a visit, mean", rollouts, x="success rate p of a prompt"),
    ]
