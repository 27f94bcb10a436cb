"""What enters the policy and must not train it: token ids beyond the vocabulary, damaged weights, NaN, a learning rate
that ruins the weights."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from dynamo_megatron.checkpoint.convert import hf2mcore

pytestmark = pytest.mark.full

VOCAB = 104  # padded to 128 rows and more
CHANGES = {  # (rollout, position, token id): what is said
    (0, 1, VOCAB): f"rollout g0-0 of prompt 'p0': token id {VOCAB} at position 1, in the prompt, ",
    (0, 7, 10**6): "rollout g0-0 of prompt 'p0': token id 1000000 at position 7, in the response, ",  # a label alone
    (1, 2, -1): "rollout g1-0 of prompt 'p1': token id -1 at position 2, in the response, ",
    (2, 0, VOCAB): f"rollout g2-0 of prompt 'p2': token id {VOCAB} at position 0, in the prompt, ",  # no response
}
DAMAGED = "model.layers.1.mlp.down_proj.weight"
BROKEN = "NaN, infinity or values above 1.8e+19 in the weights"
RATES = ("1e30", "1e38", "1e308")  # finite weights, a number that torch's Adam refuses, infinite weights


@pytest.fixture(scope="module")
def folders(make_tiny_model, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("inputs")
    whole = make_tiny_model(root / "whole", dtype="float32", vocab=VOCAB)
    for name, value in (("inf", float("inf")), ("nan", float("nan"))):
        shutil.copytree(whole, root / name)
        tensors = load_file(root / name / "model.safetensors")
        tensors[DAMAGED][1, -1] = value  # on the last tensor-parallel rank
        save_file(tensors, root / name / "model.safetensors", {"format": "pt"})
    shutil.copytree(whole, root / "huge")
    tensors = load_file(root / "huge" / "model.safetensors")
    tensors["model.norm.weight"].fill_(3e38)  # finite, but what it is multiplied with is not
    save_file(tensors, root / "huge" / "model.safetensors", {"format": "pt"})
    for name in ("flipped", "old"):
        hf2mcore(whole, root / name)
    manifest = json.loads((root / "old" / "manifest.json").read_text())
    manifest.pop("checksums")
    (root / "old" / "manifest.json").write_text(json.dumps(manifest))
    content = bytearray((root / "flipped" / "__0_0.distcp").read_bytes())
    content[len(content) // 2] ^= 1
    (root / "flipped" / "__0_0.distcp").write_bytes(content)
    return {name: root / name for name in ("whole", "inf", "nan", "huge", "flipped", "old")}


@pytest.fixture(scope="module")
def both(folders, run_script, tmp_path_factory) -> dict[int, Path]:
    """Where the ranks have written what was said, by tensor-parallel size."""
    out = tmp_path_factory.mktemp("said")
    damaged = {name: str(folder) for name, folder in folders.items() if name != "whole"}
    cases = []
    for ranks in (1, 2):
        (out / f"tp{ranks}").mkdir()
        config = {
            "model": {"path": str(folders["whole"]), "dtype": "float32"},
            "data": {"source": "none"},
            "output_dir": "none",
            "parallel": {"tp": ranks},
        }
        case = {"config": config, "ranks": ranks, "folders": damaged, "changes": list(CHANGES)}
        case["rates"] = list(map(float, RATES))
        whole = str(folders["whole"])
        case["every token counts"] = {
            "kl": {"kl": {"coef": 0.1, "reference": whole}},
            "entropy": {"loss": {"entropy_coef": 0.1}},
        }
        cases.append({**case, "out": str(out / f"tp{ranks}")})
    run_script(Path(__file__).with_name("input_runs.py"), cases, out, 300)
    return {ranks: out / f"tp{ranks}" for ranks in (1, 2)}


@pytest.fixture(params=[1, 2], ids=["TP1", "TP2"])
def said(request, both) -> tuple[list[dict[str, str]], str]:
    """(what each rank says, by case; rank 0's output)."""
    out = both[request.param]
    ranks = [json.loads((out / f"rank{r}.json").read_text()) for r in range(request.param)]
    return ranks, (out / "rank0.log").read_text()


@pytest.mark.parametrize("what", ["stats", "fit"])
def test_a_token_id_that_the_model_does_not_have_is_refused_on_every_rank(said, what):
    for rank in said[0]:
        assert rank[f"{what} None"] == "nothing"
        for change, expected in CHANGES.items():
            assert rank[f"{what} {change}"].startswith(
                f"InputError: {expected}is not in the model's vocabulary (0 to 103)"
            )


def test_a_weight_that_is_not_finite_is_refused_by_name_on_every_rank(said, folders):
    for rank in said[0]:
        for name in ("inf", "nan"):
            why = f"InputError: {folders[name]}: tensor {DAMAGED} holds NaN or infinity"
            assert rank[name].startswith(why)


def test_a_flipped_bit_of_a_converted_model_is_refused_on_every_rank(said, folders):
    for rank in said[0]:
        file = folders["flipped"] / "__0_0.distcp"
        assert rank["flipped"].startswith(f"InputError: {file}: its bytes are not those that were saved (XXH3 ")


def test_a_damaged_reference_model_is_refused_before_anything_is_generated(said):
    for rank in said[0]:
        assert rank["reference flipped"] == rank["flipped"] and rank["reference nan"] == rank["nan"] != "nothing"


def test_a_model_that_was_converted_without_checksums_loads_with_one_line(said, folders):
    assert all(rank["old"] == "nothing" for rank in said[0])
    assert said[1].count(f"{folders['old']}: saved without checksums, so that its bytes are not verified\n") == 1


def test_statistics_that_are_not_finite_end_the_run_on_every_rank(said, folders):
    weight = f"; {BROKEN} of rank {len(said[0]) - 1}: lm_head.weight"
    others = " (and on 1 more ranks)" if len(said[0]) == 2 else ""
    cases = (
        ("NaN", "policy", weight),
        ("NaN on all", "policy", f"; {BROKEN} of rank 0: lm_head.weight{others}"),
        ("reference NaN", f"reference model {folders['huge']}", f"; {BROKEN} of rank 0: model.norm.weight{others}"),
    )
    for rank in said[0]:
        for case, model, cause in cases:
            assert rank[case] == (
                f"NonFiniteError: NaN or infinite logprobs or entropy of the {model} in 2 of 3 responses; the first: "
                f"rollout g0-0 of prompt 'p0'{cause}"
            )


@pytest.mark.parametrize("rate", map(float, RATES))
@pytest.mark.parametrize("updates", ["1 updates", "2 updates", "sft"])
def test_an_update_that_ruins_the_weights_is_found_after_it_on_every_rank(said, rate, updates):
    for rank in said[0]:
        assert rank[f"{updates} at {rate}"].startswith(
            f"NonFiniteError: the update at learning rate {rate:g} ruined the weights, and they are not saved: "
            f"{BROKEN} of rank 0: model.embed_tokens.weight, and "
        )


@pytest.mark.parametrize("term", ["kl", "entropy"])
def test_an_update_in_which_no_token_has_a_weight_is_skipped(said, term):
    assert all(rank[term] == [{"skipped": 1.0}] for rank in said[0])
