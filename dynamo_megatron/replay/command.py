"""`dynamo-megatron replay RUN`: the counts that each allocator would have given, as tables and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dynamo_megatron.config import AllocationConfig
from dynamo_megatron.config.files import ConfigError
from dynamo_megatron.evaluation.results import markdown
from dynamo_megatron.replay import what_if
from dynamo_megatron.replay.recording import Recording, read_record
from dynamo_megatron.reports.figures import rate_classes

DEFAULT_ALLOCATORS = ("uniform", "waterfill", "neyman", "neyman,variance=energy", "knapsack", "cero", "gvm", "cures")
MEANING = (
    "p is a prompt's success rate over the whole record, known only afterwards; the rollouts that an allocator learned "
    "from are among those that it is evaluated on. Expected variance is sum p(1-p)/n, not the gradient's. Every "
    "allocator saw what was sampled, not what it would have asked for, and had the step's budget and {} to {} rollouts "
    "for a prompt."
)


def write_replay(
    folder: Path, allocators: Sequence[str] | None, threshold: float | None, reward_key: str | None, out: Path | None
) -> str:
    """Writes replay.md, and as replay.json the step, prompt and success rate of every visit and the counts that it was
    given, into `out` (None: `folder`). Returns the text of replay.md, and where the files are.

    `threshold` and `reward_key` are for the dumps of other trainers. Raises ValueError (one line) for a folder without
    rollouts, for a broken line in it, and for an allocator that cannot be parsed or does not fit the budget.
    """
    recording = read_record(folder, 1.0 if threshold is None else threshold, reward_key)
    steps, base = recording.steps, what_if.allocator_of(recording)
    counts = {"as recorded": what_if.given(steps)}
    for text in dict.fromkeys(["uniform", *(allocators or DEFAULT_ALLOCATORS)]):
        counts[text] = what_if.replay(steps, what_if.allocator_of(recording, text), recording.strata)
    rates = what_if.success_rates(steps)
    text = "\n\n".join([*_heading(recording, base), *_tables(rates, counts, base)])
    found = {
        "steps": [step.step for step in steps for _ in step.prompt_ids],
        "prompt_ids": recording.prompt_ids,
        "success_rates": rates.tolist(),
        "rollouts": {name: each.tolist() for name, each in counts.items()},
    }
    out = out or folder
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "replay.md").write_text(f"{text}\n", encoding="utf-8")
        (out / "replay.json").write_text(json.dumps(found, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{out}: {error.strerror}; name a folder to write to with --out") from None
    return f"{text}\n\nThis text is in {out}/replay.md, every visit in replay.json."


def _heading(recording: Recording, base: AllocationConfig) -> list[str]:
    """What is recorded, and whether replaying the run's own allocator gives the recorded counts."""
    steps, visits = recording.steps, len(recording.prompt_ids)
    prompts = len(set(recording.prompt_ids))
    lines = [
        f"# Replay of {recording.folder}",
        f"Steps {steps[0].step} to {steps[-1].step} of {recording.trainer} with {sum(s.budget for s in steps)} "
        f"rollouts: {visits} visits to {prompts} prompts. On a first visit nothing is known of a prompt; "
        f"{visits - prompts} visits are later ones.",
    ]
    # Not reproducible: a record has only estimates of energies, and with cost: tokens not the step's budget in tokens.
    by_energy = base.kind in ("gvm", "cures") or base.variance == "energy"
    if recording.trainer == "dynamo-megatron" and not by_energy and base.cost == "rollouts":
        difference = what_if.first_difference(steps, what_if.replay(steps, base, recording.strata))
        if difference is None:
            lines.append(f"Replaying the run's own allocator gives all {visits} counts of allocation.jsonl exactly.")
        else:
            step, prompt_id, recorded, replayed = difference
            lines.append(
                f"NOT REPRODUCED: replaying the run's own allocator first differs at step {step}, prompt "
                f"{prompt_id!r}: {recorded} in allocation.jsonl, {replayed} replayed; other code or other files than "
                "those of the run."
            )
    return lines + recording.notes


def _tables(rates: np.ndarray, counts: dict[str, np.ndarray], base: AllocationConfig) -> list[str]:
    variance = {name: (rates * (1 - rates) / each).sum() for name, each in counts.items()}
    rows, even = [["allocator", "rollouts", "expected variance, uniform = 1"]], variance["uniform"]
    for name, each in counts.items():
        rows.append([name, str(each.sum()), f"{variance[name] / even:.3f}" if even else "-"])
    classes = [["success rate p", "visits", *counts]]
    for name, members in rate_classes(rates).items():
        means = [f"{each[members].mean():.2f}" if members.any() else "-" for each in counts.values()]
        classes.append([name, str(members.sum()), *means])
    return [
        *("## Allocators on the same rollouts", markdown(rows), MEANING.format(base.rollout_n_min, base.rollout_n_max)),
        *("## Mean rollouts of a visit", markdown(classes)),
    ]
