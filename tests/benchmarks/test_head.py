import dataclasses
import math

import head
import torch
from head_cases import errors, in_float64, make_inputs, tiny_cases
from head_contenders import ours, three_gemms

CPU = torch.device("cpu")


def test_errors_show_a_wrong_gradient():
    inputs = make_inputs(dataclasses.replace(tiny_cases()[0], entropy_coef=0.01), CPU)
    exact = in_float64(inputs, "policy")
    right = errors(ours("torch", "eager")(inputs), exact, inputs.labels)
    assert set(right) == {"logprobs", "entropy", "loss", "hidden_grad", "weight_grad"} and max(right.values()) < 3e-6
    without_bonus = errors(exact, in_float64(inputs, "clipped"), inputs.labels)
    assert without_bonus["hidden_grad"] > 1e-3 and without_bonus["logprobs"] == 0
    assert errors(three_gemms(inputs), exact, inputs.labels)["hidden_grad"] > 0.1


def test_what_our_own_heads_may_not_do():
    def case(ours, **figures):
        return {"case": "c", "contenders": {"x": {"ours": ours, **figures}}}

    good = case(True, errors={"logprobs": 1e-6, "hidden_grad": 2e-3})
    bad = [case(True, errors={"logprobs": math.nan}), case(True, errors={"loss": 0.1}), case(True, skipped="oom")]
    kernels = {"in place": {"different": {"gradient": 1, "gradient with entropy": 0}}}
    assert head.wrong({"cases": [good, case(False, errors={"loss": 0.1}), case(False, skipped="failed")]}) == []
    assert len(head.wrong({"cases": bad, "kernels": kernels})) == 4
