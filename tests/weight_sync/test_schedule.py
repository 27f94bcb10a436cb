"""The schedule on all layouts, without processes."""

import itertools
import math

import pytest

from dynamo_megatron.config import ParallelConfig
from dynamo_megatron.models import load_model_config
from dynamo_megatron.models.mapping import huggingface_names, huggingface_shapes, is_expert
from dynamo_megatron.weight_sync.schedule import floor_bytes, make_schedule

DENSE = [
    {"tp": tp, "pp": pp, "vpp": vpp, "cp": cp, "ep": 1, "dp": 2}
    for tp, pp, vpp, cp in itertools.product((1, 2), (1, 2, 4), (1, 2), (1, 2))
    if vpp == 1 or pp == 2
]
EXPERTS = [
    {"tp": tp, "pp": pp, "vpp": 1, "cp": 1, "ep": ep, "dp": 2}
    for tp, pp, ep in ((1, 1, 2), (2, 1, 4), (2, 2, 2), (1, 2, 1))
]


@pytest.fixture(scope="module")
def specs(make_tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("schedules")
    kinds = {"qwen2": {"tied": True}, "qwen3": {"vocab": 131}, "qwen3_moe": {}}
    return {
        family: load_model_config(make_tiny_model(folder / family, family=family, layers=4, **options))
        for family, options in kinds.items()
    }


def schedule_of(spec, layout, bucket_bytes=30000):
    parallel = ParallelConfig(**{k: v for k, v in layout.items() if k != "dp"})
    ranks = layout["tp"] * layout["pp"] * layout["cp"] * layout["dp"]
    return make_schedule(spec, parallel, ranks, bucket_bytes=bucket_bytes, itemsize=4)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe"])
def test_every_tensor_is_sent_once_by_a_rank_that_holds_it(specs, family):
    spec = specs[family]
    shapes = huggingface_shapes(spec)
    for layout in EXPERTS if family == "qwen3_moe" else DENSE:
        schedule = schedule_of(spec, layout)
        sent = [name for bucket in schedule.buckets for name in bucket.names]
        assert sorted(sent) == sorted(shapes), layout
        assert schedule.nbytes == sum(4 * math.prod(shape) for shape in shapes.values())
        stage_ranks = layout["tp"] * layout["cp"] * layout["dp"]
        depth = spec.num_layers // (layout["pp"] * layout["vpp"])
        for number, buckets in enumerate(schedule.rounds):
            assert len({bucket.sender for bucket in buckets}) == len(buckets)
            for bucket in buckets:
                assert schedule.bucket_of(bucket.sender, number) is bucket
                stage, within = divmod(bucket.sender, stage_ranks)
                expert = {is_expert(parameter) for parameter in bucket.parameters}
                assert len(expert) == 1 and (within == 0 or expert == {True})
                assert (schedule.dense_bucket(stage, number) is bucket) == (expert == {False})
                for parameter in bucket.parameters:
                    if "layers." in parameter:
                        assert int(parameter.split(".")[2]) // depth % layout["pp"] == stage
                    else:
                        assert stage == (0 if "embedding" in parameter else layout["pp"] - 1)
                    if is_expert(parameter):
                        assert int(parameter.split(".")[6]) in spec.experts_of(within, layout["ep"])


def test_buckets_are_bounded_and_keep_fused_parameters_whole(specs):
    spec = specs["qwen3"]
    shapes = huggingface_shapes(spec)
    for limit in (1, 5000, 30000, 1 << 30):
        schedule = schedule_of(spec, DENSE[-1] | {"tp": 2, "pp": 2}, limit)
        for bucket in schedule.buckets:
            assert bucket.nbytes == sum(4 * math.prod(shapes[name]) for name in bucket.names)
            assert bucket.nbytes <= limit or len(bucket.parameters) == 1
            assert list(bucket.names) == [name for p in bucket.parameters for name in huggingface_names(spec, p)]
    assert [len(buckets) for buckets in schedule.rounds] == [2]  # a stage is one bucket


def test_the_floor_counts_every_server_ranks_own_parameters(specs):
    spec = specs["qwen2"]
    shapes = huggingface_shapes(spec)
    total = sum(4 * math.prod(shape) for shape in shapes.values())
    assert floor_bytes(spec, 1, 4) == total
    norms = sum(4 * math.prod(shape) for name, shape in shapes.items() if "norm" in name)
    assert floor_bytes(spec, 2, 4) == total + norms
    keys = sum(4 * math.prod(s) for name, s in shapes.items() if "k_proj" in name or "v_proj" in name)
    assert floor_bytes(spec, 4, 4) == total + 3 * norms + keys  # two key/value heads on four ranks
