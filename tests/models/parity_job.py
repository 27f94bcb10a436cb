"""One of two ranks: parity_job.py STORE FOLDER... compares Megatron's GPTModel with transformers on every folder."""

import sys

import torch
import torch.distributed as dist

from dynamo_megatron.policy import backend

backend.enable_cpu()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from dynamo_megatron.config import Config  # noqa: E402
from dynamo_megatron.models import (  # noqa: E402
    SafetensorsFolder,
    load_model_config,
    load_weights,
    named_huggingface_tensors,
)
from dynamo_megatron.policy.batch import MicroBatch  # noqa: E402
from dynamo_megatron.policy.layout import join_ranks  # noqa: E402
from dynamo_megatron.policy.model import build_chunks  # noqa: E402

LENGTH = 48


def one_sequence(tokens):
    nothing = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(
        tokens=tokens[None],
        positions=torch.arange(LENGTH)[None],
        cu_seqlens=torch.tensor([0, LENGTH], dtype=torch.int32),
        rows=nothing,
        labels=nothing,
        slots=nothing,
        response_bounds=torch.zeros(1, dtype=torch.int32),
        sequences=[],
    )


@torch.no_grad()
def logits_gap(model, spec, folder):
    tokens = torch.randint(0, spec.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(0))
    logits = model.forward_packed(one_sequence(tokens)) @ model.head_weight.T
    logits = tensor_parallel.gather_from_tensor_model_parallel_region(logits)[:, : spec.vocab_size]
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens[None]).logits[0]
    assert reference.std() > 0.3, "logits too flat to tell a misplaced weight"
    return (logits - reference).abs().max().item()


def compare(folder, tp, pp, store):
    spec = load_model_config(folder)
    config = Config(
        model={"path": folder, "dtype": "float32"},
        data={"source": "none"},
        output_dir="none",
        parallel={"tp": tp, "pp": pp},
        trainer={"timeout": 60},
    )
    layout = join_ranks(config, store)
    (model,) = build_chunks(spec, config, layout)
    where = {"layer_offset": get_transformer_layer_offset(model.config)}
    with SafetensorsFolder(folder, spec) as files:
        load_weights(model, spec, files, **where, tp_rank=layout.tp.rank(), tp_size=layout.tp.size())
    back = dict(named_huggingface_tensors(model, spec, **where, tp_group=layout.tp))
    source = load_file(f"{folder}/model.safetensors")
    assert all(torch.equal(tensor, source[name]) for name, tensor in back.items())
    stages = [None] * pp
    dist.all_gather_object(stages, list(back), group=layout.pp)
    assert sorted(name for stage in stages for name in stage) == sorted(source), "a tensor is missing, or given twice"
    gap = logits_gap(model, spec, folder) if pp == 1 else 0.0
    print(f"PARITY {folder} tp {tp} pp {pp}: logits within {gap:.1e}", flush=True)
    assert gap < 1e-5
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    file_store = dist.FileStore(sys.argv[1], 2)
    for path in sys.argv[2:]:
        for tp, pp in ((1, 1), (2, 1), (1, 2)):
            compare(path, tp, pp, dist.PrefixStore(f"{path} {tp} {pp}", file_store))
