import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import head
import head_memory
import pytest
import torch
from head_cases import MODELS, TOKENS, VOCABULARY, all_cases, errors, in_float64, make_inputs, tiny_cases
from head_contenders import Contender, ours, three_gemms
from PIL import Image

from dynamo_megatron.kernels import chunked

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
    assert Image.open(folder / "head.png").size[0] > 1000


@pytest.mark.full
def test_the_command_runs_on_a_cpu(tmp_path):
    result = run(tmp_path, "--only", "tiny")
    assert result["tiny"] and len(result["cases"]) == 1
    check(result, tmp_path, ["torch"])
    assert "kernels" not in result


@pytest.mark.full
def test_every_case_with_the_interpreted_kernels(tmp_path, interpreter):
    result = run(tmp_path, TRITON_INTERPRET="1")
    assert [case["case"] for case in result["cases"]] == [case.name for case in tiny_cases()]
    check(result, tmp_path, ["torch", "triton"])
    assert set(result["kernels"]["in place"]["different"].values()) == {0}
    assert {row["kernel"] for row in result["kernels"]["speed"]} >= {"copy", "statistics", "merge and loss", "gradient"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "benchmarks/head.py: needs a GPU; --tiny shows on a CPU that it works\n"),
        (["--tiny", "--only", "huge*"], "--only: no case is named 'huge*'; a name is such as 7B/4096/tp1\n"),
    ],
)
def test_what_cannot_run_is_one_line(arguments, message, monkeypatch, capsys):
    if torch.cuda.is_available() and not arguments:
        pytest.skip("this machine has a GPU")
    monkeypatch.setattr(sys, "argv", ["head.py", *arguments])
    assert head.main() == 2
    assert capsys.readouterr() == ("", message)


def test_cases_cover_the_shapes():
    shapes = {(c.tokens, c.hidden, c.columns) for c in all_cases()}
    assert shapes == {(t, h, v) for t in TOKENS for h in MODELS.values() for v in VOCABULARY.values()}
    names = [c.name for c in all_cases()]
    assert len(set(names)) == len(names) and "14B/8192/tp8/peaked" in names


def test_logits_are_never_flat_and_peaked_ones_are_nearly_sure():
    shape = dataclasses.replace(tiny_cases()[0], tokens=400, hidden=256, columns=2000)
    flat = make_inputs(shape, CPU)
    assert 6.8 < flat.entropy < 7.3  # log 2000 - 1/2
    peaked = make_inputs(dataclasses.replace(shape, peaked=True), CPU)
    assert 0.0 < peaked.entropy < 1.0
    few = make_inputs(dataclasses.replace(shape, trained=0.6), CPU)
    assert 0.5 < (few.labels != -100).float().mean() < 0.7
    assert few.weights.sum().item() == pytest.approx(1) and not few.weights[few.labels == -100].any()


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


def test_a_contender_that_fails_is_listed_and_ours_may_not():
    def broken(inputs):
        raise RuntimeError("no such kernel")

    inputs = make_inputs(tiny_cases()[0], CPU)
    assert head.attempt(Contender("compiled", broken, 3), inputs, CPU) == {
        "skipped": "failed: RuntimeError: no such kernel"
    }
    with pytest.raises(RuntimeError, match="no such kernel"):
        head.attempt(Contender("eager", broken, 3, ours=True), inputs, CPU)


@pytest.mark.parametrize("gradient", ["eager", "recompute"])
def test_reference_memory_is_bounded_by_the_chunk(gradient):
    shape = {"tokens": 128, "vocabulary": 20_000, "hidden": 8}
    weight_gradient = 20_000 * 8 * 4
    peaks = {c: head_memory.measure(**shape, chunk=c, gradient=gradient)["tensors"] for c in (8, 64)}
    for chunk, peak in peaks.items():
        workspace = 2 * chunk * 20_000 * 4
        assert workspace <= peak <= workspace + weight_gradient + 0.1e6, (chunk, peak)


def test_committed_memory_is_bounded_by_the_chunk_and_in_the_docs():
    result = json.loads((HEAD.parent / "results" / "head_memory.json").read_text())
    assert result["shape"] == head_memory.SHAPE and len({row["chunk"] for row in result["rows"]}) == 3
    for row in result["rows"]:
        bound = row["workspace"] + row["weight gradient"]
        assert row["workspace"] <= row["tensors"] <= row["process"] <= 1.05 * bound
        assert row["workspace"] <= chunked.WORKSPACE_BYTES
    assert head_memory.markdown(result) in (HEAD.parents[1] / "docs" / "kernels.md").read_text()
