"""RoPE, SwiGLU and linears against autograd of their formulas, in torch and as Triton kernels."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from dynamo_megatron.kernels import layers
from dynamo_megatron.kernels.self_check import check_layers


@pytest.fixture(params=["torch", "triton"])
def functions(request, device):
    """The module that has rotated, swiglu and swiglu_gradient."""
    if request.param == "torch":
        return SimpleNamespace(rotated=layers._rotated, swiglu=layers.swiglu, swiglu_gradient=layers.swiglu_gradient)
    if device.type == "cpu":
        request.getfixturevalue("interpreter")
    from dynamo_megatron.kernels import layer_kernels

    return layer_kernels


def close(got, wanted, dtype):
    assert got.dtype == dtype
    atol = 1e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(got.float(), wanted.float(), rtol=4 * atol, atol=atol)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_and_its_gradient(functions, dtype, interleaved):
    generator = torch.Generator().manual_seed(0)
    packed = torch.randn(7, 3, 20, generator=generator).to(dtype)
    x, gradient = packed[..., 4:16], packed.flip(0)[..., 4:16]  # strided, as a part of query, key and value together
    positions = torch.tensor([0, 1, 2, 0, 1, 700, 5])
    frequencies = 10.0 ** -torch.arange(6.0)
    table = layers.rotary_table(positions, frequencies)
    turned = torch.polar(torch.ones(7, 1, 6), positions[:, None, None] * frequencies)
    at = x.float().detach().clone().requires_grad_()
    pairs = at.unflatten(-1, (6, 2) if interleaved else (2, 6)).unbind(-1 if interleaved else -2)
    complexes = torch.complex(*pairs) * turned
    wanted = torch.stack([complexes.real, complexes.imag], -1 if interleaved else -2).flatten(-2)
    wanted.backward(gradient.float())
    close(functions.rotated(x, table, 1.0, interleaved), wanted.detach(), dtype)
    close(functions.rotated(gradient, table, -1.0, interleaved), at.grad, dtype)
    other = x.detach().clone().requires_grad_()
    layers.rotate(other, table, interleaved).backward(gradient)
    close(other.grad, at.grad, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [5, 1030])  # the kernels' block is 1024
@pytest.mark.parametrize("weighted", [False, True])
def test_swiglu_and_its_gradients(functions, dtype, width, weighted):
    generator = torch.Generator().manual_seed(1)
    y = 3 * torch.randn(4, 2 * width, generator=generator).to(dtype)
    gradient = torch.randn(4, width, generator=generator).to(dtype)
    weights = torch.rand(4, 1, generator=generator) if weighted else None  # float32, as a router's
    at, w = y.float().clone().requires_grad_(), torch.ones(4, 1) if weights is None else weights.clone()
    a, b = at.chunk(2, -1)
    wanted = F.silu(a) * b * w.requires_grad_()
    wanted.backward(gradient.float())
    close(functions.swiglu(y, weights), wanted.detach(), dtype)
    of_y, of_weights = functions.swiglu_gradient(gradient, y, weights)
    close(of_y, at.grad, dtype)
    if weighted:
        torch.testing.assert_close(of_weights, w.grad, rtol=1e-4, atol=1e-3)
    else:
        assert of_weights is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_geglu_and_its_gradient(dtype):
    generator = torch.Generator().manual_seed(2)
    y, gradient = (torch.randn(4, n, generator=generator).to(dtype) for n in (60, 30))
    at = y.float().clone().requires_grad_()
    a, b = at.chunk(2, -1)
    wanted = 0.5 * a * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (a + 0.044715 * a**3))) * b
    wanted.backward(gradient.float())
    close(layers.geglu(y), wanted.detach(), dtype)
    close(layers.geglu_gradient(gradient, y), at.grad, dtype)


def test_a_kernel_that_is_wrong_is_found_before_training(device, request, monkeypatch):
    if device.type == "cpu":
        request.getfixturevalue("interpreter")
    from dynamo_megatron.kernels import layer_kernels

    for dtype in (torch.float32, torch.bfloat16):
        check_layers(device, dtype)
    right = layer_kernels.swiglu
    monkeypatch.setattr(layer_kernels, "swiglu", lambda y, weights: 1.1 * right(y, weights))
    with pytest.raises(ValueError, match="kernel of SwiGLU and PyTorch differ"):
        check_layers(device, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adapted", [False, True])
def test_linear_and_its_gradients(device, dtype, adapted):
    generator = torch.Generator().manual_seed(3)
    shapes = ((1, 5, 24), (16, 24), (16,), (4, 24), (16, 4), (5, 1, 16))
    *parts, gradient = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    parts[0] = parts[0].transpose(0, 1)  # as an embedding's output
    x, weight, bias, a, b = exact = [part.detach().float().requires_grad_() for part in parts]
    wanted = F.linear(x, weight, bias) + adapted * 1.5 * x @ a.t() @ b.t()
    wanted.backward(gradient.float())
    trained = (0, 3, 4) if adapted else (0, 1, 2)
    for i in trained:
        parts[i].requires_grad_()
        parts[i].main_grad = torch.ones(parts[i].shape, device=device)
    with torch.profiler.profile() as trace:
        got = layers.linear(*parts[:3], (*parts[3:], 1.5) if adapted else None)
    assert "aten::bmm" not in {event.name for event in trace.events()}
    got.backward(gradient)
    of = [parts[i].grad if i in (0, 2) else parts[i].main_grad - 1 for i in trained]  # of matrices in main_grad
    for ours, theirs in zip([got, *of], [wanted, *(exact[i].grad for i in trained)], strict=True):
        off = (ours.float() - theirs).abs().max() / theirs.abs().max()
        assert off.item() < (1e-6 if dtype == torch.float32 else 2**-6)
