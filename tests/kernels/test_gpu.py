"""What only a GPU can show: sizes beyond 32-bit offsets, blocks of the real size, the race of an in-place kernel."""

import plain_head as plain
import pytest
import torch

from dynamo_megatron.kernels import reference, triton_backend
from dynamo_megatron.kernels.triton_kernels import gradient_kernel
from dynamo_megatron.kernels.types import Shard

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or triton_backend.INTERPRETED, reason="needs a GPU and KERNEL_TESTS_DEVICE=cuda"
)
T = 0.7


def logits_of(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, Shard]:
    generator = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(rows, columns, generator=generator, device="cuda").mul_(3)
    labels = torch.randint(columns, (rows,), generator=generator, device="cuda")
    return logits, labels, Shard(0, columns, columns - 5)


@pytest.mark.parametrize(("rows", "columns"), [(16_384, 152_064), (70_000, 64), (3, 152_576)])
def test_statistics_and_gradient_of_the_last_rows(rows, columns):
    """16,384 x 152,064 logits are more than 2^31, 70,000 rows more than grid axes 1 and 2 take."""
    logits, labels, shard = logits_of(rows, columns)
    labels.clamp_(max=shard.columns - 1)
    last = slice(rows - 3, rows)
    few, few_labels = logits[last].double(), labels[last]
    part, _ = triton_backend.shard_statistics_(logits, labels, shard, T)
    stats = triton_backend.merge(part[None], T)
    exact, _ = reference.shard_statistics_(few.clone(), few_labels, shard, T)
    wanted = reference.merge(exact[None], T)
    for got, want in zip(stats, wanted, strict=True):
        error = (got[last].double() - want).abs()
        assert (error <= 2e-6 + 3e-7 * want.abs()).all()
    g = torch.randn(rows, device="cuda")
    row = (stats.maximum, stats.log_sum, stats.entropy, g, g.flip(0))
    got = triton_backend.logits_gradient_(logits, labels, shard, *row, T, torch.bfloat16)[last].double()
    expected = plain.logits_gradient(few[:, : shard.columns], few_labels, g[last], g.flip(0)[last], T)
    torch.testing.assert_close(got[:, : shard.columns], expected, rtol=2**-8, atol=1e-7)
    assert (got[:, shard.columns :] == 0).all()


@pytest.mark.parametrize("entropy", [False, True])
def test_in_place_gradient_has_the_bits_of_another_buffers(entropy):
    logits, labels, shard = logits_of(512, 152_064)
    part, _ = triton_backend.shard_statistics_(logits, labels, shard, T)
    stats = triton_backend.merge(part[None], T)
    g = torch.randn(512, device="cuda")
    row = (stats.maximum, stats.log_sum, stats.entropy, g, g.flip(0) if entropy else None)
    elsewhere = torch.empty_like(logits, dtype=torch.bfloat16)
    gradient_kernel[(512,)](
        logits,
        elsewhere,
        labels,
        *row,
        shard.rows,
        shard.columns,
        shard.start,
        logits.stride(0),
        elsewhere.stride(0),
        TEMPERATURE=T,
        BLOCK=triton_backend.GRADIENT_BLOCK,
        num_warps=triton_backend.GRADIENT_WARPS,
        **triton_backend.OPTIONS,
    )
    for _ in range(50):
        in_place = triton_backend.logits_gradient_(logits.clone(), labels, shard, *row, T, torch.bfloat16)
        assert torch.equal(in_place.view(torch.int16), elsewhere.view(torch.int16))
