"""`dynamo-megatron replay RUN`: the counts that each allocator would have given, as tables, JSON and a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dynamo_megatron.config.files import ConfigError
from dynamo_megatron.evaluation.results import markdown_row
from dynamo_megatron.replay.dumps import read_slime, read_verl, slime_files, verl_files
from dynamo_megatron.replay.objectives import OBJECTIVES
from dynamo_megatron.replay.outcomes import Outcomes, outcomes
from dynamo_megatron.replay.recording import Recording, read_run
from dynamo_megatron.replay.rounds import DRAWS
from dynamo_megatron.reports.figures import rate_classes


def write_replay(
    folder: Path, allocators: Sequence[str] | None, threshold: float | None, reward_key: str | None, out: Path | None
) -> str:
    """Writes replay.md, replay.json and replay.png into `out` (None: `folder`). Returns the text of replay.md, and
    where the files are.

    `threshold` and `reward_key` are for the dumps of other trainers. Raises ValueError (one line) for a folder without
    rollouts, for a broken line in it, and for an allocator that cannot be parsed.
    """
    result = outcomes(_read(folder, threshold, reward_key), allocators)
    out = out or folder
    try:
        out.mkdir(parents=True, exist_ok=True)
        text = _text(result)
        picture = out / "replay.png"
        (out / "replay.md").write_text(f"{text}\n\n![the replay in three panels]({picture.name})\n", encoding="utf-8")
        (out / "replay.json").write_text(json.dumps(_plain(result), ensure_ascii=False) + "\n", encoding="utf-8")
        from dynamo_megatron.replay.picture import draw_replay  # matplotlib takes a second to import

        draw_replay(result, picture)
    except OSError as error:
        raise ConfigError(f"{out}: {error.strerror}; name a folder to write to with --out") from None
    return f"{text}\n\nThis text is in {out}/replay.md, every prompt in {out}/replay.json, the picture in {picture}."


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


def _text(result: Outcomes) -> str:
    return "\n\n".join([_heading(result), _measures(result), _objectives(result), _classes(result), _rounds(result)])


def _heading(result: Outcomes) -> str:
    recording, steps = result.recording, result.recording.step_numbers
    visits, prompts = len(result.rates), len(set(recording.prompt_ids))
    lines = [
        f"{len(steps)} {'steps' if len(steps) > 1 else 'step'} of {recording.trainer} with "
        f"{sum(step.budget for step in recording.steps)} rollouts: {visits} visits to {prompts} prompts. "
        f"On a first visit nothing is known of a prompt; {visits - prompts} visits are later ones."
    ]
    if result.difference is not None:
        step, prompt_id, given, replayed = result.difference
        lines.append(
            f"NOT REPRODUCED: replaying the run's own allocator first differs at step {step}, prompt {prompt_id!r}: "
            f"{given} in allocation.jsonl, {replayed} replayed; other code or other files than those of the run."
        )
    elif result.checked:
        lines.append(f"Replaying the run's own allocator gives all {visits} counts of allocation.jsonl exactly.")
    lines.extend(recording.notes)
    return f"# Replay of {recording.folder}\n\n" + "\n\n".join(lines)


def _measures(result: Outcomes) -> str:
    head = [
        "allocator",
        "rollouts",
        "expected variance, uniform = 1",
        "oracle = 1",
        "groups all right or all wrong, expected, %",
        "rank correlation with difficulty",
    ]
    lines = [markdown_row(head), markdown_row(["---"] + ["---:"] * (len(head) - 1))]
    for name, m in result.measures.items():
        cells = [_number(m["to_uniform"]), _number(m["to_oracle"]), f"{100 * m['degenerate_expected']:.1f}"]
        lines.append(markdown_row([name, str(m["rollouts"]), *cells, _number(m["rank_correlation"], "+.2f")]))
    return (
        "## Allocators on the same rollouts\n\n"
        + "\n".join(lines)
        + f"\n\nOf the groups that were sampled, {100 * result.degenerate_share:.1f} % have equal rewards throughout; "
        "more than expected means that success rates moved while the policy learned.\n\n"
        "p is a prompt's success rate over the whole record, known only afterwards; the rollouts that an allocator "
        "learned from are among those that it is judged by. Expected variance is sum p(1-p)/n, not the gradient's. "
        f"The oracle knows p; it has the step's budget and {result.base.rollout_n_min} to {result.base.rollout_n_max} "
        "rollouts for a prompt. Every allocator saw what was sampled: what more rollouts would have shown it, nobody "
        "knows. Difficulty is 1 - p."
    )


def _objectives(result: Outcomes) -> str:
    lines = [markdown_row(["allocator", *OBJECTIVES]), markdown_row(["---"] + ["---:"] * len(OBJECTIVES))]
    for name, m in result.measures.items():
        lines.append(markdown_row([name, *(_number(m["objectives_to_uniform"][key]) for key in OBJECTIVES)]))
    meaning = "\n".join(f"- {name}: {text}" for name, text in OBJECTIVES.items())
    source = "from the server's logprobs, within a factor of 2 for a token" if result.energies else "not in the record"
    return (
        "## What each of them optimises, uniform = 1\n\n"
        + "\n".join(lines)
        + f"\n\nOf the whole record's p, energies and lengths. Energies are {source}.\n\n{meaning}"
    )


def _classes(result: Outcomes) -> str:
    lines = [
        markdown_row(["success rate p", "visits", *result.counts]),
        markdown_row(["---"] + ["---:"] * (len(result.counts) + 1)),
    ]
    for name, members in rate_classes(result.rates).items():
        means = [f"{counts[members].mean():.2f}" if members.any() else "-" for counts in result.counts.values()]
        lines.append(markdown_row([name, str(members.sum()), *means]))
    return "## Mean rollouts of a visit\n\n" + "\n".join(lines)


def _rounds(result: Outcomes) -> str:
    head = ["rule", "rollouts", "trained on, %", "groups whose rewards differ, for 100 rollouts"]
    lines = [markdown_row(head), markdown_row(["---"] + ["---:"] * (len(head) - 1))]
    for name, r in result.rounds.items():
        trained, groups = 100 * r["trained"] / r["rollouts"], 100 * r["groups"] / r["rollouts"]
        lines.append(markdown_row([name, f"{r['rollouts']:.0f}", f"{trained:.0f}", f"{groups:.2f}"]))
    return (
        "## Rules that look at a step's outcomes\n\n"
        + "\n".join(lines)
        + f"\n\nTheir outcomes are drawn with p, {DRAWS} times: the record has a fixed number of rollouts of a visit, "
        "and these rules ask for more where they like. pilot has the step's budget, half of it in the first round; "
        "reinforce_ada rounds of 8, at most 4, whatever the budget. Groups are of what is trained on, expected ones "
        "for the allocators. Their number says nothing about the gradient's variance, nor about the bias that these "
        "rules have and allocators do not; and no record says what a prompt that is put off would give later."
    )


def _number(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else f"{value:{form}}"


def _plain(result: Outcomes) -> dict[str, Any]:
    """The content of replay.json. Lists of counts have an entry per visit of a prompt, lists of variances per step."""
    recording = result.recording
    visits: dict[str, list[int]] = {}
    for visit, prompt_id in enumerate(recording.prompt_ids):
        visits.setdefault(prompt_id, []).append(visit)
    step_numbers = recording.step_numbers
    prompts = []
    for prompt_id, its in visits.items():
        prompts.append(
            {
                "prompt_id": prompt_id,
                **({"prompt": recording.texts[prompt_id]} if prompt_id in recording.texts else {}),
                "success_rate": float(result.rates[its[0]]),
                "steps": step_numbers[recording.step_index[its]].tolist(),
                "rollouts": {name: counts[its].tolist() for name, counts in result.counts.items()},
            }
        )
    return {
        "folder": str(recording.folder),
        "trainer": recording.trainer,
        "reproduced": result.difference is None if result.checked else None,
        "first_difference": None if result.difference is None else result.difference._asdict(),
        "notes": recording.notes,
        "degenerate_observed": result.degenerate_share,
        "allocators": {
            name: {
                **({"config": result.configs[name].model_dump(mode="json")} if name in result.configs else {}),
                **result.measures[name],
                "expected_variance_by_step": result.variance(counts).tolist(),
            }
            for name, counts in result.counts.items()
        },
        "rounds": result.rounds,
        "steps": step_numbers.tolist(),
        "prompts": prompts,
    }
