"""What the policy head refuses."""

import plain_head as plain
import pytest
import torch
from plain_head import RANGES

from dynamo_megatron.config import ModulationConfig, PolicyLossConfig
from dynamo_megatron.kernels import chunked, triton_backend

MODULATION = ModulationConfig(expectation="sequence_mean", scope="micro_batch")
CONFIG = PolicyLossConfig(modulation=MODULATION, kl_coef=0.05)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(23, 7)}, r"weight: \[40, 8\] does not fit hidden"),
        ({"labels": torch.zeros(22, dtype=torch.int64)}, r"labels: needs int64 \[23\]"),
        ({"labels": torch.full((23,), 37)}, r"labels: 37 at token 0 is outside \[0, 37\)"),
        ({"ref": torch.zeros(23, 1)}, "ref_logprobs: needs"),
        ({"vocab_size": 41}, "vocab_size: 41 is outside"),
        ({"gradient": "eager", "ranges": None}, "gradient: 'eager' needs ranges"),
    ],
)
def test_bad_input_names_the_argument(change, message):
    c, options = plain.case(), {"ranges": RANGES, **change}
    for name in vars(c).keys() & change.keys():
        setattr(c, name, options.pop(name))
    with pytest.raises(ValueError, match=f"^{message}"):
        plain.run(c, CONFIG, **options)


def test_triton_needs_a_gpu_or_its_interpreter(monkeypatch):
    monkeypatch.setattr(triton_backend, "INTERPRETED", False)
    with pytest.raises(ValueError, match=r"^backend: 'triton' needs a GPU"):
        chunked.find_backend("triton", torch.device("cpu"))
