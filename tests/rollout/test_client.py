import asyncio
import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM

from dynamo_megatron.config import RolloutConfig
from dynamo_megatron.rollout.client import ServerLost, SGLangClient, open_session

END = 3  # <|im_end|>
PROMPT = [20, 30, 40, 50, 60]


def gap(model, response, temperature: float = 1.0, prompt=PROMPT) -> float:
    """The largest, between the server's logprobs and the model's."""
    tokens = torch.tensor([prompt + response.tokens])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(tokens).logits[0]
    table = torch.log_softmax(logits / temperature, -1)
    logprobs = table[len(prompt) - 1 : -1].gather(-1, tokens[0, len(prompt) :, None])[:, 0]
    return (logprobs - torch.tensor(response.logprobs)).abs().max().item()


def run(endpoint, work, **options):
    async def with_client():
        async with open_session() as session:
            return await work(SGLangClient(session, endpoint, RolloutConfig(**options), [END]))

    return asyncio.run(with_client())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_the_models_at_the_sampling_temperature(sglang_server, tiny_model, temperature):
    async def work(client):
        return await asyncio.gather(*(client.generate(f"t{temperature}-{k}", PROMPT) for k in range(8)))

    responses = run(sglang_server.endpoint, work, temperature=temperature, max_new_tokens=64)
    assert len({tuple(r.tokens) for r in responses}) > 1
    for response in responses:
        assert len(response.tokens) == len(response.logprobs)
        assert response.weight_versions == [(0, 0, len(response.tokens))]
        assert gap(tiny_model, response, temperature) < 1e-4
    other = 1.7 - temperature
    assert gap(tiny_model, responses[0], other) > 1e-2


def test_logprobs_after_a_beginning_that_the_server_has_cached_are_the_models(sglang_server, tiny_model):
    async def work(client):
        first = await client.generate("turn-1", PROMPT)
        prompt = [*PROMPT, *first.tokens[:20], 20, 30, 40, 50]
        return prompt, await client.generate("turn-2", prompt)

    prompt, response = run(sglang_server.endpoint, work, max_new_tokens=64)
    assert gap(tiny_model, response, prompt=prompt) < 1e-4


@pytest.mark.parametrize("most", [8, 1])
def test_a_sequence_may_have_all_of_the_models_length(sglang_server, most):
    """One token: as where a push interrupts a response before its last one."""
    prompt, options = [20] * (2048 - most), {"temperature": 0.0, "max_new_tokens": most}
    response = run(sglang_server.endpoint, lambda client: client.generate(f"full-{most}", prompt, **options))
    assert len(response.tokens) == most and response.finish_reason == "length", response


def test_the_stop_token_belongs_to_the_response_and_a_truncated_one_has_none(sglang_server):
    async def work(client):
        return await asyncio.gather(*(client.generate(f"stop-{k}", PROMPT) for k in range(24)))

    responses = run(sglang_server.endpoint, work, max_new_tokens=100)
    assert {r.finish_reason for r in responses} == {"stop", "length"}
    for response in responses:
        if response.finish_reason == "stop":
            assert response.tokens[-1] == END and END not in response.tokens[:-1]
        else:
            assert len(response.tokens) == 100 and END not in response.tokens


def test_all_tokens_up_to_a_stop_text_count(sglang_server, tiny_model):
    letters = list("ABCDEFGHIJKLMNOPQRSTUVWXYZ")  # none of them in the text of a special token

    async def work(client):
        return await asyncio.gather(*(client.generate(f"text-{k}", PROMPT) for k in range(8)))

    first = 5 + ord("A") - 32
    for response in run(sglang_server.endpoint, work, max_new_tokens=100, stop=letters):
        assert response.finish_reason == "stop"
        last = response.tokens[-1]
        assert last == END or first <= last < first + 26  # the text that stopped it is there
        assert gap(tiny_model, response) < 1e-4


def test_a_server_answers_nobody_without_its_key(sglang_server):
    stranger = dataclasses.replace(sglang_server.endpoint, api_key="another")
    with pytest.raises(ServerLost, match="answers with 401"):
        run(stranger, lambda client: client.generate("stranger", PROMPT))
