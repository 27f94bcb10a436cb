"""What the policy head refuses, and what importing it costs."""

import subprocess
import sys

import plain_head as plain
import pytest
import torch

from dynamo_megatron.algorithm.modulation import ModulationRanges
from dynamo_megatron.config import ModulationConfig, PolicyLossConfig
from dynamo_megatron.kernels import chunked, policy_loss, triton_backend

MODULATION = ModulationConfig(expectation="sequence_mean", scope="micro_batch")
CONFIG = PolicyLossConfig(modulation=MODULATION, kl_coef=0.05)
RANGES = ModulationRanges(0.3, 3.0, 0.2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(23, 7)}, "weight: needs floating point"),
        ({"hidden": torch.zeros(23, 8, dtype=torch.int64)}, "hidden: needs floating point"),
        ({"labels": torch.zeros(22, dtype=torch.int64)}, r"labels: needs int64 \[23\]"),
        ({"labels": torch.full((23,), 37)}, r"labels: 37 at token 0 is outside \[0, 37\)"),
        ({"old": torch.zeros(23, dtype=torch.int64)}, "old_logprobs: needs"),
        ({"ref": torch.zeros(23, 1)}, "ref_logprobs: needs"),
        ({"cu_seqlens": None}, "cu_seqlens: needed"),
        ({"cu_seqlens": torch.tensor([0, 9, 5, 23])}, "cu_seqlens: needs to rise"),
        ({"cu_seqlens": torch.zeros(2)}, "cu_seqlens: needs integers"),
        ({"vocab_size": 41}, "vocab_size: 41 is outside"),
        ({"temperature": 0.0}, "temperature: 0.0"),
        ({"chunk_tokens": 0}, "chunk_tokens: 0"),
        ({"backend": "cuda"}, "backend: 'cuda' is none of"),
        ({"gradient": "lazy"}, "gradient: 'lazy' is none of"),
        ({"gradient": "eager", "ranges": None}, "gradient: 'eager' needs ranges"),
    ],
)
def test_bad_input_names_the_argument(change, message):
    c = plain.case()
    options = {"ranges": RANGES}
    for name, value in change.items():
        if hasattr(c, name):
            setattr(c, name, value)
        else:
            options[name] = value
    with pytest.raises(ValueError, match=f"^{message}"):
        policy_loss(
            c.hidden,
            c.weight,
            c.labels,
            c.advantages,
            c.old,
            c.weights,
            CONFIG,
            ref_logprobs=c.ref,
            cu_seqlens=c.cu_seqlens,
            **{"vocab_size": c.vocab, **options},
        )


def test_triton_needs_a_gpu_or_its_interpreter(monkeypatch):
    monkeypatch.setattr(triton_backend, "INTERPRETED", False)
    with pytest.raises(ValueError, match=r"^backend: 'triton' needs a GPU"):
        chunked.find_backend("triton", torch.device("cpu"))


def test_import_is_light():
    code = (
        "import sys, dynamo_megatron.kernels as k; assert 'torch' not in sys.modules; k.token_stats; k.PolicyLossOutput"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=120)
