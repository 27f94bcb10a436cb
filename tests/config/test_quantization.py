"""What does not go with servers that have FP8 weights is refused in one line each."""

import pytest
from pydantic import ValidationError

from dynamo_megatron.config import Config

CORRECTED = {"rollout_correction": {"level": "token"}}
ENGINE = {"modulation": None, "loss": {"old": "engine"}}


def config(algorithm: dict, rollout: dict | None = None, dtype: str = "bfloat16") -> Config:
    rollout = {"quantization": "fp8"} if rollout is None else rollout
    model = {"path": "m", "dtype": dtype}
    return Config(model=model, data={"source": "d"}, output_dir="o", rollout=rollout, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", [CORRECTED, {"rollout_correction": {"level": "sequence"}}, ENGINE])
def test_what_goes_with_it(algorithm):
    assert config(algorithm).rollout.quantization == "fp8"
    assert config(algorithm, {}, "float32").rollout.quantization is None


@pytest.mark.parametrize(
    ("algorithm", "rollout", "dtype", "says"),
    [
        ({}, None, "bfloat16", "fp8 samples from rounded weights.*set algorithm.rollout_correction to {level: token}"),
        (CORRECTED, None, "float32", "model.dtype is float32; set model.dtype to bfloat16"),
        (CORRECTED, {"quantization": "int4"}, "bfloat16", "Input should be 'fp8'"),
    ],
)
def test_what_does_not(algorithm, rollout, dtype, says):
    with pytest.raises(ValidationError, match=says):
        config(algorithm, rollout, dtype)
