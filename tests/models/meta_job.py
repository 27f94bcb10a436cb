"""Run by test_published.py: meta_job.py CASES.json builds every rank's model of a layout on the meta device, in one
process under a fake process group, and proves that the mapping covers every Hugging Face tensor exactly once.

A case has `name`, `folder` (a config.json), `parallel` and `ranks`: all of the layout's, or those to build. One with
`defect`, a name in DEFECTS, has the mapping spoilt before: its line says what the proof found.
"""

import dataclasses
import functools
import json
import math
import re
import sys
import time
from collections import Counter
from pathlib import Path

from dynamo_megatron.policy import backend

backend.enable_cpu()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from dynamo_megatron.config import Config  # noqa: E402
from dynamo_megatron.models import load_model_config  # noqa: E402
from dynamo_megatron.models.mapping import (  # noqa: E402
    OUTPUT_LAYER,
    TRANSFORMER_ENGINE_NAMES,
    global_name,
    huggingface_names,
    huggingface_shapes,
    is_expert,
    is_sharded,
    layout_of,
    parameter_names,
    to_megatron,
)
from dynamo_megatron.policy.layout import Layout  # noqa: E402
from dynamo_megatron.policy.model import build_chunks  # noqa: E402

# name: (the function to spoil, what is called in its place with the function and its arguments)
DEFECTS = {
    "a stage's first layer is the model's": ("global_name", lambda f, name, layer, expert: f(name, 0, expert)),
    "every rank holds the first experts": ("global_name", lambda f, name, layer, expert: f(name, layer, 0)),
    "every rank holds the first shard": (
        "to_megatron",
        lambda f, spec, name, parts, rank, size: f(spec, name, parts, 0, size),
    ),
    "the folder has twice the heads": (
        "huggingface_shapes",
        lambda f, spec: f(dataclasses.replace(spec, num_attention_heads=2 * spec.num_attention_heads)),
    ),
    "the head has no parameter": ("parameter_names", lambda f, spec: list(f(spec))[:-1]),
}


class MetaLayout(Layout):
    device = torch.device("meta")


def join_as(rank, world_size, p):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=p.tp,
        pipeline_model_parallel_size=p.pp,
        virtual_pipeline_model_parallel_size=p.vpp if p.vpp > 1 else None,
        context_parallel_size=p.cp,
        expert_model_parallel_size=p.ep,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(0, force_reset_rng=True)
    return MetaLayout(
        rank=rank,
        world_size=world_size,
        local_rank=0,
        tp=parallel_state.get_tensor_model_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        cp=parallel_state.get_context_parallel_group(),
        dp=parallel_state.get_data_parallel_group(),
        dp_cp=parallel_state.get_data_parallel_group(with_context_parallel=True),
        ep=parallel_state.get_expert_model_parallel_group(),
        expert_dp=parallel_state.get_expert_data_parallel_group(),
        host=dist.group.WORLD,
        node=dist.group.WORLD,
        leaders=None,
    )


def leave():
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def check_shapes(spec, shapes, held, tp_rank, tp_size):
    """Every parameter has the shape of its shard of its Hugging Face tensors."""
    for name, shape in held.items():
        parts = [torch.empty(shapes[part], device="meta") for part in huggingface_names(spec, name)]
        shard = to_megatron(spec, name, parts, tp_rank, tp_size)
        assert shard.shape == shape, f"{name}: {list(shape)}, its shard is {list(shard.shape)}"


def check_tiling(spec, shapes, tp_size):
    """The shards of every kind of parameter, together, hold every row (or column) of its tensors exactly once."""
    layer = ("decoder.layers.0.", "embedding", "output_layer", "decoder.final")
    for name in (n for n in parameter_names(spec) if n.startswith(layer) and is_sharded(n)):
        axis = 1 if layout_of(name) == "row" else 0
        parts, start = [], 1
        for part in huggingface_names(spec, name):
            size = shapes[part][axis]
            numbers = torch.arange(start, start + size)
            parts.append(numbers[None] if axis else numbers.view(-1, *(1,) * (len(shapes[part]) - 1)))
            start += size
        shards = [to_megatron(spec, name, parts, rank, tp_size).flatten() for rank in range(tp_size)]
        together = torch.cat(shards)
        together = together[together > 0]  # the rest is vocabulary padding
        assert torch.equal(together.sort().values, torch.arange(1, start)), f"{name}: not tiled by {tp_size} shards"


def prove(case):
    spec = load_model_config(case["folder"])
    config = Config(
        model={"path": case["folder"]},
        data={"source": "none"},
        output_dir="none",
        parallel=case["parallel"] | {"sequence_parallel": case["parallel"].get("tp", 1) > 1},
    )
    p = config.parallel
    spec.check_parallel(p.tp, p.pp, vpp=p.vpp, ep=p.ep)
    shapes = huggingface_shapes(spec)
    made_of = [part for name in parameter_names(spec) for part in huggingface_names(spec, name)]
    assert sorted(made_of) == sorted(shapes), "a tensor is in no parameter, or in two"
    check_tiling(spec, shapes, p.tp)
    for name in parameter_names(spec):
        check_transformer_engine_names(spec, name)
    world_size = p.pp * math.lcm(p.tp, p.ep)
    copies = Counter()
    largest = 0
    for rank in case.get("ranks") or range(world_size):
        layout = join_as(rank, world_size, p)
        with torch.device("meta"):
            chunks = build_chunks(spec, config, layout)
        experts = spec.experts_of(layout.ep.rank(), p.ep).start
        held = {
            global_name(name, chunk.layer_offset, experts): parameter.shape
            for chunk in chunks
            for name, parameter in chunk.named_parameters()
        }
        assert len(held) == sum(len(list(chunk.parameters())) for chunk in chunks), "two parameters of one name"
        check_shapes(spec, shapes, held, layout.tp.rank(), p.tp)
        copies.update((name, layout.tp.rank()) for name in held)
        largest = max(largest, sum(math.prod(shape) for shape in held.values()))
        leave()
    if not case.get("ranks"):
        check_coverage(spec, p, world_size, copies)
    return len(shapes), largest


def check_transformer_engine_names(spec, name):
    """A parameter under the name that TransformerEngine's modules give it is the same parameter."""
    theirs = name
    if expert := re.fullmatch(r"(.+)\.local_experts\.(\d+)\.(linear_fc[12])\.weight", name):
        theirs = f"{expert[1]}.{expert[3]}.weight{expert[2]}"
    for fused, alone in TRANSFORMER_ENGINE_NAMES.items():
        if not (spec.num_experts and alone.startswith("pre_mlp")):
            theirs = theirs.replace(alone, fused)
    theirs = global_name(theirs, 0, 0)
    assert huggingface_names(spec, theirs) == huggingface_names(spec, name), theirs
    assert layout_of(theirs) == layout_of(name), theirs


def check_coverage(spec, p, world_size, copies):
    """Every parameter is on exactly one stage: each of its shards as often as there are data-parallel ranks."""
    expected = Counter()
    for name in parameter_names(spec):
        if is_expert(name):
            continue
        expected.update({(name, tp): world_size // (p.tp * p.pp) for tp in range(p.tp)})
    tied_copy = {(OUTPUT_LAYER, tp) for tp in range(p.tp)} if spec.tied and p.pp > 1 else set()
    found = {key: n for key, n in copies.items() if not is_expert(key[0]) and key not in tied_copy}
    assert found == expected, "a parameter is on no stage, or on two"
    experts = Counter()
    for (name, _), n in copies.items():
        if is_expert(name):
            experts[name] += n
    once = {name: world_size // (p.pp * p.ep) for name in parameter_names(spec) if is_expert(name)}
    assert dict(experts) == once, "an expert is on no rank, or on too many"


def prove_spoilt(case):
    """What the proof says of the case's defect, or None."""
    name, spoilt = DEFECTS[case["defect"]]
    right = globals()[name]
    globals()[name] = functools.partial(spoilt, right)
    try:
        prove(case)
    except AssertionError as error:
        return str(error)
    finally:
        globals()[name] = right
        if dist.is_initialized():
            leave()
    return None


if __name__ == "__main__":
    for one in json.loads(Path(sys.argv[1]).read_text()):
        begun = time.monotonic()
        row = {"name": one["name"], "parallel": one["parallel"]}
        if "defect" in one:
            row["found"] = prove_spoilt(one)
        else:
            row["tensors"], row["largest_rank"] = prove(one)
        print(json.dumps({**row, "seconds": round(time.monotonic() - begun, 1)}), flush=True)
