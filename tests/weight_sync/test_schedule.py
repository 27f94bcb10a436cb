"""The schedule on all layouts, without processes."""

import itertools
import math

import pytest

from dynamo_megatron.config import ParallelConfig
from dynamo_megatron.models import load_model_config
from dynamo_megatron.models.mapping import huggingface_names, huggingface_shapes, is_expert
from dynamo_megatron.weight_sync.schedule import floor_bytes, make_schedule

LAYOUTS = [
    {"tp": tp, "pp": pp, "vpp": vpp, "cp": cp, "dp": dp}
    for tp, pp, vpp, cp, dp in itertools.product((1, 2), (1, 2, 4), (1, 2), (1, 2), (1, 2))
    if vpp == 1 or pp in (2,)
]


@pytest.fixture(scope="module")
def specs(make_tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("schedules")
    kinds = {
        "qwen2": {},
        "llama": {"tied": True},
        "qwen3": {"vocab": 131},  # padded under every tp
        "qwen3_moe": {"experts": 4},
    }
    return {
        family: load_model_config(make_tiny_model(folder / family, family=family, layers=4, **options))
        for family, options in kinds.items()
    }


def schedule_of(spec, layout, bucket_bytes=30000):
    dp = layout.get("dp", 1)
    parallel = ParallelConfig(**{k: v for k, v in layout.items() if k != "dp"})
    return make_schedule(spec, parallel, parallel.model_ranks * dp, bucket_bytes=bucket_bytes, itemsize=4)


@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: "-".join(f"{k}{v}" for k, v in x.items() if v > 1) or "one")
def test_every_tensor_is_sent_once_by_a_rank_that_holds_it(specs, family, layout):
    spec = specs[family]
    schedule = schedule_of(spec, layout)
    shapes = huggingface_shapes(spec)
    sent = [name for bucket in schedule.buckets for name in bucket.names]
    assert sorted(sent) == sorted(shapes)
    assert schedule.nbytes == sum(4 * math.prod(shape) for shape in shapes.values())
    stage_ranks = layout["tp"] * layout["cp"] * layout["dp"]
    depth = spec.num_layers // (layout["pp"] * layout["vpp"])
    for bucket in schedule.buckets:
        stage, within = divmod(bucket.sender, stage_ranks)
        assert within == 0
        for parameter in bucket.parameters:
            if "layers." in parameter:
                chunk = int(parameter.split(".")[2]) // depth
                assert chunk % layout["pp"] == stage
            else:
                assert stage == (0 if "embedding" in parameter else layout["pp"] - 1)


def test_buckets_are_bounded_and_keep_fused_parameters_whole(specs):
    spec = specs["qwen2"]
    shapes = huggingface_shapes(spec)
    for limit in (1, 5000, 30000, 1 << 30):
        schedule = schedule_of(spec, {"tp": 2, "pp": 2}, limit)
        for bucket in schedule.buckets:
            assert bucket.nbytes == sum(4 * math.prod(shapes[name]) for name in bucket.names)
            assert bucket.nbytes <= limit or len(bucket.parameters) == 1
            whole = [name for p in bucket.parameters for name in huggingface_names(spec, p)]
            assert list(bucket.names) == whole
    assert len(schedule.rounds) == 1  # a stage is one bucket
    assert len(schedule.rounds[0]) == 2


@pytest.mark.parametrize("layout", [{"ep": 2, "dp": 2}, {"ep": 4, "tp": 2, "dp": 2}, {"ep": 2, "tp": 2, "pp": 2}])
def test_experts_are_sent_by_their_own_ranks(specs, layout):
    spec = specs["qwen3_moe"]
    schedule = schedule_of(spec, layout)
    stage_ranks = layout.get("tp", 1) * layout.get("dp", 1)
    sent = [name for bucket in schedule.buckets for name in bucket.names]
    assert sorted(sent) == sorted(huggingface_shapes(spec))
    for bucket in schedule.buckets:
        expert = [is_expert(p) for p in bucket.parameters]
        assert all(expert) or not any(expert)
        if any(expert):
            own = spec.experts_of(bucket.sender % stage_ranks, layout["ep"])
            assert {int(p.split(".")[6]) for p in bucket.parameters} <= set(own)
        else:
            assert bucket.sender % stage_ranks == 0
    for number, buckets in enumerate(schedule.rounds):
        senders = [bucket.sender for bucket in buckets]
        assert len(set(senders)) == len(senders)
        for bucket in buckets:
            assert schedule.bucket_of(bucket.sender, number) is bucket
            dense = schedule.dense_bucket(bucket.sender // stage_ranks, number)
            assert (dense is bucket) == (not is_expert(bucket.parameters[0]))


def test_the_floor_counts_every_server_ranks_own_parameters(specs):
    spec = specs["qwen2"]
    shapes = huggingface_shapes(spec)
    total = sum(4 * math.prod(shape) for shape in shapes.values())
    assert floor_bytes(spec, 1, 4) == total
    norms = sum(4 * math.prod(shape) for name, shape in shapes.items() if "norm" in name)
    assert floor_bytes(spec, 2, 4) == total + norms
    keys = sum(4 * math.prod(s) for name, s in shapes.items() if "k_proj" in name or "v_proj" in name)
    assert floor_bytes(spec, 4, 4) == total + 3 * norms + keys  # two key/value heads on four ranks
