"""What the checks are about: a configuration, the number of its ranks, and what several checks read from it."""

from __future__ import annotations

import os
from functools import cached_property
from typing import TYPE_CHECKING

from dynamo_megatron.config import Config
from dynamo_megatron.data.sources import load_prompts
from dynamo_megatron.data.templates import encode_prompt, load_tokenizer
from dynamo_megatron.models import ModelSpec, load_model_config
from dynamo_megatron.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Subject:
    """Reads each thing once, when a check first asks for it. Raises what reading it does: ValueError for bad input."""

    def __init__(self, config: Config, ranks: int, ranks_here: int):
        self.config, self.ranks, self.ranks_here = config, ranks, ranks_here

    @property
    def leads(self) -> bool:
        """False on the ranks of a launcher but the first."""
        return os.environ.get("RANK", "0") == "0"

    @cached_property
    def spec(self) -> ModelSpec:
        return load_model_config(self.config.model.path, self.config.model.family)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.config.model.path, self.config.data.chat_template)

    @cached_property
    def prompts(self) -> list[Prompt]:
        """Of a source that is read while the run goes on, those of a first step."""
        data = self.config.data
        return load_prompts(data.model_copy(update={"limit": self.config.batch_prompts}) if data.streamed else data)

    def encode(self, prompt: Prompt) -> list[int]:
        return encode_prompt(prompt, self.tokenizer, self.config.data)
