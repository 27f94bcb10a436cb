"""`dynamo-megatron replay RUN`: the counts that each allocator would have given, as tables and JSON."""

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
from dynamo_megatron.reports.figures import rate_classes

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
    """Writes replay.md, and the counts of every prompt as replay.json, into `out` (None: `folder`). Returns the text of
    replay.md, and where the files are.

    `threshold` and `reward_key` are for the dumps of other trainers. Raises ValueError (one line) for a folder without
    rollouts, for a broken line in it, and for an allocator that cannot be parsed or does not fit the budget.
    """
    recording = _read(folder, 1.0 if threshold is None else threshold, reward_key)
    steps, base, difference = recording.steps, base_allocator(recording), None
    # Not reproducible: a record has only estimates of energies, and with cost: tokens not the step's budget in tokens.
    by_energy = base.kind in ("gvm", "cures") or base.variance == "energy"
    checked = recording.trainer == "dynamo-megatron" and not by_energy and base.cost == "rollouts"
    if checked:
        difference = what_if.first_difference(steps, what_if.replay(steps, base, recording.strata))
    counts = {"as recorded": what_if.given(steps)}
    for text in dict.fromkeys(["uniform", *(allocators or DEFAULT_ALLOCATORS)]):
        counts[text] = what_if.replay(steps, parse_allocator(text, recording), recording.strata)
    rates = what_if.success_rates(steps)
    counts["oracle"] = what_if.oracle(steps, rates, base)
    text = "\n\n".join([_heading(recording, rates, checked, difference), _tables(rates, counts, base)])
    reproduced = difference is None if checked else None
    found = {
        **{"folder": str(folder), "trainer": recording.trainer, "reproduced": reproduced},
        "first_difference": difference and difference._asdict(),
        "prompts": _prompts(recording, rates, counts),
    }
    out = out or folder
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "replay.md").write_text(f"{text}\n", encoding="utf-8")
        (out / "replay.json").write_text(json.dumps(found, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{out}: {error.strerror}; name a folder to write to with --out") from None
    return f"{text}\n\nThis text is in {out}/replay.md, every prompt in replay.json."


def _read(folder: Path, threshold: float, reward_key: str | None) -> Recording:
    if (folder / "config.yaml").is_file():
        return read_run(folder)
    if verl_files(folder):
        return read_verl(folder, threshold, reward_key)
    if slime_files(folder):
        return read_slime(folder, threshold, reward_key)
    raise ConfigError(
        f"{folder}: no run (config.yaml), no rollouts of verl (trainer.rollout_data_dir, STEP.jsonl) and none of slime "
        "(--save-debug-rollout-data, .pt)"
    )


def _heading(recording: Recording, rates: np.ndarray, checked: bool, difference: what_if.Difference | None) -> str:
    steps, prompts = len({step.step for step in recording.steps}), len(set(recording.prompt_ids))
    lines = [
        f"{steps} step{'s' * (steps > 1)} of {recording.trainer} with {sum(s.budget for s in recording.steps)} "
        f"rollouts: {len(rates)} visits to {prompts} prompts. On a first visit nothing is known of a prompt; "
        f"{len(rates) - prompts} visits are later ones."
    ]
    if difference is not None:
        lines.append(
            f"NOT REPRODUCED: replaying the run's own allocator first differs at step {difference.step}, prompt "
            f"{difference.prompt_id!r}: {difference.given} in allocation.jsonl, {difference.replayed} replayed; other "
            "code or other files than those of the run."
        )
    elif checked:
        lines.append(f"Replaying the run's own allocator gives all {len(rates)} counts of allocation.jsonl exactly.")
    return f"# Replay of {recording.folder}\n\n" + "\n\n".join(lines + recording.notes)


def _tables(rates: np.ndarray, counts: dict[str, np.ndarray], base: AllocationConfig) -> str:
    variance = {name: what_if.expected_variance(rates, each).sum() for name, each in counts.items()}
    rows = [["allocator", "rollouts", "expected variance, uniform = 1", "oracle = 1", "all right or all wrong, %"]]
    for name, each in counts.items():
        others = (variance["uniform"], variance["oracle"])
        ratios = (f"{variance[name] / other:.3f}" if other else "-" for other in others)
        alike = what_if.degenerate_chance(rates, each).mean()
        rows.append([name, str(each.sum()), *ratios, f"{100 * alike:.1f}"])
    classes = [["success rate p", "visits", *counts]]
    for name, members in rate_classes(rates).items():
        means = [f"{each[members].mean():.2f}" if members.any() else "-" for each in counts.values()]
        classes.append([name, str(members.sum()), *means])
    meaning = MEANING.format(base.rollout_n_min, base.rollout_n_max)
    return (
        f"## Allocators on the same rollouts\n\n{markdown(rows)}\n\n{meaning}\n\n"
        f"## Mean rollouts of a visit\n\n{markdown(classes)}"
    )


def _prompts(recording: Recording, rates: np.ndarray, counts: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Of each prompt its visits: their steps, and by allocator their rollouts."""
    steps = np.array([step.step for step in recording.steps for _ in step.prompt_ids])
    visits: dict[str, list[int]] = {}
    for visit, prompt_id in enumerate(recording.prompt_ids):
        visits.setdefault(prompt_id, []).append(visit)
    return [
        {
            "prompt_id": prompt_id,
            "prompt": recording.texts.get(prompt_id),
            "success_rate": float(rates[its[0]]),
            "steps": steps[its].tolist(),
            "rollouts": {name: each[its].tolist() for name, each in counts.items()},
        }
        for prompt_id, its in visits.items()
    ]
