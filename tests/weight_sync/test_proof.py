import pytest
import torch
from safetensors.torch import load_file

from dynamo_megatron.models import load_model_config
from dynamo_megatron.weight_sync.proof import ExpectedChecksums, compare, mismatch, proved_layers, server_device
from dynamo_megatron.weight_sync.tensor_hash import Sha256

FAMILIES = ("qwen2", "llama", "qwen3", "qwen3_moe")
QUERIES, KEYS = (f"model.layers.1.self_attn.{x}_proj.weight" for x in "qk")


@pytest.fixture(scope="module")
def model(make_tiny_model, tmp_path_factory):
    """make(family, dtype) -> (its folder, spec, tensors); equally many query and key heads, so that they can swap."""

    def make(family: str = "qwen3", dtype: str = "bfloat16"):
        folder = tmp_path_factory.mktemp("models") / family
        options = {"vocab": 131, "heads": 4, "kv_heads": 4, "tied": family == "qwen2", "expert_ffn": 64}
        make_tiny_model(folder, family, dtype=dtype, **options)
        return folder, load_model_config(folder), load_file(folder / "model.safetensors")

    return make


def expected(spec, parts, tp=1, device="cpu", layers=None):
    """What rank 0 makes of `parts`, the tensors that each training rank sends."""
    ranks = [ExpectedChecksums(spec, tp, device, layers) for _ in parts]
    for checksums, tensors in zip(ranks, parts, strict=True):
        checksums.add(tensors.items())
    return ranks[0]._joined([(c._given, c._hashes) for c in ranks])


@pytest.fixture
def server(server_parameters):
    """server(spec, tensors, tp) -> the `ranks` that an honest server on a CPU would report of `tensors`."""

    def report(spec, tensors, tp=1):
        reports = []
        for rank in range(tp):
            checksums = {}
            for name, values in server_parameters(spec, tensors, rank, tp).items():
                whole = Sha256(values.nbytes)
                whole.add(0, values)
                checksums[name] = f"{whole.digest():016x}"
            reports.append({"checksums": checksums, "parallelism_info": [{"tp_rank": rank}]})
        return reports

    return report


def wrong(tensors):
    """What must be noticed -> (tensors with it, the parameter to be named)."""
    one = tensors[KEYS].clone()
    one.view(torch.int16 if one.dtype is torch.bfloat16 else torch.int32)[3, 5] ^= 1
    fused = "model.layers.1.self_attn.qkv_proj.weight"
    yield "the last bit of one value", {**tensors, KEYS: one}, fused
    yield "q and k swapped", {**tensors, QUERIES: tensors[KEYS], KEYS: tensors[QUERIES]}, fused
    yield (
        "a norm in another order",
        {**tensors, "model.norm.weight": tensors["model.norm.weight"].flip(0)},
        "model.norm.weight",
    )


@pytest.mark.parametrize("tp", [1, 2])
def test_what_differs_is_named(model, server, tp):
    _, spec, tensors = model()
    should = expected(spec, [tensors], tp)
    assert compare(should, server(spec, tensors, tp)) is None
    count = len(should.ranks[0])
    for what, changed, name in wrong(tensors):
        assert compare(should, server(spec, changed, tp)) == f"of {count} parameters 1 differing: {name}", what
    lacking = {n: t for n, t in tensors.items() if n != KEYS}
    said = compare(expected(spec, [lacking], tp), server(spec, tensors, tp))
    assert "1 not sent: model.layers.1.self_attn.qkv_proj.weight (lacks " + KEYS in said
    ranks = server(spec, tensors, tp)
    del ranks[-1]["checksums"]["model.norm.weight"]
    ranks[-1]["checksums"]["model.bias"] = "0"
    said = compare(should, ranks)
    assert "1 not on the server: model.norm.weight; 1 of the server's alone: model.bias" in said
    assert compare(should, server(spec, tensors, 3 - tp)).endswith(f"where {tp} are expected")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_experts_of_several_ranks_are_one_parameter(model, device):
    _, spec, tensors = model("qwen3_moe")
    halves = [
        {n: t for n, t in tensors.items() if (".mlp.experts." not in n and rank == 0) or f"experts.{rank}" in n}
        for rank in range(4)
    ]
    assert sum(map(len, halves)) == len(tensors)
    assert expected(spec, halves, 2, device) == expected(spec, [tensors], 2, device)
    halves[1].popitem()
    assert len(expected(spec, halves, 2, device).missing) == 1


def test_replicas_that_have_parted_are_told(model, server):
    _, spec, tensors = model()
    for what, changed, name in wrong(tensors):
        both = expected(spec, [tensors, changed])
        assert both.disagreed == [name], what
        assert "different on two training ranks" in compare(both, server(spec, tensors))
    assert expected(spec, [tensors, tensors]).disagreed == []


def test_a_share_of_the_layers_each_time_and_all_of_them_in_turn(model, server):
    _, spec, tensors = model()
    assert proved_layers(7, 1, 5) == {0, 1, 2, 3, 4} and proved_layers(8, 4, 6) == {0, 1, 2, 3, 4, 5}
    assert [sorted(proved_layers(v, 4, 6)) for v in (1, 2, 3, 5)] == [[1, 5], [2], [3], [1, 5]]
    some = expected(spec, [tensors], layers={0})
    assert some.unproved_layers == [1] and len(some.ranks[0]) == 3 + 8
    ranks = server(spec, next(wrong(tensors))[1])
    ranks[0]["checksums"] = {n: d for n, d in ranks[0]["checksums"].items() if ".layers.1." not in n}
    assert compare(some, ranks) is None


def test_a_running_server(sglang_server, tiny_model):
    spec, tensors = load_model_config(tiny_model), load_file(tiny_model / "model.safetensors")
    assert server_device(sglang_server.endpoint) == "cpu"
    assert mismatch(sglang_server.endpoint, expected(spec, [tensors]), 60) is None
    assert mismatch(sglang_server.endpoint, expected(spec, [tensors], layers={1}), 60) is None
    tensors["model.norm.weight"] = tensors["model.norm.weight"].flip(0)
    assert "1 differing: model.norm.weight" in mismatch(sglang_server.endpoint, expected(spec, [tensors]), 60)


@pytest.mark.full
@pytest.mark.parametrize(("tp", "dtype"), [(1, "float32"), (2, "bfloat16")])
@pytest.mark.parametrize("family", FAMILIES)
def test_running_servers_of_every_family(model, start_servers, tmp_path, family, tp, dtype):
    folder, spec, tensors = model(family, dtype)
    (running,) = start_servers(folder, dtype, (tp,), tmp_path)
    assert mismatch(running.endpoint, expected(spec, [tensors], tp), 60) is None
    for what, changed, name in wrong(tensors):
        assert f"1 differing: {name}" in mismatch(running.endpoint, expected(spec, [changed], tp), 60), what
    del tensors[KEYS]
    assert "1 not sent: model.layers.1.self_attn.qkv_proj" in mismatch(
        running.endpoint, expected(spec, [tensors], tp), 60
    )
    running.stop()
