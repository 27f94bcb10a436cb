"""What a CPU server sends of a response that is asked for in one part."""

import runpy
from types import SimpleNamespace

import pytest

from dynamo_megatron.rollout.servers.server import CPU_STAND_INS


@pytest.mark.parametrize(
    ("interval", "sent", "finished", "passed_on"),
    [
        (None, 0, False, True),
        (1 << 30, 0, False, False),
        (1 << 30, 0, True, True),
        (4, 2, False, False),
        (4, 1, False, True),
    ],
)
def test_the_first_token_waits_for_the_others(interval, sent, finished, passed_on):
    send = runpy.run_path(str(CPU_STAND_INS / "whole_responses.py"))["send_when_whole"]
    parameters, accepted = SimpleNamespace(stream_interval=interval), []
    request = SimpleNamespace(
        output_ids=[7] * 5, send_token_offset=sent, sampling_params=parameters, finished=lambda: finished
    )
    send(lambda accumulator, req: accepted.append((accumulator, req)), "accumulator", req=request)
    assert accepted == [("accumulator", request)] * passed_on
