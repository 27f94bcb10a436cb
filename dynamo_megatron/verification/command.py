"""`dynamo-megatron verify RUN`: the table of a step's checks."""

from __future__ import annotations

from pathlib import Path

from dynamo_megatron.evaluation.results import markdown
from dynamo_megatron.runtime.plain_text import show
from dynamo_megatron.verification.checks import checks
from dynamo_megatron.verification.record import read_step


def verify_step(run: Path, step: int | None) -> tuple[str, int]:
    """(the table of the checks of `step`, None: of the last one; the exit code, 1 where something differs). Raises
    InputError, one line, where there is no such step."""
    record = read_step(run, step)
    made = list(checks(record, show))
    rows = [["check", "expected", "found", ""]]
    rows += [[c.what, c.expected, c.found, c.differs or "holds"] for c in made if c.holds is not None]
    wrong, left = [c for c in made if c.holds is False], [c for c in made if c.holds is None]
    lines = [f"# Step {record.step} of {run}", markdown(rows)]
    lines += [f"not checked: {c.what}: {c.differs}" for c in left]
    lines.append(
        f"{len(wrong)} of {len(made) - len(left)} checks differ"
        if wrong
        else f"all {len(made) - len(left)} checks hold"
    )
    return "\n\n".join(lines), int(bool(wrong))
