"""How long a segment may be: what SGLang takes, to the token, and never more."""

import asyncio

from dynamo_megatron.config import RolloutConfig
from dynamo_megatron.rollout.client import SGLangClient, open_session


def test_a_server_takes_what_it_says_and_no_token_more(sglang_server):
    async def work():
        async with open_session() as session:
            client = SGLangClient(session, sglang_server.endpoint, RolloutConfig(), [])
            most = await client.longest()

            async def ask(name, before, new):
                return await client.generate(name, [5] * before, max_new_tokens=new)

            last = [ask(f"context-{left}", most - left, left) for left in (1, 2, 5)]
            return most, await asyncio.gather(*last), await ask("context-0", most, 1)

    most, answers, refused = asyncio.run(work())
    print(most, [(len(a.tokens), a.finish_reason) for a in answers], refused.error)
    assert not any(answer.error for answer in answers) and all(answer.tokens for answer in answers)
    assert "exceeds the maximum allowed length" in refused.error
