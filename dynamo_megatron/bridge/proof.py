"""Run as `python -P -m dynamo_megatron.bridge.proof FOLDER`, without GPUs (bridge/environment.py), by one process: does
Bridge's model of this config.json compute what transformers' does? Prints the largest difference of a logit, or ends
with the reason why the model is refused as its last line.

A small random model of the same config.json (`shrink`) is saved as transformers saves it, loaded through
Bridge's mappings, and its logits of packed sequences are compared in float32.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynamo_megatron.policy import backend

backend.enable_cpu()

from dynamo_megatron.bridge import environment  # noqa: E402

environment.prepare()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from transformers import AutoModelForCausalLM, PretrainedConfig  # noqa: E402
from transformers.core_model_loading import revert_weight_conversion  # noqa: E402

from dynamo_megatron.bridge.source import build  # noqa: E402
from dynamo_megatron.checkpoint.weights import load_bridged  # noqa: E402
from dynamo_megatron.config import ParallelConfig  # noqa: E402
from dynamo_megatron.errors import InputError  # noqa: E402
from dynamo_megatron.models.bridged import KINDS, PROBE, SIZES, differing_field, read_config, shrink  # noqa: E402
from dynamo_megatron.policy.batch import MicroBatch  # noqa: E402
from dynamo_megatron.runtime import plain_json  # noqa: E402
from dynamo_megatron.runtime.plain_text import error_line  # noqa: E402
from dynamo_megatron.types import Sequences  # noqa: E402

TOLERANCE = 1e-5  # of logits whose standard deviation is about 0.5
SEEDS = (0, 1)  # a tie between experts that rounding decides may spoil one
LENGTHS = (7, PROBE, 33)
CAPS = ("swiglu_limit", "clip_qkv", "attn_logit_softcapping", "final_logit_softcapping")


@torch.no_grad()
def random_model(config: PretrainedConfig, seed: int) -> torch.nn.Module:
    """transformers' model with weights that let no misplaced one pass, and rounding not grow from layer to layer."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    lasting = set(model.state_dict())
    width = 0.25 if "linear_attention" in (getattr(config, KINDS, None) or ()) else 0.5
    for name, tensor in [*model.named_parameters(), *(pair for pair in model.named_buffers() if pair[0] in lasting)]:
        if name.endswith("gate_up_proj_bias"):
            tensor.normal_(0, 6)  # beyond GPT-OSS's swiglu_limit
        elif tensor.ndim >= 2:
            tensor.normal_(0, width / tensor.shape[-1] ** 0.5)
        else:
            tensor.add_(torch.randn_like(tensor) * 0.3)
    return model


@torch.no_grad()
def logits_gap(raw: Mapping[str, Any], seed: int) -> float:
    """The largest difference of a logit. Raises what Bridge and transformers raise."""
    reference = random_model(read_config(raw), seed)
    state = revert_weight_conversion(reference, dict(reference.state_dict()))
    model = build(read_config(raw), torch.float32, ParallelConfig())
    assert all(parameter.isnan().all() for parameter in model.parameters()), "what is not loaded would not be noticed"
    load_bridged(model, state.__getitem__)  # a tensor that has no place makes a difference
    vocabulary = reference.config.vocab_size
    tokens = torch.randint(0, vocabulary, (sum(LENGTHS) + len(LENGTHS),), generator=torch.Generator().manual_seed(seed))
    ends = np.cumsum([0, *(length + 1 for length in LENGTHS)])
    of = Sequences([str(n) for n in range(len(LENGTHS))], tokens.numpy(), ends, np.ones(len(LENGTHS), np.int64))
    here = {"device": tokens.device, "cp_rank": 0, "cp_size": 1}
    hidden = model.forward_packed(MicroBatch.pack(of, list(range(len(LENGTHS))), multiple=1, **here))
    ours = (hidden @ model.head_weight.T)[:, :vocabulary]
    parts = [tokens[None, start : start + n] for start, n in zip(ends, LENGTHS, strict=False)]
    theirs = torch.cat([reference(part).logits[0] for part in parts])
    return (ours - theirs).abs().max().nan_to_num(float("inf")).item()


def check_caps(raw: Mapping[str, Any]) -> None:
    """Raises InputError for a cap that the activations of the small model do not reach."""
    default = type(read_config(raw))().to_dict()
    for key in CAPS:
        supported = None if key.endswith("softcapping") else default.get(key)  # our head caps no logits
        if (value := {**default, **raw}.get(key)) != supported:
            raise InputError(f"{key}: {value!r} is not supported, only {supported!r}; a small model would not show it")


def agrees(small: Mapping[str, Any]) -> bool:
    try:
        return logits_gap(small, SEEDS[0]) <= TOLERANCE
    except Exception:  # of Bridge, Megatron or transformers, whatever it is
        return False
    finally:
        gc.collect()  # Megatron's modules are in cycles


def prove(raw: Mapping[str, Any]) -> float:
    """The largest difference of a logit. Raises InputError, which names the field of config.json that makes it too
    large or the model impossible."""
    gap = float("inf")
    check_caps(raw)
    small = shrink(raw, read_config(raw).to_dict())
    try:
        for seed in SEEDS:
            gap = min(gap, logits_gap(small, seed))
            if gap <= TOLERANCE:
                return gap
        what = f"logits of a small model of it differ by {gap:.2g} from transformers'"
    except Exception as error:  # of Bridge, Megatron or transformers, whatever it is
        what = f"it cannot be built ({error_line(error, 160)})"
    defaults = type(read_config(small))(num_hidden_layers=small["num_hidden_layers"]).to_dict()
    defaults = shrink(defaults, defaults) | {key: small[key] for key in SIZES if small.get(key) is not None}
    if (field := differing_field(small, defaults, agrees)) is None:
        raise InputError(f"{what}, for model_type {raw['model_type']!r} as such, also with its default config")
    raise InputError(f"{field}: {what}; without it the logits agree")


def start() -> None:
    """Megatron's groups, of this one process."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)


if __name__ == "__main__":
    start()
    try:
        print(f"{prove(plain_json.read_object(Path(sys.argv[1]) / 'config.json')):.1e}")
    except InputError as refusal:
        print(refusal, file=sys.stderr)
        sys.exit(environment.REFUSED)
