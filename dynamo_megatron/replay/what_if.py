"""`dynamo-megatron replay RUN`: the counts that each allocator would have given, as tables and JSON.

A visit is a dispatch of a prompt in a step. There are V visits, in the order of steps and batches. p is the success
rate of a visit's prompt over the whole record. It is known only afterwards, and averages over a policy that changed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dynamo_megatron.algorithm.allocation import RolloutAllocator
from dynamo_megatron.config import AllocationConfig
from dynamo_megatron.config.files import ConfigError, compose
from dynamo_megatron.evaluation.results import markdown
from dynamo_megatron.replay.recording import RecordedStep, Recording, read_run
from dynamo_megatron.reports.figures import rate_classes

DEFAULT_ALLOCATORS = ("uniform", "waterfill", "neyman", "knapsack", "gvm", "cures")
MEANING = (
    "p is a prompt's success rate over the whole record, known only afterwards; the rollouts that an allocator learned "
    "from are among those that it is evaluated on. Expected variance is sum p(1-p)/n, not the gradient's. Every "
    "allocator saw what was sampled, not what it would have asked for, and had the step's budget and, but for keys of "
    "its own, {} to {} rollouts for a prompt."
)


def write_replay(folder: Path, allocators: Sequence[str] | None, out: Path | None) -> str:
    """Writes replay.md, and as replay.json the step, prompt and success rate of every visit and the counts that it was
    given, into `out` (None: `folder`). Returns the text of replay.md, and where the files are.

    Raises ValueError (one line) for a folder without rollouts, for a broken line in it, and for an allocator that
    cannot be parsed or does not fit the budget.
    """
    recording = read_run(folder)
    steps, base = recording.steps, allocator_of(recording)
    counts = {"as recorded": given(steps)}
    for text in dict.fromkeys(["uniform", *(allocators or DEFAULT_ALLOCATORS)]):
        counts[text] = replay(steps, allocator_of(recording, text))
    rates = success_rates(steps)
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
        (out / "replay.json").write_text(json.dumps(found) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{out}: {error.strerror}; name a folder to write to with --out") from None
    return f"{text}\n\nThis text is in {out}/replay.md, every visit in replay.json."


def _heading(recording: Recording, base: AllocationConfig) -> list[str]:
    """What is recorded, and whether replaying the run's own allocator gives the recorded counts."""
    steps, visits = recording.steps, len(recording.prompt_ids)
    prompts = len(set(recording.prompt_ids))
    lines = [
        f"# Replay of {recording.folder}",
        f"Steps {steps[0].step} to {steps[-1].step} with {sum(s.budget for s in steps)} rollouts: "
        f"{visits} visits to {prompts} prompts. On a first visit nothing is known of a prompt; "
        f"{visits - prompts} visits are later ones.",
    ]
    # gvm and cures are not reproducible: a record has only estimates of energies.
    if base.kind not in ("gvm", "cures"):
        if (difference := first_difference(steps, replay(steps, base))) is None:
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


def allocator_of(recording: Recording, text: str = "") -> AllocationConfig:
    """The run's own allocator with the keys of `text` (`--allocator`): keys of algorithm.allocation, separated by
    commas; a first word without "=" is the kind.

    Raises ConfigError for an unknown key or kind, and for a budget, because every allocator gets the step's budget.
    """
    kind, *words = text.split(",")
    if kind:
        words.insert(0, kind if "=" in kind else f"kind={kind}")
    if any(word.startswith("budget=") for word in words):
        raise ConfigError(f"--allocator {text}: a replay gives every allocator the budget that the step had")
    tree = {
        "model": {"path": "none"},
        "data": {"source": "none", "batch_prompts": len(recording.steps[0].prompt_ids)},
        "output_dir": str(recording.folder),
        # A replay computes no advantages, so groups of one are allowed.
        "algorithm": {"allocation": recording.allocation, "advantage": {"kind": "history"}},
    }
    config, _ = compose([], [f"algorithm.allocation.{word}" for word in words], tree)
    return config.algorithm.allocation


def replay(steps: Sequence[RecordedStep], config: AllocationConfig) -> np.ndarray:
    """Rollouts for every visit, int64 [V], by an allocator that observes the record as in training.

    Before a step the allocator has observed the rollouts of the earlier steps; if the run sampled ahead, of the steps
    that were trained on by then. It observes what was sampled, even where it would have requested other counts. Its
    budget is the step's. Errors: as for `RolloutAllocator`.
    """
    allocator, counts, observed = RolloutAllocator(config), [], 0
    for index, step in enumerate(steps):
        while observed < index and (step.version is None or steps[observed].step <= step.version):
            seen = steps[observed]
            ids = [seen.prompt_ids[i] for i in seen.dispatch]
            allocator.observe(ids, seen.rewards, seen.successes, seen.step, seen.energy)
            observed += 1
        counts.append(allocator.allocate(step.prompt_ids, step.budget, step=step.step))
    return np.concatenate(counts)


def given(steps: Sequence[RecordedStep]) -> np.ndarray:
    """The recorded count of every visit, int64 [V]."""
    return np.concatenate([step.given for step in steps])


def first_difference(steps: Sequence[RecordedStep], counts: np.ndarray) -> tuple[int, str, int, int] | None:
    """(step, prompt_id, recorded count, other count) of the first visit whose recorded count differs from `counts`,
    int64 [V]; None where there is none."""
    visits = ((step.step, prompt_id) for step in steps for prompt_id in step.prompt_ids)
    pairs = zip(visits, given(steps).tolist(), counts.tolist(), strict=True)
    return next(((*visit, ours, other) for visit, ours, other in pairs if ours != other), None)


def success_rates(steps: Sequence[RecordedStep]) -> np.ndarray:
    """p of every visit, float64 [V]. A prompt without rollouts gets the rate of all rollouts."""
    trials: Counter[str] = Counter()
    won: Counter[str] = Counter()
    for step in steps:
        for i, success in zip(step.dispatch, step.successes, strict=True):
            trials[step.prompt_ids[i]] += 1
            won[step.prompt_ids[i]] += int(success)
    overall = won.total() / max(trials.total(), 1)
    return np.array([won[i] / trials[i] if trials[i] else overall for step in steps for i in step.prompt_ids])
