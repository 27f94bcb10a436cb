"""The branch of the policy that GPUs run, on a CPU: Megatron's TransformerEngine layers over a stand-in for it."""

import sys

import pytest
import torch

from dynamo_megatron.errors import InputError
from dynamo_megatron.policy.backend import Fusions

HOPPER, AMPERE = (9, 0), (8, 0)


def test_transformer_engine_trains_fused_and_without_host_waits(gpu_branch):
    fused = gpu_branch(update=True)
    assert fused["attention"] == "TEDotProductAttention"
    # Of each layer and micro-batch: q and k rotated; qkv, proj, fc1, fc2 and their weights' gradients.
    wanted = {"attention": 1, "fused RoPE": 2, "linear": 4, "wgrad into main_grad": 4}
    assert fused["calls"] == wanted
    plain = gpu_branch(update=True, gpu=False, transformer_engine=False)
    gap = torch.tensor(fused["logprobs"]) - torch.tensor(plain["logprobs"])
    assert gap.abs().mean() < 0.02
    figures = plain["figures"]
    assert set(fused["figures"]) == set(figures)
    assert fused["figures"] == pytest.approx(figures, rel=0.05, abs=0.02 * figures["grad_norm"] ** 2)


@pytest.mark.full
def test_a_gpu_without_packed_attention_in_cudnn_takes_ours(gpu_branch):
    found = gpu_branch(update=True, capability=AMPERE)
    assert found["attention"] == "PackedAttention" and "attention: torch" in found["packages"]
    assert "attention" not in found["calls"] and found["calls"]["fused RoPE"] == 2


@pytest.mark.full
def test_a_save_before_the_first_step_is_resumed(gpu_branch, tmp_path):
    straight, resumed, moments, of_resumed = gpu_branch(update=True, save_first=str(tmp_path / "checkpoints"))[
        "resumed"
    ]
    assert straight["figures"] == resumed["figures"] and straight["weights"] == resumed["weights"]
    assert moments == of_resumed and all(norm for pair in moments for norm in pair)


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


def test_packages_that_are_not_there_are_done_without(site):
    assert Fusions.detect() == Fusions(norm="torch", attention="torch")


@pytest.mark.parametrize(
    ("capability", "flash", "attention"),
    [
        (HOPPER, False, "transformer-engine"),
        ((10, 0), False, "transformer-engine"),
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
