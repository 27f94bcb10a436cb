"""What stands in for Megatron's clipping of gradients, and which optional packages serve a run on a GPU."""

import sys

import pytest
import torch

from dynamo_megatron.errors import InputError
from dynamo_megatron.policy import backend
from dynamo_megatron.policy.backend import Fusions

HOPPER, AMPERE = (9, 0), (8, 0)


def test_the_norm_and_the_scaling_of_all_gradients_at_once():
    gradients = [torch.randn(3, 2), torch.randn(5)]
    before = torch.cat([g.flatten() for g in gradients])
    torch.testing.assert_close(backend._norm_of_all(1, None, [gradients])[0], before.norm()[None])
    backend._scale_all(1, None, [gradients, gradients], 0.3)
    torch.testing.assert_close(torch.cat([g.flatten() for g in gradients]), 0.3 * before)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Where a test puts packages, on a machine that has a Hopper GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: HOPPER)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def package(name: str, source: str) -> None:
        folder = tmp_path.joinpath(*name.split("."))
        folder.mkdir(parents=True)
        for parent in (folder, *folder.parents[: name.count(".")]):
            (parent / "__init__.py").touch()
        (folder / "__init__.py").write_text(source)

    yield package
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_package_that_is_half_there_is_refused_in_one_line(site):
    site("transformer_engine.pytorch", "raise FileNotFoundError('Could not find shared object file')")
    with pytest.raises(InputError, match="transformer-engine is installed and cannot be imported") as refused:
        Fusions.detect()
    assert "\n" not in str(refused.value) and "uninstall it" in str(refused.value)


@pytest.mark.parametrize(
    ("capability", "flash", "attention"),
    [
        (HOPPER, False, "transformer-engine"),
        ((12, 0), False, "torch"),
        (AMPERE, False, "torch"),
        (AMPERE, True, "transformer-engine"),
    ],
)
def test_which_attention_serves_a_gpu(site, monkeypatch, capability, flash, attention):
    site("transformer_engine.pytorch", "")
    if flash:
        site("flash_attn", "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert Fusions.detect().attention == attention
