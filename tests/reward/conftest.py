import contextlib
import sys

import pytest
from scoring_endpoint import Endpoint, lengths

from dynamo_megatron.config import RewardConfig
from dynamo_megatron.reward import RewardPool


@pytest.fixture
def serve():
    """serve(answer) -> a running Endpoint."""
    with contextlib.ExitStack() as opened:
        yield lambda answer=lengths: opened.enter_context(Endpoint(answer))


@pytest.fixture
def pool():
    """pool(functions or endpoints of them, **settings of reward) -> a started pool."""
    with contextlib.ExitStack() as opened:

        def start(*functions, **settings):
            names = [each.score if isinstance(each, Endpoint) else each for each in functions]
            started = RewardPool(RewardConfig(functions=names, **settings))
            opened.callback(started.close)
            started.start()
            return started

        yield start


@pytest.fixture(autouse=True, scope="module")
def digits_of_integers():
    """The reward `code` lifts the interpreter's limit, in what is a process of its own outside of tests."""
    limit = sys.get_int_max_str_digits()
    yield
    sys.set_int_max_str_digits(limit)
