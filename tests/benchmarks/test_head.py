import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import head
import pytest
import torch
from head_cases import errors, in_float64, make_inputs, tiny_cases
from head_contenders import ours, three_gemms

HEAD = Path(__file__).parents[2] / "benchmarks" / "head.py"
CPU = torch.device("cpu")
OURS = ("eager", "recompute", "statistics")


def run(folder: Path, *arguments: str, **environment: str) -> dict:
    """head.json of `benchmarks/head.py --tiny ARGUMENTS`."""
    with open(folder / "log", "w") as log:
        code = subprocess.run(
            [sys.executable, "-P", str(HEAD), "--tiny", *arguments, "--out", str(folder)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            timeout=500,
        ).returncode
    assert code == 0, (folder / "log").read_text()[-3000:]
    return json.loads((folder / "head.json").read_text())


def check(result: dict, folder: Path, backends: list[str]) -> None:
    field = result["cases"][0]["contenders"]
    for contender in ("3 GEMMs", "naive", "compiled", *(f"{o}, {b}" for o in OURS for b in backends)):
        assert "seconds" in field[contender], contender
    for case in result["cases"]:
        for name, figures in case["contenders"].items():
            if "skipped" in figures:
                assert figures["skipped"] in ("not installed", "has no temperature"), name
                continue
            assert figures["seconds"]["p10"] <= figures["seconds"]["median"] <= figures["seconds"]["p90"]
            # The naive entropy, log sum minus mean logit, cancels where the logits are large.
            limit = 3e-6 if name.startswith(OURS) else 3e-5
            assert all(error < limit for error in figures.get("errors", {}).values()), (case["case"], name, figures)
        # One process, one set of inputs: what never has whole logits in several forms takes less memory.
        contenders = case["contenders"]
        assert contenders["eager, torch"]["peak bytes"] < contenders["naive"]["peak bytes"] < 10 * 16 * 300 * 4 + 1e5
    table = (folder / "head.md").read_text()
    assert "Tiny shapes" in table and all(f"## {case['case']}" in table for case in result["cases"])


@pytest.mark.full
def test_every_case_with_the_interpreted_kernels(tmp_path, interpreter):
    result = run(tmp_path, TRITON_INTERPRET="1")
    assert [case["case"] for case in result["cases"]] == [case.name for case in tiny_cases()]
    check(result, tmp_path, ["torch", "triton"])
    assert set(result["kernels"]["in place"]["different"].values()) == {0}
    assert {row["kernel"] for row in result["kernels"]["speed"]} >= {"copy", "statistics", "merge and loss", "gradient"}


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
    bad = [case(True, errors={"logprobs": float("nan")}), case(True, errors={"loss": 0.1}), case(True, skipped="oom")]
    kernels = {"in place": {"different": {"gradient": 1, "gradient with entropy": 0}}}
    assert head.wrong({"cases": [good, case(False, errors={"loss": 0.1}), case(False, skipped="failed")]}) == []
    assert len(head.wrong({"cases": bad, "kernels": kernels})) == 4
