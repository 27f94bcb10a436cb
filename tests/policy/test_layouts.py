"""Partition invariance: every layout of Megatron gives what one process gives (layout_cases.py)."""

from pathlib import Path

import layout_cases
import pytest
from layout_cases import EVERY, FAMILIES, Row, beyond, case, gaps, make_models, result
from rank_cases import run_cases

from dynamo_megatron.config.files import compose

QUICK = [
    Row("llama", "TP2xPP2+SP"),
    Row("qwen3", "VPP2xPP2"),
    Row("qwen2", "CP2xTP2"),
    Row("qwen3_moe", "EP2xPP2", recompute="full"),
    Row("qwen3_moe", "TP2+SP"),
    Row("gemma3_text", "CP2xTP2+SP"),
    Row("olmo2", "TP2xPP2+SP"),
]
ALL = [
    *(Row(family, layout) for family, put in FAMILIES.items() for layout in (*EVERY, *put["more"].split())),
    Row("gemma3_text", "CP2xPP2", recompute="full"),
    Row("gemma3_text", "TP2xPP2+SP", "bfloat16"),
    Row("qwen3", "TP2xPP2+SP", recompute="selective"),
    Row("olmo2", "TP2xPP2+SP", recompute="full"),
    Row("qwen3", "VPP2xPP2", recompute="full"),
    Row("qwen3_moe", "EP2", recompute="selective"),
    Row("llama", "CP2", recompute="full"),
    # Not llama: its method selects tokens by entropy, which rounding in bfloat16 does differently.
    Row("qwen2", "TP2xPP2+SP", "bfloat16"),
    Row("qwen3", "CP2xPP2", "bfloat16"),
    Row("qwen3_moe", "EP2xPP2", "bfloat16"),
]
# Updates of two rollouts each: ranks, and micro-batches of the interleaved schedule, are left empty.
SPARSE = {"seed": 28, "algorithm": {"loss": {"mini_batches": 4}}}
SPARSE_ROWS = [Row("qwen2", "DP4"), Row("qwen2", "VPP2xPP2xDP2")]
# Gradients that are reduced while the last micro-batch's backward pass still runs, as on GPUs.
OVERLAP_ROWS = [Row("qwen2", "DP2"), Row("qwen2", "VPP2xPP2xDP2"), Row("qwen3_moe", "EP2xCP2")]


def apart(folder: Path, rows: list[Row], *, name: str = "", **extra) -> dict[Row, dict[str, float]]:
    """The gaps of the rows to one process of the same family and dtype."""
    models, cases = make_models(folder / "models"), []
    references = {(row.family, row.dtype): folder / f"reference-{row.family}-{row.dtype}" for row in rows}
    overlap = extra.pop("overlap", False)
    for (family, dtype), out in references.items():
        cases.append(case(models, out, Row(family, "1", dtype), budget=500, **extra))
    for row in rows:
        # llama's method selects by entropy, where equal ones go to the lower slot: there the order counts.
        order = {"order_seed": 3} if row.layout == "1" else {}
        cases.append(case(models, folder / row.name, row, overlap=overlap, **order, **extra))
    run_cases(layout_cases.__file__, cases, folder, timeout=1800)
    return {row: gaps(references[row.family, row.dtype], folder / row.name) for row in rows}


def check(found: dict[Row, dict[str, float]]) -> None:
    print(*(f"{row.name}: {gap}" for row, gap in found.items()), sep="\n")  # docs/checkpoints.md has the largest
    failed = {row.name: worse for row, gap in found.items() if (worse := beyond(row.dtype, gap))}
    assert not failed, failed


def test_layouts_equal_one_process(tmp_path):
    check(apart(tmp_path, QUICK))
    tokens = result(tmp_path / QUICK[-1].name)["tokens"].values()  # the reference policy stays the start of the run
    start = [t["logprobs"][0] for t in tokens]
    assert [t["reference"][0] for t in tokens] == start and [t["reference"][1] for t in tokens] == start
    assert [t["logprobs"][1] for t in tokens] != start
    assert all(u["selected"] > 50 for u in result(tmp_path / "reference-llama-float32")["updates"])


@pytest.mark.full
def test_every_layout_equals_one_process(tmp_path):
    check(apart(tmp_path, ALL, seed=8))


@pytest.mark.full
def test_ranks_without_a_rollout_join_in(tmp_path):
    check(apart(tmp_path, SPARSE_ROWS, **SPARSE))


@pytest.mark.full
def test_reduction_during_the_backward_pass_changes_nothing(tmp_path):
    check(apart(tmp_path, OVERLAP_ROWS, overlap=True))


# -- methods: each that computes something over a mini-batch or a response ---------------------------------------------
# The tiny model's logprobs lie close together and a mini-batch has some 200 tokens; both would select next to nothing.
ENOUGH = {"clip_cov": {"ratio": 0.05, "low": 0.0}, "kl_cov": {"ratio": 0.05}}
CHANGES = {  # bounds that hold some tokens and let some pass, before the first update and after it
    "truncate_sequence": {"rollout_correction": {"kind": "truncate", "level": "sequence", "low": 1e-9, "high": 1e3}},
    "mask_token": {"rollout_correction": {"kind": "mask", "level": "token", "low": 0.2, "high": 1.3}},
    "sequence_mean": {"modulation": {"expectation": "sequence_mean", "tau": 0.5}},  # whole sequences: not with CP
}
NAMES = ("grpo", "clip_cov", "kl_cov", "fork_tokens", "entropy_advantages", "otb", "dynamo", "cispo", "gspo", "rloo")
OF_RESPONSES = ("rloo", "truncate_sequence")


def method(name: str) -> dict:
    """Its algorithm section, with two updates a step, so that the second one has ratios. The rollouts are made up:
    nothing that decides how many are sampled is part of it."""
    file, given = f"methods/{'grpo' if name in CHANGES else name}", ["model.path=m", "data.source=d", "output_dir=o"]
    algorithm = compose([file], given)[0].algorithm.model_dump()
    algorithm = {key: section for key, section in algorithm.items() if key not in ("allocation", "sequential")}
    algorithm["loss"] |= {"mini_batches": 2, **{k: v for k, v in ENOUGH.items() if algorithm["loss"][k]}}
    return algorithm | CHANGES.get(name, {})


@pytest.mark.full
def test_the_update_of_a_method_does_not_depend_on_the_partition(tmp_path):
    models, cases = make_models(tmp_path / "models"), []
    for name in (*NAMES, *CHANGES):
        row = Row("qwen2", "DP2" if name == "sequence_mean" else "CP2")
        cases.append(case(models, tmp_path / name, Row("qwen2", "1"), budget=500, algorithm=method(name)))
        cases.append(case(models, tmp_path / f"{name}-parts", row, algorithm=method(name)))
    run_cases(layout_cases.__file__, cases, tmp_path, timeout=1800)
    failed = {}
    for name in (*NAMES, *CHANGES):
        found = gaps(tmp_path / name, tmp_path / f"{name}-parts")
        # A ratio of a response, a factor of the gradient, has the rounding of the sum of its logprobs.
        for key, bar in (("grad_norm", 2e-5), ("loss", 1e-4)) if name in OF_RESPONSES else ():
            assert found.pop(key) < bar
        if worse := beyond("float32", found):
            failed[name] = worse
        assert name == "grpo" or gaps(tmp_path / "grpo", tmp_path / name)["weights"] > 3e-5
        if name in ("fork_tokens", "clip_cov", "kl_cov"):
            assert all(u["selected"] >= 5 for u in result(tmp_path / name)["updates"])
    assert not failed, failed
