"""`dynamo-megatron dpo`: training on pairs of completions, one of which is preferred (arXiv 2305.18290).

A row has a prompt (`data.prompt_key`), the preferred completion (`data.answer_key`, here `chosen` by default) and the
other one (`dpo.rejected_key`), each a string or a list with a single assistant message. An update takes
`data.batch_prompts` pairs, and its loss is the mean over them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dynamo_megatron.algorithm.preferences import preference_loss
from dynamo_megatron.data.sources import look_up
from dynamo_megatron.data.templates import chat_messages, encode_prompt
from dynamo_megatron.errors import InputError
from dynamo_megatron.jobs.sft import Example, SFTJob, tools_of
from dynamo_megatron.types import Prompt, Sequences

Pairs = tuple[Sequences, np.ndarray]  # and int64 [P, 2]: the indices of each pair's chosen and rejected sequence


class DPOJob(SFTJob):
    name = "dpo"

    def _next(self, on_poll: Callable[[], None]) -> Pairs:
        sequences = super()._next(on_poll)
        return sequences, np.arange(len(sequences.prompt_ids)).reshape(-1, 2)  # as `_examples` gives them

    def _examples(self, prompt: Prompt) -> list[Example]:
        found, other = look_up(prompt.meta, key := self.config.dpo.rejected_key)
        if not found:
            raise InputError(f"prompt {prompt.label}: no {key!r} (set dpo.rejected_key)")
        data = self.config.data
        tools = tools_of(prompt) if data.template == "chat" else None
        before, examples = encode_prompt(prompt, self._tokenizer, data, tools), []
        for name, value in (("data.answer_key", prompt.answer), ("dpo.rejected_key", other)):
            message = {"role": "assistant", "content": value}
            if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
                message = {"content": ""} | {key: item for key, item in value[0].items() if item is not None}
            if not isinstance(message["content"], str):
                what = f"prompt {prompt.label}: the completion of {name} is {value!r:.40}"
                raise InputError(f"{what}; give a string or a list with a single assistant message")
            text = self._answers.text_of(prompt, chat_messages(prompt, data.system_prompt), message)
            after = self._answers.sampled(text)
            if message.get("finish_reason") == "length" and len(after) > 1:  # its end was not sampled
                after.pop()
            examples.append(Example([*before, *after], [False] * len(before) + [True] * len(after)))
        return examples

    def _update(self, pairs: Pairs, lr: float) -> tuple[dict[str, float], dict[str, Any]]:
        """The weights of the tokens in the cross-entropy are the loss's derivatives by their logprobs, which are known
        from a pass before it: so a pair may be in two micro-batches or on two ranks."""
        policy, beta, (sequences, rows) = self._run.policy, self.config.dpo.beta, pairs
        self._run.phases.begin("logprobs")
        packed = policy.pack(sequences, [np.arange(len(sequences.prompt_ids))])
        own = policy.token_stats(sequences, packed, temperature=1.0).logprobs.double()
        gaps = (own - policy.reference_logprobs(sequences, packed)).numpy()
        lengths = sequences.response_lengths
        ratios = np.bincount(np.repeat(np.arange(len(lengths)), lengths), gaps, len(lengths))
        chosen, rejected = ratios[rows].T
        losses, *slopes = preference_loss(chosen, rejected, tuple(lengths[rows].T), self.config.dpo)
        weights = np.zeros(len(lengths))
        weights[rows.T] = -np.stack(slopes) / len(losses)
        self._run.phases.begin("update")
        return policy.fit(sequences, weights, lr), {
            "dpo/loss": float(losses.mean()),
            "dpo/accuracy": float((chosen > rejected).mean()),
            "dpo/margin": beta * float((chosen - rejected).mean()),
            "dpo/chosen": beta * float(chosen.mean()),
            "dpo/rejected": beta * float(rejected.mean()),
        }
