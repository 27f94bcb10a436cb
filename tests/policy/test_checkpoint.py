"""A checkpoint under every layout: the step after a load is the step that a straight run takes."""

import shutil
from pathlib import Path

import checkpoint_cases
import pytest
import xxhash
from checkpoint_cases import case, difference
from rank_cases import run_cases

from dynamo_megatron.checkpoint.folder import read_manifest
from dynamo_megatron.checkpoint.inspection import describe, differences, inspect

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def model(make_tiny_model, tmp_path_factory) -> Path:
    """Its vocabulary is padded to another size under every tensor-parallel size."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "qwen2", layers=4, kv_heads=4, vocab=104)


@pytest.fixture(scope="module")
def runs(model, make_tiny_model, tmp_path_factory) -> tuple[Path, list]:
    """(folder, what the ranks say): saved by PP2 x DP2, loaded by the same and by TP4, and by another model."""
    folder = tmp_path_factory.mktemp("checkpoints")
    saved = {kind: str(folder / "straight" / kind / "step-000003") for kind in ("sync", "async")}
    other = make_tiny_model(folder / "other-model", layers=4, kv_heads=4, vocab=104, ffn=96)
    frozen = str(shutil.copytree(model, folder / "frozen"))
    cases = [
        case(model, {"pp": 2}, folder / "straight"),
        case(model, {"pp": 2}, folder / "same", load=saved["async"]),
        case(model, {"tp": 4}, folder / "tp4", load=saved["sync"]),
        case(other, {}, folder / "other", ranks=1, load=saved["sync"]),
        case(model, {}, folder / "damaged", ranks=1, damaged=True, reference=frozen),
    ]
    return folder, run_cases(checkpoint_cases.FILE, cases, folder)


def test_the_run_goes_on_in_the_same_layout_bit_for_bit_and_in_another(runs):
    folder, (_, same, tp4, *_) = runs
    assert same == tp4 == ["loaded"] * 4
    assert difference(folder / "straight", folder / "same") == 0
    assert difference(folder / "straight", folder / "tp4") <= TOLERANCE


def test_a_checkpoint_of_another_model_is_refused(runs):
    (said,) = runs[1][3]
    assert said.endswith("is a checkpoint of another model: ffn_hidden_size 128 instead of 96")


def test_a_reference_with_other_weights_is_refused(runs):
    said, folder = runs[1][4][0]["another reference"], runs[0]
    assert said.startswith(f"{folder / 'frozen'} has other weights now than when {folder / 'damaged'}")


def test_ranks_write_their_own_parts_with_checksums(runs):
    folder, _ = runs
    for kind in ("sync", "async"):
        saved = folder / "straight" / kind / "step-000003"
        sizes = sorted(file.stat().st_size for file in saved.glob("*.distcp"))
        assert len(sizes) == 4 and sizes[-1] < 1.2 * sizes[0], sizes
        found = {file.name: xxhash.xxh3_128_hexdigest(file.read_bytes()) for file in saved.iterdir()}
        assert found.pop("manifest.json") and found == read_manifest(saved)["checksums"]


def test_a_full_disk_is_one_line_and_leaves_nothing(runs):
    said, root = runs[1][4][0], runs[0] / "damaged" / "checkpoints"
    for what in ("common.pt", "data", "state.json"):
        assert said[what].startswith(f"{root}: the checkpoint of step 4 was not saved: ") and "\n" not in said[what]
        assert said[f"{what} left"] == "step-000003"


def test_a_flipped_bit_in_any_file_is_one_line(runs):
    said, folder = runs[1][4][0], runs[0] / "damaged/checkpoints/step-000003"
    for name in ("__0_0.distcp", "common.pt", ".metadata", "metadata.json", "state.json"):
        line = said[f"{name} flipped"]
        assert line.startswith(f"{folder / name}: its bytes are not those that were saved (XXH3 ") and "\n" not in line
        assert "; restore it from a copy" in line


def test_inspecting_says_what_is_there_and_what_differs(runs, model):
    saved = runs[0] / "straight" / "sync" / "step-000003"
    text = describe(inspect(saved))
    for line in (
        f"{saved}: checkpoint of a run, complete",
        "model: family qwen2,",
        "step: 3",
        "saved by: ranks 4, tp 1, pp 2,",
        "parameters: 179,520 in 10 tensors",
        "decoder.layers.mlp.linear_fc1.weight  [4, 256, 64] float32",
        "optimizer: exp_avg, exp_avg_sq, param of every parameter, float32",
    ):
        assert line in text
    assert list(differences(inspect(saved), inspect(runs[0] / "straight" / "async" / "step-000003"))) == []
    with pytest.raises(ValueError, match="name their tensors differently; `convert mcore2hf` writes"):
        list(differences(inspect(saved), inspect(model)))


SAVERS = {
    # name: (family, dtype, layout that saves, layouts that load)
    "dense": ("qwen2", "float32", {"tp": 2, "pp": 2}, [{"pp": 4}, {}, {"cp": 2, "tp": 2}, {"pp": 2, "vpp": 2}]),
    "bf16": ("qwen3", "bfloat16", {"pp": 2, "vpp": 2}, [{"tp": 2, "pp": 2, "sequence_parallel": True}, {}]),
    "context": ("qwen2", "float32", {"cp": 2, "pp": 2}, [{"tp": 4}]),
    "experts": ("qwen3_moe", "float32", {"ep": 2}, [{"pp": 2}, {"ep": 4}, {"ep": 2, "pp": 2}]),
}


@pytest.mark.full
def test_every_layout_loads_what_another_saved(make_tiny_model, tmp_path):
    cases, pairs = [], []
    for saver, (family, dtype, saves, loads) in SAVERS.items():
        sizes = {} if family == "qwen3_moe" else {"kv_heads": 4, "tied": family == "qwen3"}
        path = make_tiny_model(tmp_path / f"{saver}-model", family=family, dtype=dtype, layers=4, vocab=104, **sizes)
        cases.append(case(path, saves, tmp_path / saver, dtype=dtype))
        for number, parallel in enumerate([saves, *loads]):
            out, kind = tmp_path / f"{saver}-{number}", ("async", "sync")[number % 2]
            load = str(tmp_path / saver / kind / "step-000003")
            cases.append(case(path, parallel, out, dtype=dtype, load=load))
            # A step's rounding may differ by a unit of bfloat16, of which a tensor has 2^-9 on average.
            pairs.append((tmp_path / saver, out, 0 if number == 0 else 2**-9 if saver == "bf16" else TOLERANCE))
    run_cases(checkpoint_cases.FILE, cases, tmp_path, timeout=1800)
    found = {out.name: (difference(saved, out), limit) for saved, out, limit in pairs}
    assert all(gap <= limit for gap, limit in found.values()), found
