import dataclasses

import torch
from head_cases import errors, in_float64, make_inputs, tiny_cases
from head_contenders import ours, three_gemms

CPU = torch.device("cpu")


def test_errors_show_a_wrong_gradient():
    inputs = make_inputs(dataclasses.replace(tiny_cases()[0], entropy_coef=0.01), CPU)
    exact = in_float64(inputs, "policy")
    right = errors(ours(inputs, "torch", "eager"), exact, inputs.labels)
    assert set(right) == {"logprobs", "entropy", "loss", "hidden_grad", "weight_grad"} and max(right.values()) < 3e-6
    without_bonus = errors(exact, in_float64(inputs, "clipped"), inputs.labels)
    assert without_bonus["hidden_grad"] > 1e-3 and without_bonus["logprobs"] == 0
    assert errors(three_gemms(inputs), exact, inputs.labels)["hidden_grad"] > 0.1
