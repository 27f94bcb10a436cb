"""Small tokenizers, one with chat templates, and a model whose probabilities depend on every token before."""

import zlib
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dynamo_megatron.rollout.client import Response

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
TEXTS = [
    "the tool says that the sum is seven, and the answer to the question is therefore not nine",
    '{"name": "add", "arguments": {"a": 1, "b": 2}} user assistant system think tool response',
    "größer über Straße 日本語の文 😀 😃 naïve café",
]
CHATML = """{%- for tool in tools or [] -%}
{%- if loop.first -%}{{ '<|im_start|>system\nTools:\n' }}{%- endif -%}
{{ tool | tojson + '\n' }}
{%- if loop.last -%}{{ '<|im_end|>\n' }}{%- endif -%}
{%- endfor -%}
{%- set ns = namespace(asked=0) -%}
{%- for message in messages -%}{%- if message.role == 'user' -%}{%- set ns.asked = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- set text = message.content -%}
{%- if THINKS and message.role == 'assistant' and '</think>' in text and loop.index0 < ns.asked -%}
{%- set text = text.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{{ '<|im_start|>' + message.role + '\n' + text }}
{%- for call in message.tool_calls or [] -%}
{{ '\n<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""


def byte_level(*special: str, merges: Sequence[tuple[str, str]] = ()) -> Tokenizer:
    """A token a byte, one for each of `merges`, and the `special` ones at last."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, *map("".join, merges)])}
    made = Tokenizer(models.BPE(vocabulary, list(merges)))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(special))
    return made


def make_tokenizer(thinks: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges, so that a text has several divisions into tokens. `thinks`: its template drops
    the thinking of turns before the last question, as Qwen3's does."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=360, special_tokens=SPECIAL, initial_alphabet=alphabet)
    raw.train_from_iterator(TEXTS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|endoftext|>", "<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHATML.replace("THINKS", "true" if thinks else "false")
    return tokenizer


class ToyModel:
    """Next-token distributions in float32, a function of all tokens before: those of another context differ."""

    def __init__(self, size: int):
        self._size = size

    def logprobs(self, context: list[int]) -> np.ndarray:
        """float32 [vocabulary]"""
        seed = zlib.crc32(np.asarray(context, np.int64).tobytes())
        logits = np.random.default_rng(seed).normal(0, 2, self._size).astype(np.float32)
        return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()

    def logprob(self, context: list[int], token: int) -> float:
        return float(self.logprobs(context)[token])

    def says(self, context: list[int], tokens: list[int], finish: str, version: int) -> Response:
        """`tokens` as an answer to `context`, with the logprobs of this model."""
        before, logprobs = list(context), []
        for token in tokens:
            logprobs.append(self.logprob(before, token))
            before.append(token)
        return Response(list(tokens), logprobs, [(version, 0, len(tokens))], finish)
