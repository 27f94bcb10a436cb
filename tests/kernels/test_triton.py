"""The Triton kernels in Triton's interpreter, against float64 arithmetic on the same logits and plain autograd."""

import plain_head as plain
import pytest
import torch
from plain_head import FULL, MODULATION

from dynamo_megatron.algorithm.modulation import ModulationRanges
from dynamo_megatron.config import PolicyLossConfig
from dynamo_megatron.kernels import reference, tile_hash, token_stats, triton_backend
from dynamo_megatron.kernels.self_check import check_backend
from dynamo_megatron.kernels.types import METRICS, Shard, Tokens
from dynamo_megatron.weight_sync.proof import LANES, TILE_WORDS, tile_sums

pytestmark = [
    pytest.mark.usefixtures("small_blocks"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),  # of masked padding
]


@pytest.fixture
def ranges() -> ModulationRanges:
    return ModulationRanges(*torch.tensor([0.3, 3.0, 0.2], dtype=torch.float64))


def shards(logits, vocab, tp):
    """(this shard's logits, Shard) of `tp` equal parts of the columns."""
    rows = logits.shape[1] // tp
    for rank in range(tp):
        start = rank * rows
        shard = Shard(start, rows, min(max(vocab - start, 0), rows))
        yield logits[:, start : start + rows].clone(), shard


def statistics(logits, labels, vocab, tp, temperature):
    parts = [triton_backend.shard_statistics_(z, labels, s, temperature)[0] for z, s in shards(logits, vocab, tp)]
    return triton_backend.merge(torch.stack(parts), temperature)


def expected_statistics(logits, labels, temperature):
    """In float64."""
    lp = (logits.double() / temperature).log_softmax(-1)
    p, lp = lp.exp(), lp.clamp(min=-1e300)
    h, square = -(p * lp).sum(-1), p * p
    found = {"logprobs": lp.gather(1, labels[:, None])[:, 0], "entropy": h, "collision": square.sum(-1)}
    return found | {"expected_pi_lambda": (square * (lp + h[:, None])).sum(-1)}


def check_statistics(logits, labels, vocab, tp, temperature):
    got = statistics(logits, labels, vocab, tp, temperature)
    for name, want in expected_statistics(logits[:, :vocab], labels, temperature).items():
        error = (getattr(got, name).double() - want).abs()
        assert (error <= 2e-6 + 3e-7 * want.abs()).all(), (name, error.max())


def poisoned(vocab, rows, n, scale, seed=0):
    """Random logits [n, rows] with padding of 1e4, and labels that include the first and the last token."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, rows, generator=g) * scale
    logits[:, vocab:] = 1e4
    labels = torch.randint(0, vocab, (n,), generator=g)
    labels[:2] = torch.tensor([0, vocab - 1])
    return logits, labels


@pytest.mark.parametrize("tp", [1, 8])  # 9 columns a shard, the last one all padding
@pytest.mark.parametrize(("scale", "temperature"), [(1.0, 1.3), (3000.0, 0.7)])  # the last reaches |z| of 1e4
def test_statistics_of_shards(tp, scale, temperature):
    check_statistics(*poisoned(61, 72, 3, scale), 61, tp, temperature)


def test_statistics_in_blocks_of_the_real_size(monkeypatch):
    monkeypatch.setattr(triton_backend, "STATISTICS_BLOCK", 4096)
    check_statistics(*poisoned(9001, 9008, 3, 5.0), 9001, 1, 1.3)


def test_all_negative_and_masked_logits():
    logits, labels = poisoned(61, 72, 4, 1.0)
    logits[0, :61] -= 200
    logits[1, 1:40] = -torch.inf  # whole blocks, and at tp 4 a whole shard
    logits[2, :61] = -3e4
    logits[2, labels[2]] = 3e4
    for tp in (1, 4):
        check_statistics(logits, labels, 61, tp, 1.0)


def test_a_nan_stays_in_its_row():
    logits, labels = poisoned(61, 72, 3, 1.0)
    logits[1, 5], logits[2, 7] = torch.nan, torch.inf
    for name, value in statistics(logits, labels, 61, 2, 1.0)._asdict().items():
        if name != "maximum":
            assert value.isnan().tolist() == [False, True, True]


@pytest.mark.parametrize("operand", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("tp", [1, pytest.param(8, marks=pytest.mark.full)])
def test_gradient(tp, entropy, operand):
    logits, labels = poisoned(61, 72, 6, 4.0)
    logits[2, :61], logits[2, labels[2]] = -3e4, 3e4  # one-hot
    logits[3, 10:50], labels[3] = -torch.inf, 55
    g = torch.Generator().manual_seed(1)
    g_l, g_h = torch.randn(6, generator=g), torch.randn(6, generator=g)
    g_l[4] = g_h[4] = 0  # clipped: written without a look at the logits
    temperature = 0.7
    stats = statistics(logits, labels, 61, tp, temperature)
    row = (stats.maximum, stats.log_sum, stats.entropy, g_l, g_h if entropy else None)
    parts = [
        triton_backend.logits_gradient_(z, labels, shard, *row, temperature, operand)
        for z, shard in shards(logits, 61, tp)
    ]
    assert all(part.dtype == operand for part in parts)
    got = torch.cat(parts, 1).double()
    want = plain.logits_gradient(logits[:, :61], labels, g_l, g_h if entropy else torch.zeros(6), temperature)
    assert (got[:, 61:] == 0).all() and (got[4] == 0).all()
    tolerance = 1e-5 if operand == torch.float32 else 2**-7  # the interpreter cuts off where a GPU rounds
    torch.testing.assert_close(got[:, :61], want, rtol=tolerance, atol=1e-6)


CONFIGS = {
    "plain": PolicyLossConfig(),
    "full": FULL,
    "k1": PolicyLossConfig(0.2, 0.28, None, MODULATION, kl_coef=0.3, kl_kind="k1"),
    "k2": PolicyLossConfig(0.1, 0.3, 2.0, None, kl_coef=0.3, kl_kind="k2", entropy_coef=-0.1),
    "abs": PolicyLossConfig(0.2, 0.2, 1.3, MODULATION, kl_coef=0.3, kl_kind="abs"),
    "cispo": PolicyLossConfig(0.2, 0.28, None, kl_coef=0.3, entropy_coef=0.02, kind="cispo"),
    "response": PolicyLossConfig(0.2, 0.28, 1.3),  # with the ratios of responses
    "reported": PolicyLossConfig(0.2, 0.28, 3.0, MODULATION),  # reference logprobs, but no KL term
}


@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_merge_with_loss_is_that_of_the_algorithm(name, on_policy, ranges):
    config, n = CONFIGS[name], 41
    g = torch.Generator().manual_seed(3)

    def randn():
        return torch.randn(n, generator=g, dtype=torch.float64)

    logits, labels = torch.randn(n, 24, generator=g, dtype=torch.float64) * 2, torch.randint(0, 24, (n,), generator=g)
    parts = torch.stack([reference.shard_statistics_(z, labels, s, 0.8)[0] for z, s in shards(logits, 24, 3)])
    logp = reference.merge(parts, 0.8).logprobs
    drift = randn()
    drift[:4] = torch.tensor([25.0, -25.0, 4.0, -4.0])  # beyond the bounds of ratio and k3
    ref = None if name == "plain" else logp + 1.5 * randn()
    if ref is not None:
        ref[:3] = logp[:3] + torch.tensor([22.0, -22.0, 5.0])
    advantages = randn()
    advantages[::6] = 0
    advantages[1] = -1.0  # with a ratio beyond its bound
    coef = None if name == "full" else randn().clamp(min=0)
    log_ratios = -drift if name == "response" else None
    tokens = Tokens(advantages, randn().abs(), None if on_policy else logp + drift, ref, coef, log_ratios)
    ranges = None if config.modulation is None else ranges
    want_stats, want = reference.merge_with_loss(parts, 0.8, config, tokens, ranges)
    stats, got = triton_backend.merge_with_loss(parts, 0.8, config, tokens, ranges)
    for a, b in zip((*stats, *got), (*want_stats, *want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    sums = dict(zip(METRICS, want.sums.tolist(), strict=True))
    assert on_policy or (sums["clipped"] > 0 and (config.clip_ratio_c is None or sums["clipped_dual"] > 0))
    assert config.modulation is None or sums["boosted"] > 0


def loss_and_gradients(c, ranges, **options):
    out, *gradients = plain.run(c, FULL, ranges=ranges, temperature=0.7, chunk_tokens=5, **options)
    return [out.loss.detach(), *out.stats, out.advantages, *out.metrics.values(), *gradients]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gradient", ["eager", "recompute"])
def test_policy_loss_matches_autograd_and_itself(gradient, dtype, ranges):
    c = plain.case(tokens=13, dtype=dtype, temperature=0.7)
    want = plain.policy(c, FULL, 0.7, ranges)
    got = loss_and_gradients(c, ranges, backend="triton", gradient=gradient)
    if dtype == torch.bfloat16 or gradient == "eager":
        again = loss_and_gradients(c, ranges, backend="triton", gradient=gradient)
        assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    limit = 3e-6 if dtype == torch.float32 else 1e-5
    torch.testing.assert_close(got[0].double(), want.loss, rtol=limit, atol=limit)
    for grad, expected in zip(got[-2:], (want.hidden_grad, want.weight_grad), strict=True):
        if dtype == torch.bfloat16:
            assert (grad.double() - expected).norm() < 2**-7 * expected.norm()
        else:
            torch.testing.assert_close(grad.double(), expected, rtol=1e-5, atol=limit)
    assert (got[-1][c.vocab :] == 0).all()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_differentiable_statistics_take_any_upstream_gradient(backend):
    c = plain.case(tokens=11, temperature=1.3)
    keep = c.labels != plain.IGNORE
    hidden, weight = (t.clone().requires_grad_() for t in (c.hidden, c.weight))
    options = {"temperature": 1.3, "vocab_size": c.vocab, "backend": backend, "chunk_tokens": 4}
    logprobs, entropy, *_ = token_stats(hidden, weight, c.labels, **options, differentiable=True)
    (logprobs.sin().sum() + (entropy * logprobs.detach()).square().sum()).backward()
    x, w = (t.clone().requires_grad_() for t in (c.hidden[keep], c.weight[: c.vocab]))
    lp = (x @ w.t() / 1.3).log_softmax(-1)
    own, h = lp.gather(1, c.labels[keep][:, None])[:, 0], -(lp.exp() * lp).sum(-1)
    (own.sin().sum() + (h * own.detach()).square().sum()).backward()
    torch.testing.assert_close(logprobs[keep], own)
    torch.testing.assert_close(entropy[keep], h)
    torch.testing.assert_close(hidden.grad[keep], x.grad, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(weight.grad[: c.vocab], w.grad, rtol=1e-10, atol=1e-10)
    assert (hidden.grad[~keep] == 0).all() and (weight.grad[c.vocab :] == 0).all()
    for only in (0, 1):  # the other one has no gradient at all
        weight.grad = None
        token_stats(hidden, weight, c.labels, **options, differentiable=True)[only].sum().backward()
        assert weight.grad.isfinite().all() and weight.grad.norm() > 0


@pytest.mark.parametrize("operand", [torch.float32, torch.bfloat16])
def test_row_offsets_beyond_int32(operand, device):
    storage = torch.empty(2**31 + 64, device=device)  # what is not written takes no memory
    logits, labels = poisoned(37, 40, 3, 2.0)
    far = storage.as_strided((3, 40), (2**30, 1))
    far.copy_(logits)
    shard, ones = Shard(0, 40, 37), torch.ones(3)
    (want, _), (got, _) = (triton_backend.shard_statistics_(z, labels, shard, 1.0) for z in (logits, far))
    assert torch.equal(got, want)
    row = (want[0], want[1].log(), ones, ones, ones)
    want, got = (triton_backend.logits_gradient_(z, labels, shard, *row, 1.0, operand) for z in (logits, far))
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("config", "dtype", "gradient", "kl_cov"),
    [
        (FULL, torch.float32, "recompute", True),
        (FULL, torch.bfloat16, "eager", False),
        (CONFIGS["cispo"], torch.float32, "eager", False),
    ],
)
def test_self_check_passes_here_and_refuses_a_wrong_kernel(monkeypatch, device, config, dtype, gradient, kl_cov):
    weight = torch.randn(40, 8).to(dtype)
    options = {"gradient": gradient, "kl_cov": kl_cov, "temperature": 0.7, "tp_group": None}
    options["response_ratio"] = config.modulation is None
    check_backend(weight, config, backend="triton", **options)
    right = triton_backend.logits_gradient_
    monkeypatch.setattr(triton_backend, "logits_gradient_", lambda *a: right(*a).mul_(1.1))
    with pytest.raises(ValueError, match=r"kernels.backend: on this machine .* differ by .* of hidden.grad"):
        check_backend(weight, config, backend="triton", **options)
    if device.type == "cpu":
        check_backend(weight, config, backend="auto", **options)  # the reference


@pytest.mark.parametrize(("start", "n"), [(0, 2 * TILE_WORDS), (TILE_WORDS - 2, 5), (3 * TILE_WORDS + 1, 9000), (7, 1)])
def test_the_hash_of_weights(start, n):
    """Parts that begin and end within tiles, with words and products beyond 2^31."""
    words = torch.randint(-(2**31), 2**31, (n,), generator=torch.Generator().manual_seed(n)).int()
    found = tile_hash.tile_sums(words, start, TILE_WORDS, LANES)
    assert torch.equal(found.cpu(), tile_sums(words.cpu(), start))
