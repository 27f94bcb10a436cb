"""How many tokens a prompt may have."""

from __future__ import annotations

from dynamo_megatron.config import Config
from dynamo_megatron.errors import InputError
from dynamo_megatron.models.spec import ModelSpec


def max_prompt_length(config: Config, spec: ModelSpec, *, evaluation: bool = False) -> int:
    """The largest number of prompt tokens: `data.max_prompt_length`, else the model's length less the response limit.

    Raises ValueError where prompt and response together exceed the model's length, or `model.max_length` does.
    """
    limit = config.model.max_length or spec.max_positions
    if limit > spec.max_positions:
        raise InputError(
            f"model.max_length: {limit} tokens is above the model's {spec.max_positions} (max_position_embeddings in "
            "config.json, to be raised there for a RoPE scaling that extends it)"
        )
    key, response = "rollout.max_new_tokens", config.rollout.max_new_tokens
    if evaluation and config.eval.max_new_tokens is not None:
        key, response = "eval.max_new_tokens", config.eval.max_new_tokens
    room = limit - response
    asked = config.data.max_prompt_length or room
    if room < 1 or asked > room:
        raise InputError(
            f"{key}: {response} tokens leave {max(0, room)} of {limit} for the "
            f"prompt{f', data.max_prompt_length asks for {asked}' if config.data.max_prompt_length else ''}"
        )
    return asked
