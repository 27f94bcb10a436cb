"""Run by test_transformer_engine.py under the interpreter of `make te`: transformer_engine_job.py CASES.json builds
the model of every rank of a layout twice on the meta device, with TransformerEngine's own modules, as a GPU's ranks
do, and with the local ones, and compares them: parameters, their marks, and what a checkpoint of them holds.

A case has `name`, `folder` (config.json), `parallel` and `ranks`. Its line has `parameters`, the number of those
compared, and `differences`.
"""

import json
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
import transformer_engine.pytorch  # noqa: E402, F401
from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories  # noqa: E402
from meta_job import join_as, leave  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

from dynamo_megatron.config import Config  # noqa: E402
from dynamo_megatron.models import load_model_config  # noqa: E402
from dynamo_megatron.models.mapping import (  # noqa: E402
    global_name,
    huggingface_names,
    is_expert,
    layout_of,
)
from dynamo_megatron.policy import attention, varlen  # noqa: E402
from dynamo_megatron.policy.model import build_chunks, local_rotation, rotation  # noqa: E402

attention.varlen = varlen  # imported where there is a GPU
LOCAL = {"glm4", "olmo2", "olmo3", "gemma3_text"}  # families whose layers TransformerEngine's modules are not
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


def checkpoint(chunks, layout) -> dict[tuple, tuple]:
    """The tensors of this rank's part of a checkpoint: {key and place: the rest}."""
    tensors = {}
    for chunk in chunks:
        state = chunk.sharded_state_dict(metadata={"dp_cp_group": layout.dp_cp})
        apply_factories(state)
        for part in nested_values(state):
            if isinstance(part, ShardedTensor):
                rest = (part.dtype, part.local_shape, part.global_shape, part.axis_fragmentations, part.replica_id)
                assert (part.key, part.global_offset) not in tensors, f"{part.key}: saved twice"
                tensors[part.key, part.global_offset] = (*rest, part.prepend_axis_num, part.allow_shape_mismatch)
    return tensors


def differing(what: str, ours: dict, theirs: dict) -> Iterator[str]:
    """A line for each entry that is not the same in the local model and in TransformerEngine's."""
    for key in ours.keys() | theirs.keys():
        if ours.get(key) != theirs.get(key):
            yield f"{what} {key}: local {ours.get(key)}, TransformerEngine's {theirs.get(key)}"


def compare(case: dict, rank: int, config: Config, spec) -> tuple[int, list[str]]:
    p = config.parallel
    layout, rotated, local = join_as(rank, case["ranks"], p), rotation(spec), local_rotation(spec)
    # transformers makes YaRN's frequencies on the default device, and then copies them from there.
    with mock.patch.multiple(
        "dynamo_megatron.policy.model", rotation=lambda _: rotated, local_rotation=lambda _: local
    ):
        with torch.device("meta"):
            ours = build_chunks(spec, config, layout)
        with as_a_gpu():
            theirs = build_chunks(spec, config, layout)
    found = [parameters(chunks, spec, layout, p) for chunks in (ours, theirs)]
    for one in (one for side in found for one in side.values()):
        one.pop("name")  # where a norm is fused into a linear the names differ
    lines = [
        *differing("parameter", *found),
        *differing("in a checkpoint", *(checkpoint(chunks, layout) for chunks in (ours, theirs))),
    ]
    linears = [m for c in theirs for m in c.modules() if hasattr(m, "fuse_wgrad_accumulation")]
    if (spec.family in LOCAL) != (not linears):
        lines.append(f"{len(linears)} linears of TransformerEngine")
    if not all(m.fuse_wgrad_accumulation and m.disable_parameter_transpose_cache for m in linears):
        lines.append("TransformerEngine's linears do not add to main_grad")
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
        for rank in range(case["ranks"]):
            count, lines = compare(case, rank, config, spec)
            line["parameters"] += count
            line["differences"] += [f"rank {rank}: {text}" for text in lines]
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
