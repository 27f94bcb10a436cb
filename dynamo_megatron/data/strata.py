"""The value of the column `algorithm.allocation.prior_by` for every prompt."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_megatron.data.sources import look_up
from dynamo_megatron.errors import InputError
from dynamo_megatron.types import Prompt


def prompt_strata(prompts: Sequence[Prompt], prior_by: str | None) -> dict[str, str | int | float] | None:
    """prompt_id -> the value of the prompt's column `prior_by`; None where `prior_by` is None.

    `prior_by="source"` is `Prompt.source` where the prompt has no column of that name. Raises ValueError naming a
    prompt that has no such column, or whose value there is not a string or a number.
    """
    if prior_by is None:
        return None
    strata = {}
    for prompt in prompts:
        found, value = look_up(prompt.meta, prior_by)
        if not found and prior_by == "source":
            found, value = True, prompt.source
        where = f"algorithm.allocation.prior_by: prompt {prompt.prompt_id!r}"
        if not found:
            raise InputError(f"{where} has no column {prior_by!r}; it has {', '.join(prompt.meta) or 'none'}")
        if not isinstance(value, str | int | float) or value != value:  # NaN is what Parquet has for an empty cell
            raise InputError(f"{where} has {value!r:.80} in {prior_by!r}; expected a string or a number")
        strata[prompt.prompt_id] = value
    return strata
