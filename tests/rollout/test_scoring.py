"""Where thinking ends: the marker may stand in the prompt, and may be a special token."""

import asyncio

import pytest
from agents_chat import byte_level
from tokenizers import Tokenizer

from dynamo_megatron.config import RewardConfig
from dynamo_megatron.reward import RewardPool
from dynamo_megatron.rollout.client import Response
from dynamo_megatron.rollout.scoring import Scoring
from dynamo_megatron.types import Prompt

GPT_OSS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>")


@pytest.fixture(scope="module")
def scored():
    """scored(tokenizer, prompt, response) -> (text, value of `math` for the answer 12, value of `format`)."""
    config = RewardConfig(
        functions=["math", "format"], workers=1, deadline=120, format={"tags": ["think", "answer"]}, fusion="sum"
    )
    pool = RewardPool(config)
    pool.start()

    def score(tokenizer: Tokenizer, prompt: str, response: str) -> tuple[str, float, float]:
        tokens = tokenizer.encode(prompt, add_special_tokens=False).ids
        given = tokenizer.encode(response, add_special_tokens=False).ids
        asked = Prompt("p", text="", answer="12", tokens=tokens)
        reply = Response(given, [-1.0] * len(given), [(0, 0, len(given))], "stop")
        text, found = asyncio.run(Scoring(config, pool, tokenizer).score(asked, reply))
        return text, found.parts["math"], found.parts["format"]

    yield score
    pool.close()


@pytest.mark.parametrize(
    ("prompt", "response", "right", "formed"),
    [
        ("User: 5+7\nAssistant: <think>\n", r"Perhaps \boxed{12}? Let me see", 0.0, 0.0),
        ("User: 5+7\nAssistant: <think>\n", "5+7 = 12</think>\n<answer>12</answer>", 1.0, 1.0),
        ("User: 5+7\nAssistant: <think>\n\n</think>\n\n", r"It is \boxed{12}", 1.0, 0.0),
        ("User: what is a <think> tag?\nAssistant:", r"It is \boxed{12}", 1.0, 0.0),
    ],
)
def test_thinking_that_the_prompt_has_begun(scored, prompt, response, right, formed):
    assert scored(byte_level("<end>"), prompt, f"{response}<end>") == (response, right, formed)


@pytest.mark.parametrize(
    ("special", "response", "text", "right"),
    [
        (
            GPT_OSS,
            r"<|channel|>analysis<|message|>\boxed{7}?<|end|><|start|>assistant<|channel|>final<|message|>12<|return|>",
            r"<|channel|>analysis<|message|>\boxed{7}?assistant<|channel|>final<|message|>12",
            1.0,
        ),
        (GPT_OSS, r"<|channel|>analysis<|message|>\boxed{12}?", r"<|channel|>analysis<|message|>\boxed{12}?", 0.0),
        (("[THINK]", "[/THINK]", "</s>"), r"[THINK]\boxed{12}</s>", r"[THINK]\boxed{12}", 0.0),
        (("[THINK]", "[/THINK]", "</s>"), r"[THINK]7[/THINK]\boxed{12}</s>", r"[THINK]7[/THINK]\boxed{12}", 1.0),
    ],
)
def test_markers_that_are_special_tokens(scored, special, response, text, right):
    assert scored(byte_level(*special), "User: 5+7\nAssistant:", response)[:2] == (text, right)
