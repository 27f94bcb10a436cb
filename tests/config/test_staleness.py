"""What does not go with rollouts of older weights is refused in one line each."""

import pytest
from pydantic import ValidationError

from dynamo_megatron.config import Config

PLAIN = {"modulation": None, "loss": {"old": "engine"}}
CORRECTED = {"rollout_correction": {"level": "sequence"}}


def config(rollout: dict, algorithm: dict) -> Config:
    return Config(model={"path": "m"}, data={"source": "d"}, output_dir="o", rollout=rollout, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", [PLAIN, CORRECTED])
@pytest.mark.parametrize("rollout", [{}, {"at_push": "drain"}, {"at_push": "drain", "stop": ["."]}])
def test_what_goes_with_it(rollout, algorithm):
    assert config({"max_staleness": 2, **rollout}, algorithm).rollout.max_staleness == 2


@pytest.mark.parametrize(
    ("rollout", "algorithm", "says"),
    [
        ({"max_staleness": 1}, {}, "trains on tokens of older weights, which the loss has to correct for"),
        ({"max_staleness": 1, "stop": ["."]}, CORRECTED, "set rollout.at_push to drain"),
        ({"max_staleness": 1}, {**CORRECTED, "dynamic_sampling": {}}, "algorithm.dynamic_sampling needs the outcomes"),
        ({"at_push": "drain"}, {}, "with rollout.max_staleness 0 nothing is under way at a push"),
        ({}, {**PLAIN, **CORRECTED}, "set one of them to its default"),
        ({"max_staleness": -1}, CORRECTED, "greater than or equal to 0"),
    ],
)
def test_what_does_not(rollout, algorithm, says):
    with pytest.raises(ValidationError, match=says):
        config(rollout, algorithm)
