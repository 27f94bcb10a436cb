"""The policy head written out plainly: full logits, log_softmax, autograd, in float64. `run` is the real one."""

from types import SimpleNamespace

import torch

from dynamo_megatron.algorithm.modulation import ModulationRanges
from dynamo_megatron.config import ModulationConfig, PolicyLossConfig
from dynamo_megatron.kernels import policy_loss

IGNORE = -100
MODULATION = ModulationConfig(alpha=0.3, lambda_min=0.6, gamma=10.0, tau=0.5)
FULL = PolicyLossConfig(0.2, 0.28, 1.3, MODULATION, kl_coef=0.05, entropy_coef=0.02)
RANGES = ModulationRanges(0.3, 3.0, 0.2)


def case(tokens=23, vocab=37, rows=40, h=8, seed=0, dtype=torch.float64, scale=2.0, temperature=1.0, blocked=()):
    """Random inputs with padding rows that are poisoned and two rows that take no part and hold garbage.

    blocked: columns with a logit of -inf in float32 (in float64 the same probability, 0); no label is one of them.
    """
    g = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    c = SimpleNamespace(vocab=vocab)
    c.hidden = randn(tokens, h)
    c.weight = randn(rows, h) * scale / h**0.5
    allowed = torch.tensor([v for v in range(vocab) if v not in blocked])
    c.labels = allowed[torch.randint(0, len(allowed), (tokens,), generator=g)]
    if blocked:
        c.hidden[:, 0] = 2.0
        c.weight[list(blocked), 0] = -3e38
    c.hidden, c.weight = c.hidden.to(dtype), c.weight.to(dtype)
    logp = (c.hidden.double() @ c.weight[:vocab].double().t() / temperature).log_softmax(-1)
    logp = logp.gather(1, c.labels[:, None])[:, 0]
    c.old = logp + 0.5 * randn(tokens)
    c.ref = logp + 0.6 * randn(tokens)
    c.advantages = randn(tokens)
    c.advantages[::5] = 0.0
    c.weights = torch.rand(tokens, generator=g, dtype=torch.float64) / max(tokens, 1)
    c.weights[9::7] = 0.0
    c.weight[vocab:] = 1e4
    if tokens > 4:
        c.labels[[1, 4]] = IGNORE
        c.hidden[1] = c.advantages[1] = c.old[4] = c.weights[1] = c.ref[4] = torch.nan
    c.old_kl_coef = c.log_ratios = None
    c.cu_seqlens = torch.tensor([0, tokens // 3, tokens // 3, tokens])
    return c


def run(c, config, upstream=1.0, weight=None, **options):
    """policy_loss and backward; returns (output, hidden.grad, weight.grad)."""
    hidden = c.hidden.clone().requires_grad_()
    weight = c.weight.clone().requires_grad_() if weight is None else weight
    options = {"vocab_size": c.vocab, "ref_logprobs": c.ref if config.kl_coef else None, **options}
    out = policy_loss(
        hidden,
        weight,
        c.labels,
        c.advantages,
        c.old,
        c.weights,
        config,
        old_kl_coef=c.old_kl_coef,
        log_ratios=c.log_ratios,
        cu_seqlens=c.cu_seqlens,
        **options,
    )
    (upstream * out.loss).backward()
    return out, hidden.grad, weight.grad


def policy(c, config, temperature=1.0, ranges=None, upstream=1.0):
    """Loss, statistics and gradients. ranges: (H_min, H_max, largest entropy change) or None for those of the call."""
    keep = c.labels != IGNORE
    hidden = c.hidden.double()[keep].requires_grad_()
    weight = c.weight.double()[: c.vocab].clone().requires_grad_()
    old, ref, adv, w = (t.double()[keep] for t in (c.old, c.ref, c.advantages, c.weights))
    lp = (hidden @ weight.t() / temperature).log_softmax(-1)
    p = lp.exp()
    H = -(p * lp).sum(-1)
    logp = lp.gather(1, c.labels[keep][:, None])[:, 0]
    out = SimpleNamespace(
        logprobs=logp.detach(),
        entropy=H.detach(),
        expected=(p * p * (lp + H[:, None])).sum(-1).detach(),
        collision=(p * p).sum(-1).detach(),
    )
    if config.modulation is not None:
        m = config.modulation
        t = out.logprobs.exp() * (out.logprobs + out.entropy)
        expected = out.expected
        if m.expectation == "sequence_mean":
            seq = torch.bucketize(keep.nonzero()[:, 0], c.cu_seqlens, right=True)
            expected = torch.stack([t[seq == s].mean() for s in seq])
        r = (out.logprobs - old).exp()
        inside = ((adv > 0) & (r <= 1 + config.clip_ratio_high)) | ((adv < 0) & (r >= 1 - config.clip_ratio_low))
        xi = (inside * r * adv * (t - expected)).abs()
        low, high, top = ranges or (out.entropy.min(), out.entropy.max(), xi.max())
        x = (xi / (top + 1e-8)).clamp(0, 1)
        stab = m.lambda_min + (1 - m.lambda_min) / (1 + (m.gamma * (x - m.tau)).exp())
        boost = 1 + m.alpha * ((high - out.entropy) / (high - low + 1e-8)).clamp(0, 1)
        comp = torch.where(adv > 0, boost, 1.0)
        adv = adv * stab * comp
        out.damped, out.boosted = ((stab < 0.9) & (w != 0)).sum(), ((comp > 1.1) & (w != 0)).sum()
        out.ranges = (low, high, top)
    out.advantages = adv
    d = logp - old
    if c.log_ratios is not None:
        d = c.log_ratios[keep] + logp - logp.detach()
    r = d.exp()
    loss = torch.maximum(-adv * r, -adv * r.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high))
    if config.clip_ratio_c is not None:
        loss = torch.where(adv < 0, torch.minimum(loss, -adv * config.clip_ratio_c), loss)
    if config.kind == "cispo":
        loss = -adv * r.detach().clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high) * logp
    loss = loss - config.entropy_coef * H
    if config.kl_coef:
        loss = loss + config.kl_coef * ((ref - logp).exp() - (ref - logp) - 1)
    if c.old_kl_coef is not None:
        loss = loss + c.old_kl_coef[keep] * (((logp - old) ** 2 + 1e-6).sqrt() - 1e-3)
    out.loss = (w * loss).sum()
    (upstream * out.loss).backward()
    out.loss = out.loss.detach()
    out.hidden_grad = torch.zeros(c.hidden.shape, dtype=torch.float64)
    out.hidden_grad[keep] = hidden.grad
    out.weight_grad = torch.zeros(c.weight.shape, dtype=torch.float64)
    out.weight_grad[: c.vocab] = weight.grad
    return out


def logits_gradient(logits, labels, grad_logprobs, grad_entropy, temperature):
    """Of `grad_logprobs` times the labels' logprobs plus `grad_entropy` times the entropies, by the logits."""
    lp = (logits.double() / temperature).log_softmax(-1)
    p, lp = lp.exp(), lp.clamp(min=-1e300)
    h = -(p * lp).sum(-1, keepdim=True)
    one = torch.zeros_like(p).scatter_(1, labels[:, None], 1.0)
    return (grad_logprobs.double()[:, None] * (one - p) - grad_entropy.double()[:, None] * p * (lp + h)) / temperature
