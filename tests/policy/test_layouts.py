"""Partition invariance: every layout of Megatron gives what one process gives (layout_guard.py)."""

import json
import os
import random
import time

import layout_guard as guard
import pytest
from layout_guard import Row

# Always in the quick tier; LAYOUT_SEED (else the day) draws some more.
CORE = [
    Row("llama", "TP2xPP2+SP"),
    Row("qwen3", "VPP2xPP2"),
    Row("qwen2", "CP2xTP2"),
    Row("qwen3_moe", "EP2xPP2"),
]
DRAWN = 1
FAULTS = {  # on what each is seeded
    "micro_batch_mean": Row("qwen2", "1"),
    "cp_factor": Row("qwen2", "CP2"),
    "tied_head": Row("llama", "1"),
    "stale_parameters": Row("qwen2", "DP2"),
    "experts_as_dense": Row("qwen3_moe", "TP2+SP"),
}


# Updates of two rollouts each: ranks, and micro-batches of the interleaved schedule, are left empty.
SPARSE = {"seed": 28, "algorithm": {"loss": {"mini_batches": 4}}}
SPARSE_ROWS = [Row("qwen2", "DP4"), Row("qwen2", "VPP2xPP2xDP2")]


def sparse_cases() -> tuple[dict, ...]:
    reference = {"family": "qwen2", "out": "sparse", **SPARSE}
    return (reference, *({"row": row, "out": f"sparse-{row.layout}", **SPARSE} for row in SPARSE_ROWS))


# Gradients that are reduced while the last micro-batch's backward pass still runs, as on GPUs.
OVERLAP_ROWS = [Row("qwen2", "DP2"), Row("qwen2", "VPP2xPP2xDP2"), Row("qwen3_moe", "EP2xCP2")]


def overlap_cases() -> tuple[dict, ...]:
    return tuple({"row": row, "out": f"overlap-{row.layout}", "overlap": True} for row in OVERLAP_ROWS)


def fault_cases() -> tuple[dict, ...]:
    seeded = tuple({"row": row, "fault": fault, "out": fault} for fault, row in FAULTS.items())
    return (*seeded, *({"row": Row("qwen2", "DP2"), "fault": f, "out": f} for f in ("nan", "no_signal")))


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """(gaps of the core and the drawn rows, folder): one launch."""
    seed = int(os.environ.get("LAYOUT_SEED", time.time() // 86400))
    others = [row for row in guard.all_rows() if row not in CORE]
    rows = CORE + random.Random(seed).sample(others, DRAWN)
    print(f"LAYOUT_SEED={seed} draws {', '.join(row.name for row in rows[len(CORE) :])}")
    folder = tmp_path_factory.mktemp("layouts")
    return guard.run(rows, folder, more=fault_cases() + sparse_cases() + overlap_cases()), folder


def check(found, folder) -> None:
    print(guard.table(found))
    failed = {}
    for row, gaps in found.items():
        if worse := guard.beyond(row, gaps):
            failed[row.name] = worse
            if row.family == "qwen3_moe":
                failed[row.name]["routed otherwise"] = guard.rerouted(*folders(row, folder))
    assert not failed, failed


def folders(row, folder):
    return folder / f"reference-{row.family}-{row.dtype}", folder / row.name.replace(" ", "-")


def test_layouts_equal_one_process(sample):
    check(*sample)


@pytest.mark.parametrize("row", SPARSE_ROWS, ids=lambda row: row.layout)
def test_ranks_without_a_rollout_join_in(sample, row):
    gaps = guard.gaps(sample[1] / "sparse", sample[1] / f"sparse-{row.layout}")
    assert not guard.beyond(row, gaps), gaps


@pytest.mark.parametrize("row", OVERLAP_ROWS, ids=lambda row: row.layout)
def test_reduction_during_the_backward_pass_changes_nothing(sample, row):
    gaps = guard.gaps(folders(row, sample[1])[0], sample[1] / f"overlap-{row.layout}")
    assert not guard.beyond(row, gaps), gaps


def test_rerouted_tokens_are_counted(sample):
    """The report of a failed row of experts: none here, and some where two updates went another way."""
    row = Row("qwen3_moe", "EP2xPP2")
    if row in sample[0]:
        assert guard.rerouted(*folders(row, sample[1])) == 0
    path = sample[1] / "qwen3_moe-EP2xPP2" / "result.json"
    other = json.loads(path.read_text())
    first = next(iter(other["tokens"].values()))["experts"][0]
    first[0][0] ^= 1
    changed = sample[1] / "rerouted"
    changed.mkdir()
    (changed / "result.json").write_text(json.dumps(other))
    assert guard.rerouted(path.parent, changed) == 1


@pytest.mark.full
@pytest.mark.parametrize("family", list(guard.FAMILIES))
def test_every_layout_of_a_family_equals_one_process(tmp_path, family):
    found = guard.run([row for row in guard.all_rows() if row.family == family], tmp_path)
    check(found, tmp_path)
    documented = guard.DOCUMENT.read_text(encoding="utf-8")
    for row in found:
        assert f"| {row.family} | {' '.join(row.name.split()[1:])} |" in documented, f"{row.name}: not in the table"


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_holds_for_other_group_sizes_and_lengths(tmp_path, seed):
    rows = [Row("qwen2", "1"), Row("qwen3", "CP2xPP2"), Row("qwen2", "VPP2xPP2xDP2"), Row("llama", "DP4")]
    check(guard.run([*rows, Row("qwen3_moe", "EP2xCP2")], tmp_path, seed=seed), tmp_path)


@pytest.mark.parametrize("fault", list(FAULTS))
def test_the_guard_notices(sample, fault):
    _, folder = sample
    row = FAULTS[fault]
    gaps = guard.gaps(folders(row, folder)[0], folder / fault)
    print(fault, gaps)
    bar = guard.BAR["float32"]
    assert gaps["logprobs"] <= bar
    if fault == "stale_parameters":
        assert gaps["gradients"] <= bar
    else:
        assert gaps["gradients"] > 100 * bar
    assert gaps["weights"] > 10 * bar


def test_nan_stops_before_the_optimizer_step_and_names_rank_and_prompt(sample):
    fault = json.loads((sample[1] / "nan" / "fault.json").read_text())
    assert not fault["moved"]
    update, where, cause = fault["said"].partition("before the optimizer step: rank ")
    assert (
        update and where and cause[1:] == ", prompts b; the advantage of rollout 1-1 of prompt 'b' is NaN or infinite"
    )


def test_an_update_without_signal_is_skipped_and_counted(sample):
    fault = json.loads((sample[1] / "no_signal" / "fault.json").read_text())
    assert fault == {"said": {"skipped": 1.0}, "moved": False}


def test_the_reference_policy_stays_the_start_of_the_run(sample):
    tokens = json.loads((sample[1] / "qwen3_moe-EP2xPP2" / "result.json").read_text())["tokens"].values()
    start = [t["logprobs"][0] for t in tokens]
    assert [t["reference"][0] for t in tokens] == start and [t["reference"][1] for t in tokens] == start
    assert [t["logprobs"][1] for t in tokens] != start


def test_a_selecting_method_selects(sample):
    updates = json.loads((sample[1] / "reference-llama-float32" / "result.json").read_text())["updates"]
    assert all(u["selected"] > 50 for u in updates)
