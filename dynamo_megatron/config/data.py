"""The section `data`: problems, their templates, their order. Without torch."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from dynamo_megatron.config.method import Positive, Section
from dynamo_megatron.runtime.user_code import SPEC


class DataConfig(Section):
    source: str  # file.jsonl | file.parquet | datasets:NAME?split=S | reasoning_gym:NAME?size=N&key=value | module:fn
    prompt_key: str | None = None  # dotted; text or chat messages; None: problem, question or prompt
    answer_key: str | None = None  # dotted; None: answer, or verl's reward_model.ground_truth
    limit: Positive | None = None  # the first N problems; None: all, of module:fn read as the run goes on
    id_key: str = "id"  # rows without it get an id from their content
    template: str = "chat"  # "chat": the tokenizer's chat template; else a plain text with {prompt} in it
    chat_template: str | None = None  # None: the tokenizer's; "plain": lines of User: and Assistant:; or a Jinja file
    system_prompt: str | None = None  # chat only
    few_shot: str = ""  # text before the plain template
    shuffle_seed: int | None = None  # of the prompts' order; None: `seed`
    batch_prompts: Positive = 32
    max_prompt_length: Positive | None = None  # tokens; None: what max_new_tokens leaves of model.max_length
    on_long_prompt: Literal["skip", "error"] = "skip"  # skipped prompts are counted

    @model_validator(mode="after")
    def _template(self) -> DataConfig:
        if self.template != "chat" and "{prompt}" not in self.template:
            raise ValueError("template: give 'chat' or a text that contains {prompt}")
        if self.template == "chat" and self.few_shot:
            raise ValueError("few_shot: goes with a plain template; put chat examples into the messages")
        for key in ("system_prompt", "chat_template"):
            if self.template != "chat" and getattr(self, key):
                raise ValueError(f"{key}: goes with template 'chat'")
        return self

    @property
    def streamed(self) -> bool:
        """Whether the problems are read while the run goes on, and not all at its start."""
        libraries = ("datasets:", "reasoning_gym:")
        return self.limit is None and not self.source.startswith(libraries) and bool(SPEC.fullmatch(self.source))
