"""RoPE and SwiGLU against autograd of their formulas, in torch and as Triton kernels."""

import pytest
import torch
import torch.nn.functional as F

from dynamo_megatron.kernels import layers


@pytest.fixture(params=["torch", "triton"])
def functions(request, device):
    """(rotated, swiglu, swiglu_gradient)"""
    if request.param == "torch":
        return layers._rotated, layers.swiglu, layers.swiglu_gradient
    if device.type == "cpu":
        request.getfixturevalue("interpreter")
    from dynamo_megatron.kernels import layer_kernels

    return layer_kernels.rotated, layer_kernels.swiglu, layer_kernels.swiglu_gradient


def close(got, wanted, dtype):
    assert got.dtype == dtype
    atol = 1e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(got.float(), wanted.float(), rtol=4 * atol, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_and_its_gradient(functions, dtype):
    generator = torch.Generator().manual_seed(0)
    packed = torch.randn(7, 3, 20, generator=generator).to(dtype)
    x, gradient = packed[..., 4:16], packed.flip(0)[..., 4:16]  # strided, as a part of query, key and value together
    positions = torch.tensor([0, 1, 2, 0, 1, 700, 5])
    frequencies = 10.0 ** -torch.arange(6.0)
    table = layers.rotary_table(positions, frequencies)
    turned = torch.polar(torch.ones(7, 1, 6), positions[:, None, None] * frequencies)
    at = x.float().detach().clone().requires_grad_()
    complexes = torch.complex(*at.chunk(2, -1)) * turned
    wanted = torch.cat([complexes.real, complexes.imag], -1)
    wanted.backward(gradient.float())
    close(functions[0](x, table, 1.0), wanted.detach(), dtype)
    close(functions[0](gradient, table, -1.0), at.grad, dtype)
    other = x.detach().clone().requires_grad_()
    layers.rotate(other, table).backward(gradient)
    close(other.grad, at.grad, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [5, 1030])  # the kernels' block is 1024
def test_swiglu_and_its_gradient(functions, dtype, width):
    generator = torch.Generator().manual_seed(1)
    y = 3 * torch.randn(4, 2 * width, generator=generator).to(dtype)
    gradient = torch.randn(4, width, generator=generator).to(dtype)
    at = y.float().clone().requires_grad_()
    a, b = at.chunk(2, -1)
    wanted = F.silu(a) * b
    wanted.backward(gradient.float())
    _, swiglu, swiglu_gradient = functions
    close(swiglu(y), wanted.detach(), dtype)
    close(swiglu_gradient(gradient, y), at.grad, dtype)
