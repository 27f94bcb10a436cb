import collections
from dataclasses import replace

import plain_head as plain
import pytest
import torch
from plain_head import FULL, MODULATION, RANGES, run
from torch.utils._python_dispatch import TorchDispatchMode

from dynamo_megatron.config import PolicyLossConfig
from dynamo_megatron.kernels import policy_loss, token_stats, triton_backend

PLAIN = PolicyLossConfig()
SEQUENCE_MEAN = replace(FULL, modulation=replace(MODULATION, expectation="sequence_mean", scope="micro_batch"))


def check(c, config, tol, *, temperature=1.0, ranges=None, upstream=1.0, **kw):
    want = plain.policy(c, config, temperature, ranges, upstream)
    out, dx, dw = run(c, config, upstream, temperature=temperature, ranges=ranges, **kw)
    keep = c.labels != plain.IGNORE

    def close(got, expected):
        torch.testing.assert_close(got.double(), expected, rtol=tol, atol=tol)

    close(out.loss, want.loss)
    assert out.loss._base is None  # Megatron's pipelines refuse a view, on GPUs alone
    for name, expected in zip(
        out.stats._fields, (want.logprobs, want.entropy, want.expected, want.collision), strict=True
    ):
        got = getattr(out.stats, name)
        close(got[keep], expected)
        assert (got[~keep] == 0).all() and not got.requires_grad
    close(out.advantages[keep], want.advantages)
    assert (out.advantages[~keep] == 0).all()
    close(dx, want.hidden_grad)
    close(dw, want.weight_grad)
    assert (dw[c.vocab :] == 0).all() and (dx[~keep] == 0).all()
    assert dx.dtype == c.hidden.dtype and dw.dtype == c.weight.dtype
    return out, want


@pytest.mark.parametrize("chunk", [1, 7, None])
@pytest.mark.parametrize("gradient", ["eager", "recompute"])
@pytest.mark.parametrize(
    ("config", "ranges"),
    [(PLAIN, None), (FULL, RANGES), (SEQUENCE_MEAN, RANGES)],
    ids=["plain", "full", "sequence_mean"],
)
def test_matches_autograd(config, ranges, gradient, chunk, backend):
    options = {"ranges": ranges, "gradient": gradient, "chunk_tokens": chunk, "backend": backend}
    for temperature in (0.7, 1.0, 1.3):
        check(plain.case(temperature=temperature), config, 1e-11, temperature=temperature, **options)


@pytest.mark.parametrize("chunk", [7, None])
@pytest.mark.parametrize("gradient", ["eager", "recompute"])
def test_a_coefficient_per_token_holds_it_to_the_old_policy(gradient, chunk, backend):
    c = plain.case()
    c.old_kl_coef = torch.linspace(-3, 2, len(c.labels)).double().clamp(min=0)
    c.old_kl_coef[1] = torch.nan  # a row that takes no part
    check(c, FULL, 1e-11, ranges=RANGES, gradient=gradient, chunk_tokens=chunk, backend=backend)


CISPO = PolicyLossConfig(0.3, 0.4, None, kl_coef=0.05, entropy_coef=0.02, kind="cispo")
UNMODULATED = replace(FULL, modulation=None)


@pytest.mark.parametrize("gradient", ["eager", "recompute"])
@pytest.mark.parametrize("of_responses", [False, True])
@pytest.mark.parametrize("config", [CISPO, UNMODULATED], ids=["cispo", "clip"])
def test_cispo_and_the_ratios_of_responses(config, of_responses, gradient, backend):
    c = plain.case()
    if of_responses:
        c.log_ratios = torch.linspace(-0.8, 0.9, len(c.labels), dtype=torch.float64)
        c.log_ratios[1] = torch.nan  # a row that takes no part
    out, want = check(c, config, 1e-11, gradient=gradient, chunk_tokens=7, backend=backend)
    keep = c.labels != plain.IGNORE
    log_ratios = c.log_ratios[keep] if of_responses else want.logprobs - c.old[keep]
    assert out.metrics["ratio"].item() == pytest.approx(log_ratios.exp().sum().item(), rel=1e-6)
    outside = (log_ratios.exp() < 1 - config.clip_ratio_low) | (log_ratios.exp() > 1 + config.clip_ratio_high)
    if config is CISPO:
        assert out.metrics["clipped"] == (outside & (want.advantages != 0) & (c.weights[keep] != 0)).sum() > 3


@pytest.mark.parametrize("config", [FULL, SEQUENCE_MEAN], ids=["exact", "sequence_mean"])
def test_ranges_of_the_call(config, backend):
    out, want = check(plain.case(), config, 1e-11, gradient="recompute", chunk_tokens=7, upstream=1.7, backend=backend)
    assert want.damped > 0 and want.boosted > 0  # the case reaches what it checks
    assert out.metrics["damped"] == want.damped and out.metrics["boosted"] == want.boosted


def test_metrics_are_sums_over_labelled_tokens(backend):
    c = plain.case()
    keep = c.labels != plain.IGNORE
    out, want = check(c, FULL, 1e-11, ranges=RANGES, backend=backend)
    ratio = (want.logprobs - c.old[keep]).exp()
    trained = c.weights[keep] != 0
    dual = ((want.advantages < 0) & (ratio > 1.3) & trained).sum()
    outside = ((want.advantages > 0) & (ratio > 1.28)) | ((want.advantages < 0) & (ratio < 0.8))
    clipped = (outside & trained).sum()
    assert outside.sum() > clipped > 0 and dual > 0
    kl = (c.ref[keep] - want.logprobs).exp() - (c.ref[keep] - want.logprobs) - 1
    expected = {"tokens": torch.tensor(21.0), "loss": want.loss, "entropy": want.entropy.sum()}
    expected |= {"kl": kl.sum(), "kl_square": kl.square().sum(), "damped": want.damped, "boosted": want.boosted}
    expected |= {"ratio": ratio.sum(), "ratio_square": ratio.square().sum(), "clipped": clipped, "clipped_dual": dual}
    assert out.metrics.keys() == expected.keys()
    for name, value in expected.items():
        assert out.metrics[name].dtype == torch.float32 and out.metrics[name].shape == ()
        assert out.metrics[name].item() == pytest.approx(value.item(), rel=1e-6), name


@pytest.mark.parametrize("gradient", ["eager", "recompute"])
@pytest.mark.parametrize("config", [PLAIN, FULL, SEQUENCE_MEAN], ids=["plain", "full", "sequence_mean"])
def test_no_labelled_row(gradient, config, backend):
    c = plain.case(tokens=9)
    c.labels[:] = plain.IGNORE
    c.hidden[:] = torch.nan
    out, dx, dw = run(c, config, ranges=None if gradient == "recompute" else RANGES, gradient=gradient, backend=backend)
    assert out.loss == 0 and (dx == 0).all() and (dw == 0).all() and out.metrics["tokens"] == 0
    assert all((value == 0).all() for value in (*out.stats, out.advantages))


@pytest.mark.parametrize("gradient", ["eager", "recompute"])
def test_minus_infinite_logits(gradient, backend):
    c = plain.case(dtype=torch.float32, blocked=range(3, 37, 2))
    assert (c.hidden[0] @ c.weight[3]).item() == -torch.inf
    check(c, FULL, 1e-5, ranges=RANGES, gradient=gradient, backend=backend)


def test_large_logits_keep_their_entropy(backend):
    c = plain.case(dtype=torch.float32, scale=1.0)
    c.hidden[:, 0] = 1.0
    c.weight[:, 0] = 3000.0  # the same for every column: no probability changes
    want = plain.policy(c, PLAIN)
    got = token_stats(c.hidden, c.weight, c.labels, vocab_size=c.vocab, backend=backend)
    keep = c.labels != plain.IGNORE
    logits = (c.hidden[keep] @ c.weight.t())[:, : c.vocab].double()  # the GEMM's own rounding is not the head's
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    assert (entropy - want.entropy).abs().max() < 1e-2
    assert (got.entropy[keep].double() - entropy).abs().max() < 3e-6


def test_nan_is_not_hidden(backend):
    c = plain.case()
    c.hidden[6] = torch.nan
    c.hidden[7, 0] = torch.inf
    out, dx, _ = run(c, FULL, ranges=RANGES, backend=backend)
    assert out.loss.isnan()
    assert out.stats.logprobs.isnan().nonzero()[:, 0].tolist() == [6, 7]
    assert dx.isnan().any(1).nonzero()[:, 0].tolist() == [6, 7]


def test_eager_gradients_are_nan_for_another_upstream_gradient(backend):
    _, dx, dw = run(plain.case(), FULL, ranges=RANGES, upstream=1.7, backend=backend)
    assert dx.isnan().sum() == dw.isnan().sum() == 1


def test_gradients_are_contiguous_whatever_the_strides():
    c = plain.case()
    leaves = [t.t().contiguous().t().requires_grad_() for t in (c.hidden, c.weight)]
    out = policy_loss(*leaves, c.labels, c.advantages, c.old, c.weights, PLAIN, vocab_size=c.vocab)
    want = plain.policy(c, PLAIN)
    for got, expected in zip(torch.autograd.grad(out.loss, leaves), (want.hidden_grad, want.weight_grad), strict=True):
        assert got.is_contiguous()
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gradient", ["eager", "recompute"])
def test_main_grad_accumulates(gradient, main_dtype, backend):
    c = plain.case(dtype=torch.bfloat16)
    want = plain.policy(c, FULL, 1.0, RANGES)
    weight = torch.nn.Parameter(c.weight.clone())
    weight.main_grad = torch.ones(weight.shape, dtype=main_dtype)
    hooked = []
    accumulator = weight.expand_as(weight).grad_fn.next_functions[0][0]  # how Megatron's DDP hangs its hook
    accumulator.register_hook(lambda *_: hooked.append(weight.grad.clone()))
    for _ in range(2):
        weight.grad, weight.grad_added_to_main_grad = None, False
        run(c, FULL, weight=weight, ranges=RANGES, gradient=gradient, backend=backend)
        assert weight.grad_added_to_main_grad
    assert len(hooked) == 2 and all((grad == 0).all() and grad.shape == weight.shape for grad in hooked)
    # Triton's gradient of the logits is in bfloat16, as the operands are.
    tol = 1e-6 if main_dtype == torch.float32 and backend == "torch" else 2**-7
    torch.testing.assert_close(weight.main_grad.double(), 1 + 2 * want.weight_grad, rtol=tol, atol=tol)
    assert (weight.main_grad[c.vocab :] == 1).all()


@pytest.mark.parametrize("gradient", ["eager", "recompute"])
def test_a_frozen_weight_has_no_gradient(backend, gradient):
    c = plain.case()
    options = {"ranges": RANGES, "gradient": gradient, "backend": backend}
    want, frozen = run(c, FULL, **options)[1], torch.nn.Parameter(c.weight.clone(), requires_grad=False)
    got = run(c, FULL, weight=frozen, **options)[1]
    assert torch.equal(got, want) and frozen.grad is None and not hasattr(frozen, "grad_added_to_main_grad")


def test_no_grad_leaves_everything_alone():
    c = plain.case()
    weight = torch.nn.Parameter(c.weight)
    weight.main_grad = torch.zeros_like(c.weight)
    with torch.no_grad():
        out = policy_loss(c.hidden, weight, c.labels, c.advantages, c.old, c.weights, PLAIN, vocab_size=c.vocab)
    assert not out.loss.requires_grad and (weight.main_grad == 0).all()
    torch.testing.assert_close(out.loss, plain.policy(c, PLAIN).loss)


def test_token_stats_equals_the_loss_pass(backend):
    c = plain.case()
    out, _, _ = run(c, FULL, ranges=RANGES, temperature=0.7, backend=backend)
    stats = token_stats(c.hidden, c.weight, c.labels, temperature=0.7, vocab_size=c.vocab, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(stats, out.stats, strict=True))


@pytest.mark.parametrize("gradient", ["eager", "recompute"])
def test_rows_without_a_label_change_no_bit_of_the_others(gradient, backend):
    """Without such rows the head works on views of its inputs, whatever their strides."""
    whole, few = plain.case(), plain.case()
    keep = whole.labels != plain.IGNORE
    for name in ("hidden", "labels", "advantages", "old", "weights", "ref"):
        values = getattr(few, name)[keep]
        setattr(few, name, values if name == "hidden" else torch.stack([values, values], 1)[:, 0])
    options = {"ranges": RANGES if gradient == "eager" else None, "gradient": gradient, "backend": backend}
    (one, dx, dw), (other, few_dx, few_dw) = (run(c, FULL, chunk_tokens=7, **options) for c in (whole, few))
    per_token = zip([*one.stats, one.advantages, dx], [*other.stats, other.advantages, few_dx], strict=True)
    assert all(torch.equal(a[keep], b) for a, b in per_token)
    assert torch.equal(dw, few_dw) and one.metrics == other.metrics and one.loss == other.loss


def test_a_chunk_costs_few_launches_and_no_read_by_the_host(device, monkeypatch):
    """What a second chunk adds, with kernels that only count; the operands' copies in float32 are a CPU's alone."""
    ran = collections.Counter()
    kernel = collections.defaultdict(lambda: lambda *arguments, **options: ran.update(["kernel"]))  # by its grid

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func._schema.name.removeprefix("aten::")
            if not func.is_view and not name.startswith(("empty", "new_empty")):
                ran[name] += 1
            return func(*args, **(kwargs or {}))

    for name in ("statistics_kernel", "merge_kernel", "gradient_kernel"):
        monkeypatch.setattr(triton_backend, name, kernel)
    monkeypatch.setattr(triton_backend, "INTERPRETED", True)
    found, config = [], PolicyLossConfig(modulation=MODULATION)
    for tokens in (4, 8):
        hidden, weight = torch.randn(tokens, 8).bfloat16(), torch.randn(40, 8).bfloat16().requires_grad_()
        weight.main_grad, values = torch.zeros(40, 8), torch.ones(tokens)
        ranges = type(RANGES)(*torch.tensor(RANGES))
        ran.clear()
        options = {"ranges": ranges, "backend": "triton", "chunk_tokens": 4}
        with Operators():
            policy_loss(hidden, weight, torch.arange(tokens), values, values, values, config, **options)
        found.append(collections.Counter(ran))
    weights_gradient = {"_to_copy": 3, "addmm_": 1} if device.type == "cpu" else {"addmm": 1}
    assert found[1] - found[0] == {"kernel": 3, "mm": 2, "sum": 1, "add": 1, "copy_": 1, **weights_gradient}
