"""The `data` section: problems, prompts, which of them a step draws. Without torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from dynamo_megatron.config.method import Positive, Section


class SelectionConfig(Section):
    """Which of the data's next prompts a step draws, by their earlier rollouts; a string names the kind."""

    of_kinds = {"candidates": ("priority",), "exploration": ("priority",)}
    # uniform: all of them in turn. priority (SPO, arXiv 2509.13232): in proportion to sqrt(p(1-p)) + exploration
    kind: Literal["uniform", "priority"] = "uniform"
    candidates: Positive | None = 8  # priority: prompts that one is chosen from; None: all of the data
    exploration: Annotated[float, Field(gt=0)] = 0.05  # priority: what a prompt of p = 0 or 1 has


def _by_kind(value: object) -> object:
    return {"kind": value} if isinstance(value, str) else value


class DataConfig(Section):
    source: str  # file.jsonl | file.parquet | datasets:NAME?split=S | reasoning_gym:NAME?size=N&key=value | module:fn
    prompt_key: str | None = None  # dotted; text or chat messages; None: problem, question or prompt
    answer_key: str | None = None  # dotted; None: answer, or verl's reward_model.ground_truth
    limit: Positive | None = None  # the first N problems; None: all
    id_key: str = "id"  # rows without it get an id from their content
    template: str = "chat"  # "chat": the tokenizer's chat template; else a plain text with {prompt} in it
    chat_template: str | None = None  # None: the tokenizer's; "plain": lines of User: and Assistant:; or a Jinja file
    template_args: dict[str, Any] = {}  # chat only: variables of the chat template, such as {enable_thinking: false}
    system_prompt: str | None = None  # chat only
    few_shot: str = ""  # text before the plain template
    shuffle_seed: int | None = None  # of the prompts' order; None: `seed`
    batch_prompts: Positive = 32
    selection: Annotated[SelectionConfig, BeforeValidator(_by_kind)] = SelectionConfig()
    # tokens; longer prompts are skipped and counted, but not evaluated problems; None: what max_new_tokens leaves of
    # model.max_length
    max_prompt_length: Positive | None = None

    def faults(self, *, training: bool) -> Iterator[str]:
        if taken := {"messages", "tools", "add_generation_prompt"} & self.template_args.keys():
            yield f"template_args: {min(taken)} is not for the configuration to set"
        if self.template == "chat":
            yield from self.unused(["few_shot"], "goes with a plain template; put chat examples into the messages")
            return
        if "{prompt}" not in self.template:
            yield "template: give 'chat' or a string that contains {prompt}"
        yield from self.unused(["system_prompt", "chat_template", "template_args"], "goes with template 'chat'")
