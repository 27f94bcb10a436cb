"""On ranks, for test_parity.py: Megatron's GPTModel beside transformers, and its checkpoints beside the converter's.

A case has `folder` (Hugging Face), `dtype`, `parallel` and may have
`logits`: compare them with transformers' in float32 (no pipeline);
`gradients`: the same of the gradients of several packed sequences (one rank);
`mcore`: what hf2mcore wrote of the folder: Megatron's own loader gives the parameters that load_weights gives. What
loads has norms with an extra state, as TransformerEngine's have;
`run`: save a checkpoint under this folder, as a training run does.
"""

import warnings
from pathlib import Path

import numpy as np
import torch
from megatron.core import dist_checkpointing, tensor_parallel
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from dynamo_megatron.checkpoint.policy_state import begin_save
from dynamo_megatron.checkpoint.weights import load_weights, open_weights
from dynamo_megatron.models import FAMILIES, load_model_config
from dynamo_megatron.models.mapping import to_huggingface
from dynamo_megatron.policy.batch import MicroBatch
from dynamo_megatron.policy.model import build_chunks
from dynamo_megatron.policy.norms import RMSNorm
from dynamo_megatron.policy.policy import Policy
from dynamo_megatron.types import Sequences

LENGTH = 48
THEIRS = [MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[family]] for family in FAMILIES]  # imported once, not by each rank


class StatefulNorm(RMSNorm):
    def get_extra_state(self):
        return torch.empty(0)

    def set_extra_state(self, state):
        pass


def as_transformer_engine(chunks, spec):
    """Gives the norms that TransformerEngine does not fuse into a linear an extra state."""
    fused = ("input_layernorm",) if spec.num_experts else ("input_layernorm", "pre_mlp_layernorm")
    for chunk in chunks:
        for name, module in chunk.named_modules():
            if isinstance(module, RMSNorm) and not name.endswith((*fused, "bda.norm")):
                module.__class__ = StatefulNorm


@torch.no_grad()
def logits_gap(model, spec, folder, cp):
    tokens = torch.randint(0, spec.vocab_size, (LENGTH + 1,), generator=torch.Generator().manual_seed(0))
    sequence = Sequences(["0"], tokens.numpy(), np.array([0, LENGTH + 1]), np.array([1]))
    here = {"cp_rank": cp.rank(), "cp_size": cp.size()}
    packed = MicroBatch.pack(sequence, [0], multiple=1, device=tokens.device, **here)
    hidden = model.forward_packed(packed)
    logits = tensor_parallel.gather_from_tensor_model_parallel_region(hidden @ model.head_weight.T)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens[None, :-1]).logits[0]
    assert reference.std() > 0.3, "logits too flat to tell a misplaced weight"
    return (logits[:, : spec.vocab_size] - reference[packed.positions[0]]).abs().max().item()


def gradients_gap(model, spec, folder):
    """The largest difference, in parts of the largest value of its tensor."""
    draw, lengths = torch.Generator().manual_seed(0), [LENGTH, 5, LENGTH, 31]
    count = sum(lengths) + len(lengths)
    tokens = torch.randint(1, spec.vocab_size, (count,), generator=draw)  # 0 pads: no gradient in transformers
    offsets = np.append(0, np.cumsum(lengths) + np.arange(1, len(lengths) + 1))
    sequences = Sequences(list("abcd"), tokens.numpy(), offsets, np.ones(len(lengths), np.int64))
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    packed = MicroBatch.pack(sequences, list(range(len(lengths))), multiple=1, device=tokens.device)
    logits = (model.forward_packed(packed) @ model.head_weight.T)[:, : spec.vocab_size]
    upstream = torch.randn(logits.shape, generator=draw)
    (logits * upstream).sum().backward()
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for start, length, part in zip(offsets, lengths, upstream.split(lengths), strict=False):
        (theirs(tokens[None, start : start + length]).logits[0] * part).sum().backward()
    reference, gaps = revert_weight_conversion(theirs, {name: p.grad for name, p in theirs.named_parameters()}), []
    for name, parameter in model.named_parameters():
        whole = parameter.main_grad if parameter.grad is None else parameter.main_grad + parameter.grad
        for part, mine in to_huggingface(spec, name, [whole]).items():
            gaps.append(((mine - reference.pop(part)).abs().max() / mine.abs().max()).item())
    assert not reference, f"no gradient of {sorted(reference)}"
    return float(np.max(gaps))


def check_megatron_loads(chunks, spec, config, case, layout):
    metadata = {"dp_cp_group": layout.dp_cp}
    others = build_chunks(spec, config, layout)
    as_transformer_engine(others, spec)
    sharded = {str(i): chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(others)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        loaded = dist_checkpointing.load(sharded, case["mcore"])
    for i, (other, chunk) in enumerate(zip(others, chunks, strict=True)):
        other.load_state_dict(loaded[str(i)])
        for (name, theirs), ours in zip(other.named_parameters(), chunk.parameters(), strict=True):
            assert torch.equal(theirs, ours), f"{name}: Megatron loads another tensor"


def save_checkpoint(spec, config, layout, run):
    state = {} if layout.rank == 0 else None
    save = begin_save(Policy(spec, config, layout), run / "checkpoints", 3, state, background=False)
    save.complete(1, 60, print)


def on_rank(case, config, layout):
    """The gaps to transformers."""
    folder = case["folder"]
    spec = load_model_config(folder)
    chunks = build_chunks(spec, config, layout)
    files = open_weights(folder, spec)
    place = {"ep_rank": layout.ep.rank(), "ep_size": layout.ep.size()}
    place |= {"tp_rank": layout.tp.rank(), "tp_size": layout.tp.size()}
    for chunk in chunks:
        load_weights(chunk, spec, files, layer_offset=chunk.layer_offset, **place)
    if "mcore" in case:
        check_megatron_loads(chunks, spec, config, case, layout)
    if "run" in case:
        save_checkpoint(spec, config, layout, Path(case["run"]))
    gaps = {"logits": logits_gap(chunks[0], spec, folder, layout.cp)} if case.get("logits") else {}
    if case.get("gradients"):
        gaps["gradients"] = gradients_gap(chunks[0], spec, folder)
    return gaps
