"""What the policy head refuses."""

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
        ({"hidden": torch.zeros(23, 7)}, r"weight: \[40, 8\] does not fit hidden"),
        ({"labels": torch.zeros(22, dtype=torch.int64)}, r"labels: needs int64 \[23\]"),
        ({"labels": torch.full((23,), 37)}, r"labels: 37 at token 0 is outside \[0, 37\)"),
        ({"old": torch.zeros(23, dtype=torch.int64)}, "old_logprobs: needs"),
        ({"ref": torch.zeros(23, 1)}, "ref_logprobs: needs"),
        ({"vocab_size": 41}, "vocab_size: 41 is outside"),
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
