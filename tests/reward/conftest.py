import asyncio
import sys

import pytest
from reward_service import Service, lengths

from dynamo_megatron.config import RewardConfig
from dynamo_megatron.reward import RewardPool


@pytest.fixture
def serve():
    services = []

    def start(answer=lengths):
        services.append(Service(answer))
        return services[-1]

    yield start
    for service in services:
        service.die()


@pytest.fixture
def pool():
    """A started pool of these services and functions."""
    pools = []

    def start(*functions, **settings):
        names = [function.url if isinstance(function, Service) else function for function in functions]
        pools.append(RewardPool(RewardConfig(functions=names, **settings)))
        pools[-1].start()
        return pools[-1]

    yield start
    for started in pools:
        started.close()


@pytest.fixture
def patient(monkeypatch):
    """Samples of a busy machine share a request all the same."""
    monkeypatch.setattr("dynamo_megatron.reward.http.GATHERING", 0.3)


@pytest.fixture
def score():
    """The scores of responses to one prompt, in their order."""

    def all_of(started, prompt, *responses):
        async def gathered():
            return await asyncio.gather(*(started.score(prompt, response) for response in responses))

        return asyncio.run(gathered())

    return all_of


@pytest.fixture(autouse=True, scope="module")
def digits_of_integers():
    """The reward `code` lifts the interpreter's limit, in what is a process of its own outside of tests."""
    limit = sys.get_int_max_str_digits()
    yield
    sys.set_int_max_str_digits(limit)
