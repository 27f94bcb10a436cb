"""The subject of the checks: a configuration, the number of its ranks, and data that several checks need."""

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
    """Reads model config, tokenizer and prompts once each, at the first access. Raises ValueError for bad input."""

    def __init__(self, config: Config, ranks: int, ranks_here: int):
        self.config, self.ranks, self.ranks_here = config, ranks, ranks_here
        self.data_notes: list[str] = []  # lines about rows that were left out of `prompts`

    @property
    def leads(self) -> bool:
        """False on all ranks of a launcher except the first."""
        return os.environ.get("RANK", "0") == "0"

    @cached_property
    def spec(self) -> ModelSpec:
        return load_model_config(self.config.model.path, self.config.model.family)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.config.model.path, self.config.data.chat_template)

    @cached_property
    def prompts(self) -> list[Prompt]:
        """All prompts; of a source that is read during the run, those of a first step."""
        data = self.config.data
        if data.streamed:
            data = data.model_copy(update={"limit": self.config.batch_prompts})
        return load_prompts(data, needs_answer=self.config.needs_answers, say=self.data_notes.append)

    def encode(self, prompt: Prompt) -> list[int]:
        return encode_prompt(prompt, self.tokenizer, self.config.data)
