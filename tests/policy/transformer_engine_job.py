"""Run by test_transformer_engine.py under the interpreter of `make te`: transformer_engine_job.py CASES.json builds
the model of every rank of a layout twice on the meta device, with TransformerEngine's own modules, as a GPU's ranks
do, and with the local ones, and compares them: parameters, their marks, and what a checkpoint of them holds.

A case has `name`, `folder` (config.json), `parallel`, `ranks` (how many), perhaps `only` (those to build) and `mcore`
(what hf2mcore wrote of the folder). Its line has `parameters`, the number of those compared, and `differences`.
"""

import json
import math
import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

sys.path.append(str(Path(__file__).parents[1] / "models"))

from dynamo_megatron.policy import backend

backend.enable_cpu()

import torch  # noqa: E402
import transformer_engine.pytorch as te  # noqa: E402
from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories  # noqa: E402
from meta_job import join_as, leave  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

from dynamo_megatron.checkpoint.torch_dist import TorchDistReader  # noqa: E402
from dynamo_megatron.config import Config  # noqa: E402
from dynamo_megatron.models import load_model_config  # noqa: E402
from dynamo_megatron.models.mapping import (  # noqa: E402
    global_name,
    huggingface_names,
    is_expert,
    layout_of,
)
from dynamo_megatron.policy.attention import PackedAttention  # noqa: E402
from dynamo_megatron.policy.model import build_chunks, rotation  # noqa: E402

# What Megatron's gradient reduction, its optimizer and its gradient norm ask of a parameter, and what they take for an
# answer if it is missing.
MARKS = {
    "allreduce": True,
    "sequence_parallel": False,
    "tensor_model_parallel": False,
    "shared_embedding": False,
    "is_embedding_or_output_parameter": False,
    "average_gradients_across_tp_domain": False,
}


class OnMeta(TorchFunctionMode):
    """What is created on a GPU is created on the meta device instead. TransformerEngine, asked for that device itself,
    would leave out the marks of its parameters."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if isinstance(device, int) or str(device).startswith("cuda"):
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


@contextmanager
def as_a_gpu() -> Iterator[None]:
    """This process calls itself a rank on a Hopper GPU."""
    hopper = types.SimpleNamespace(major=9, minor=0)
    said = {
        "is_available": True,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "get_device_properties": hopper,
    }
    with ExitStack() as stack:
        for name, answer in said.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, answer=answer, **__: answer))
        stack.enter_context(torch.device("meta"))
        stack.enter_context(OnMeta())
        yield


def parameters(chunks, spec, layout, p) -> dict[tuple[str, ...], dict]:
    """This rank's parameters and their marks, by the Hugging Face tensors that they are made of."""
    found = {}
    experts = spec.experts_of(layout.ep.rank(), p.ep).start
    keys = checkpoint_keys(chunks, layout)
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            whole = global_name(name, chunk.layer_offset, experts)
            tensors = huggingface_names(spec, whole)
            assert tensors not in found, f"two parameters are made of {tensors}"
            # Of a parameter that is not cut its dimension and stride say nothing, and they differ for experts.
            cut = layout_of(whole) != "replicated" and not is_expert(whole)
            found[tensors] = {
                "name": whole,
                "key": keys[id(parameter)],
                "shape": tuple(parameter.shape),
                "dtype": parameter.dtype,
                "trained": parameter.requires_grad,
                "cut": [getattr(parameter, f"partition_{what}", None) for what in ("dim", "stride")] if cut else None,
                **{mark: getattr(parameter, mark, usual) for mark, usual in MARKS.items()},
            }
    return found


def checkpoint_keys(chunks, layout) -> dict[int, str]:
    """{id of a parameter: the key under which a checkpoint has it}"""
    state = [chunk.sharded_state_dict(metadata={"dp_cp_group": layout.dp_cp}) for chunk in chunks]
    return {id(part.data): part.key for part in nested_values(state) if not isinstance(part, ShardedObject)}


def checkpoint(chunks, layout) -> tuple[dict[tuple, tuple], set[str]]:
    """(tensors, objects) of this rank's part of a checkpoint: {key and place: the rest}, keys."""
    tensors, objects = {}, set()
    for chunk in chunks:
        state = chunk.sharded_state_dict(metadata={"dp_cp_group": layout.dp_cp})
        apply_factories(state)
        for part in nested_values(state):
            if isinstance(part, ShardedTensor):
                rest = (part.dtype, part.local_shape, part.global_shape, part.axis_fragmentations, part.replica_id)
                assert (part.key, part.global_offset) not in tensors, f"{part.key}: saved twice"
                tensors[part.key, part.global_offset] = (*rest, part.prepend_axis_num, part.allow_shape_mismatch)
            elif isinstance(part, ShardedObject):
                objects.add(part.unique_key)
    return tensors, objects


def differing(what: str, ours: dict, theirs: dict) -> Iterator[str]:
    """A line for each entry that is not the same in the local model and in TransformerEngine's."""
    for key in ours.keys() | theirs.keys():
        if ours.get(key) != theirs.get(key):
            yield f"{what} {key}: local {ours.get(key)}, TransformerEngine's {theirs.get(key)}"


def wrong_modules(chunks, spec, p, dtype) -> Iterator[str]:
    """A line for each module that is not TransformerEngine's, or not set up as the model's config and layout ask."""
    scale = rotation(spec)[1] or spec.kv_channels**-0.5
    sequence_parallel = p.sequence_parallel and p.tp > 1
    for chunk in chunks:
        for name, module in chunk.decoder.named_modules():
            if isinstance(module, te.Linear | te.LayerNormLinear | te.GroupedLinear):
                tp, sharded = (1, False) if is_expert(f"{name}.") else (p.tp, sequence_parallel)
                wanted = {"tp_size": tp, "sequence_parallel": sharded, "fuse_wgrad_accumulation": True}
                wanted |= {"disable_parameter_transpose_cache": True, "use_bias": "qkv" in name and spec.qkv_bias}
                if isinstance(module, te.LayerNormLinear):
                    wanted |= {"normalization": "RMSNorm", "eps": spec.norm_eps, "zero_centered_gamma": False}
            elif isinstance(module, te.RMSNorm):
                wanted = {"eps": spec.norm_eps, "zero_centered_gamma": False}
            elif name.endswith("core_attention"):
                if dtype is torch.float32:
                    yield from () if isinstance(module, PackedAttention) else [f"{name}: {type(module)}"]
                    continue
                heads = {"num_attention_heads": spec.num_attention_heads, "tp_size": p.tp, "attention_type": "self"}
                wanted = heads | {"num_gqa_groups": spec.num_query_groups, "attention_dropout": 0.0}
                wanted |= {"hidden_size_per_attention_head_k": spec.kv_channels}
                yield from check(f"{name}.fused_attention", module.fused_attention, {"softmax_scale": scale})
                yield from check(f"{name}.flash_attention", module.flash_attention, {"softmax_scale": scale})
            elif isinstance(module, torch.nn.Linear) or name.endswith(
                ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
            ):
                yield f"{name}: {type(module)}"
                continue
            else:
                continue
            yield from check(name, module, wanted)


def check(name: str, module: torch.nn.Module, wanted: dict) -> Iterator[str]:
    for key, value in wanted.items():
        found = getattr(module, key)
        same = math.isclose(found, value, rel_tol=1e-12) if isinstance(value, float) else found == value
        if not same:
            yield f"{name}.{key} is {found}, not {value}"


def stored(folder: str, spec) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """(shape of each tensor, objects) of a checkpoint that hf2mcore has written."""
    reader = TorchDistReader(folder)
    shapes = {key: tensor.shape for key, tensor in reader.tensors.items()}
    return shapes, set(reader.metadata.state_dict_metadata) - set(shapes)


def not_stored(tensors: dict[tuple, tuple], objects: set[str], folder: str, spec) -> Iterator[str]:
    """A line for each part of TransformerEngine's checkpoint that a converted one lacks, or has in another shape."""
    shapes, stored_objects = stored(folder, spec)
    for (key, _), (_, _, shape, *_) in tensors.items():
        if key not in shapes:
            yield f"{key} is not in a converted checkpoint"
        elif shapes[key][1:] != shape[1:] or shapes[key][0] not in (shape[0], spec.vocab_size):
            yield f"{key} has shape {shape}, in a converted checkpoint {shapes[key]}"
    yield from (f"{key} is not in a converted checkpoint" for key in sorted(objects - stored_objects))


def compare(case: dict, rank: int, config: Config, spec) -> tuple[int, list[str]]:
    p = config.parallel
    layout, rotated = join_as(rank, case["ranks"], p), rotation(spec)
    # transformers makes YaRN's frequencies on the default device, and then copies them from there.
    with mock.patch("dynamo_megatron.policy.model.rotation", lambda _: rotated):
        with torch.device("meta"):
            ours = build_chunks(spec, config, layout)
        with as_a_gpu():
            theirs = build_chunks(spec, config, layout)
    found = [parameters(chunks, spec, layout, p) for chunks in (ours, theirs)]
    for one in (one for side in found for one in side.values()):
        one.pop("name")  # where a norm is fused into a linear the names differ
    (our_tensors, _), (their_tensors, objects) = (checkpoint(chunks, layout) for chunks in (ours, theirs))
    lines = [
        *differing("parameter", *found),
        *differing("in a checkpoint", our_tensors, their_tensors),
        *wrong_modules(theirs, spec, p, theirs[0].config.params_dtype),
        *(not_stored(their_tensors, objects, case["mcore"], spec) if "mcore" in case else ()),
    ]
    leave()
    return len(found[1]), lines


def main() -> None:
    for case in json.loads(Path(sys.argv[1]).read_text()):
        config = Config.model_validate(
            {
                "model": {"path": case["folder"], "dtype": case["dtype"]},
                "data": {"source": "none"},
                "output_dir": "none",
                "parallel": case["parallel"],
            }
        )
        spec = load_model_config(case["folder"])
        line = {"name": case["name"], "parameters": 0, "differences": []}
        for rank in case.get("only") or range(case["ranks"]):
            count, lines = compare(case, rank, config, spec)
            line["parameters"] += count
            line["differences"] += [f"rank {rank}: {text}" for text in lines]
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
