import dataclasses

import head
import torch
from head_cases import errors, in_float64, make_inputs, tiny_cases
from head_contenders import Contender, ours, three_gemms

CPU = torch.device("cpu")


def test_errors_show_a_wrong_gradient():
    inputs = make_inputs(dataclasses.replace(tiny_cases()[0], entropy_coef=0.01), CPU)
    exact = in_float64(inputs, "policy")
    right = errors(ours("torch", "eager")(inputs), exact, inputs.labels)
    assert set(right) == {"logprobs", "entropy", "loss", "hidden_grad", "weight_grad"} and max(right.values()) < 3e-6
    without_bonus = errors(exact, in_float64(inputs, "clipped"), inputs.labels)
    assert without_bonus["hidden_grad"] > 1e-3 and without_bonus["logprobs"] == 0
    assert errors(three_gemms(inputs), exact, inputs.labels)["hidden_grad"] > 0.1


def test_figures_are_kept_as_they_come_and_the_longest_context_is_found_by_halving():
    def short(inputs):
        if inputs.case.tokens > 40:
            raise torch.OutOfMemoryError
        return ours("torch", "eager")(inputs)

    floor, own = Contender("3 GEMMs", three_gemms, 3, None), Contender("own", ours("torch", "eager"), 3, ours=True)
    peer = Contender("peer", short, 3, package="torch")
    rows = head.run_case(tiny_cases()[0], [floor, peer, own], CPU, head.TINY)
    assert list(next(rows)["contenders"]) == ["3 GEMMs", "own"]
    assert next(rows)["contenders"]["peer"]["of floor"] > 0
    *_, found = head.longest([peer, own], CPU, True)
    assert [(name, fit["tokens"]) for name, fit in found[0]["contenders"].items()] == [("own", 64), ("peer", 32)]
