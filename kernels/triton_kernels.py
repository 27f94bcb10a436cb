"""The policy head's Triton kernels: statistics of a chunk of logits, merge with the loss, gradient in place.

All compute in the logits' dtype (float32; float64 where the caller's tensors are). Row offsets are int64 and rows lie
on grid axis 0, the only one without a limit of 65535. No atomics: a rerun gives the same bits. Numbers that are fixed
for a run are constexpr, so that none is promoted to float64. Those that vary are not specialized: no new compilation
for another chunk size, and 1 stays a number with `.to`. The mathematics is that of `reference`.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
FLOOR = tl.constexpr(-1000.0)  # 2^FLOOR is 0 in float32, and FLOOR * 0 is not NaN as -inf * 0 is
MAX_LOG_RATIO, MAX_K3 = tl.constexpr(20.0), tl.constexpr(10.0)  # as in algorithm.losses
MAX_CHANGE_LOG_RATIO = tl.constexpr(80.0)  # as in algorithm.modulation
ABS_ROUNDING = tl.constexpr(1e-3)
EPS = tl.constexpr(1e-8)
DAMPED, BOOSTED = tl.constexpr(0.9), tl.constexpr(1.1)  # as in types
SUMS = tl.constexpr(16)  # columns of `sums`: those of types.METRICS, the rest unused


@triton.jit
def _finite(maximum):
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def _like(value: tl.constexpr, x):
    """A number in x's dtype: before Triton 3.9, tl.fma, tl.minimum and tl.maximum round a plain one to float32."""
    return tl.full([], value, x.dtype)


@triton.jit
def _clamp(x, low: tl.constexpr, high: tl.constexpr):
    """tl.clamp would lose a NaN."""
    x = tl.maximum(x, _like(low, x), propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, _like(high, x), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _accumulate(z, m, s, u, s2, u2, TO_LOG2: tl.constexpr):
    """Adds a block of logits to the running sums of e = 2^d and d e, e^2, d e^2, with d = (z - m) TO_LOG2."""
    largest = tl.maximum(m, tl.max(z, 0))
    if largest > m:  # the same for the whole block, and rare after the first ones: rescale only then
        a = tl.exp2((m - largest) * TO_LOG2)
        d = tl.maximum((m - largest) * TO_LOG2, FLOOR)
        u = a * tl.fma(d, s, u)
        s = a * s
        u2 = a * a * tl.fma(d, s2, u2)
        s2 = a * a * s2
        m = largest
    d = (z - _finite(m)) * TO_LOG2  # subtracting first is exact where logits are large and close
    e = tl.exp2(d)
    de = tl.maximum(d, FLOOR) * e
    return m, s + e, u + de, tl.fma(e, e, s2), tl.fma(de, e, u2)


@triton.jit(do_not_specialize=("n", "columns", "start"))
def statistics_kernel(
    logits, labels, part, n, rows, columns, start, row_stride, TEMPERATURE: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per row reads it once; part[6, n] = (m, s, u, s2, u2, z_y) of `reference.shard_statistics_`.

    logits [n, rows] float; only the first `columns` are in the vocabulary, `start` is the first one's global index.
    """
    TO_LOG2: tl.constexpr = LOG2E / TEMPERATURE
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    dtype = logits.dtype.element_ty
    m = tl.full([], float("-inf"), dtype)
    s = tl.zeros((BLOCK,), dtype)
    u = tl.zeros((BLOCK,), dtype)
    s2 = tl.zeros((BLOCK,), dtype)
    u2 = tl.zeros((BLOCK,), dtype)
    full = columns // BLOCK
    for i in range(0, full):
        z = tl.load(logits + i * BLOCK + tl.arange(0, BLOCK))
        m, s, u, s2, u2 = _accumulate(z, m, s, u, s2, u2, TO_LOG2)
    if full * BLOCK < columns:
        column = full * BLOCK + tl.arange(0, BLOCK)
        # Masking by `rows`, a multiple of 16, keeps the loads 128 bits wide where `columns` is odd.
        z = tl.load(logits + column, mask=column < rows, other=0.0)
        z = tl.where(column < columns, z, float("-inf"))
        m, s, u, s2, u2 = _accumulate(z, m, s, u, s2, u2, TO_LOG2)
    label = tl.load(labels + row) - start
    owned = (label >= 0) & (label < columns)
    target = tl.load(logits + tl.where(owned, label, 0), mask=owned, other=0.0)
    n = n.to(tl.int64)
    part += row
    tl.store(part, m)
    tl.store(part + n, tl.sum(s, 0))
    tl.store(part + 2 * n, tl.sum(u, 0) * LN2)
    tl.store(part + 3 * n, tl.sum(s2, 0))
    tl.store(part + 4 * n, tl.sum(u2, 0) * LN2)
    tl.store(part + 5 * n, target)


@triton.jit(do_not_specialize=("columns", "start"))
def gradient_kernel(
    logits,
    gradient,
    labels,
    maximum,
    log_sum,
    entropy,
    grad_logprobs,
    grad_entropy,
    rows,
    columns,
    start,
    row_stride,
    gradient_stride,
    TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dL/dz = [g_l (1[j = y] - p_j) - g_H p_j (log p_j + H)] / T over the logits; padding columns become 0.

    `gradient` is the storage of `logits`, of the same dtype or of half its size (float32 -> bfloat16). With half the
    size, block i is written to the bytes of columns i BLOCK / 2 to (i + 1) BLOCK / 2. These have been read if every
    load of blocks 0 to i is done before the first store of block i. One program goes over a row in order, with a
    barrier between load and store; loads must not be pipelined across it (num_stages 1). grad_entropy None: 0.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    gradient += row * gradient_stride
    g = tl.load(grad_logprobs + row) / TEMPERATURE
    top = tl.load(maximum + row)
    offset = tl.load(log_sum + row) * LOG2E
    label = tl.load(labels + row) - start
    dead = g == 0.0
    if grad_entropy is not None:
        g_h = tl.load(grad_entropy + row) / TEMPERATURE
        h = tl.load(entropy + row)
        dead = dead & (g_h == 0.0)
    for first in range(0, rows, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < rows
        if dead:  # a clipped token costs no read
            tl.store(gradient + column, tl.zeros((BLOCK,), gradient.dtype.element_ty), mask=inside)
        else:
            z = tl.load(logits + column, mask=inside, other=0.0)
            log2_p = tl.fma(z - top, _like(LOG2E / TEMPERATURE, top), -offset)
            p = tl.exp2(log2_p)
            pull = g
            if grad_entropy is not None:
                pull = tl.fma(g_h, tl.maximum(log2_p, FLOOR) * LN2 + h, g)
            d = -pull * p
            d = tl.where(column == label, d + g, d)
            d = tl.where(column < columns, d, 0.0)  # also where g is NaN
            if gradient.dtype.element_ty != logits.dtype.element_ty:
                tl.debug_barrier()
            tl.store(gradient + column, d.to(gradient.dtype.element_ty), mask=inside)


@triton.jit
def _modulate(
    advantage, logp, h, old, expected, h_min, h_max, change_max, LOW: tl.constexpr, HIGH: tl.constexpr,
    ALPHA: tl.constexpr, LAMBDA_MIN: tl.constexpr, GAMMA: tl.constexpr, TAU: tl.constexpr,
):  # fmt: skip
    """(advantage, beta_comp, beta_stab) of `algorithm.modulation`."""
    ratio = tl.exp(tl.minimum(logp - old, MAX_CHANGE_LOG_RATIO, propagate_nan=tl.PropagateNan.ALL))
    moves = ((advantage > 0) & (ratio <= 1 + HIGH)) | ((advantage < 0) & (ratio >= 1 - LOW))
    change = tl.where(moves, tl.abs(ratio * advantage * (tl.exp(logp) * (logp + h) - expected)), 0.0)
    x = _clamp(change / (change_max + EPS), 0.0, 1.0)
    stab = LAMBDA_MIN + (1 - LAMBDA_MIN) / (1 + tl.exp(GAMMA * (x - TAU)))
    certainty = _clamp((h_max - h) / (h_max - h_min + EPS), 0.0, 1.0)
    comp = tl.where(advantage > 0, 1 + ALPHA * certainty, 1.0)
    return advantage * comp * stab, comp, stab


@triton.jit
def _policy_loss(
    logp, drift, advantage, LOW: tl.constexpr, HIGH: tl.constexpr, CEILING: tl.constexpr, KIND: tl.constexpr
):
    """(loss, d loss / d logp, ratio, clipped, clipped_dual) of `algorithm.losses.policy_loss_terms`."""
    ratio = tl.exp(_clamp(drift, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    held = _clamp(ratio, 1 - LOW, 1 + HIGH)
    bounded = -advantage * held
    if KIND == "cispo":
        loss, slope = bounded * logp, bounded
        clipped = (held != ratio) & (advantage != 0)
        dual = tl.zeros_like(clipped)
    else:
        tl.static_assert(KIND == "clip")
        plain = -advantage * ratio
        clipped = bounded > plain
        loss = tl.where(clipped, bounded, plain)
        dual = tl.zeros_like(clipped)
        if CEILING is not None:
            dual = (advantage < 0) & (loss > -advantage * CEILING)
            loss = tl.where(dual, -advantage * CEILING, loss)
        # Each comparison is false for a NaN, which therefore reaches the gradient.
        still = clipped | dual | (tl.abs(drift) > MAX_LOG_RATIO)
        slope = tl.where(still, 0.0, plain)
        clipped = (clipped | ((drift > MAX_LOG_RATIO) & (advantage != 0))) & (dual == 0)
    return loss, slope, ratio, clipped, dual


@triton.jit
def _kl(logp, ref, KIND: tl.constexpr):
    """(estimate, its derivative by logp) of `algorithm.losses.kl_estimate`."""
    d = logp - ref
    if KIND == "k1":
        estimate, slope = d, 1.0 + 0.0 * d
    elif KIND == "abs":
        estimate, slope = tl.abs(d), tl.where(d > 0, 1.0, tl.where(d < 0, -1.0, 0.0 * d))
    elif KIND == "k2":
        estimate, slope = 0.5 * d * d, d
    else:
        tl.static_assert(KIND == "k3")
        inverse = _clamp(-d, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        grown = tl.exp(inverse)
        full = grown - inverse - 1
        estimate = _clamp(full, -MAX_K3, MAX_K3)
        slope = tl.where((tl.abs(d) > MAX_LOG_RATIO) | (tl.abs(full) > MAX_K3), 0.0, 1 - grown)
    return estimate, slope


@triton.jit(do_not_specialize=("n", "out_stride", "shards", "h_min", "h_max", "change_max"))
def merge_kernel(
    parts,
    out,
    n,
    out_stride,
    shards,
    advantages,
    weights,
    old_logprobs,
    ref_logprobs,
    old_kl_coef,
    log_ratios,
    h_min,
    h_max,
    change_max,
    sums,
    TEMPERATURE: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    CEILING: tl.constexpr,
    KL_COEF: tl.constexpr,
    KL_KIND: tl.constexpr,
    ENTROPY_COEF: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LAMBDA_MIN: tl.constexpr,
    GAMMA: tl.constexpr,
    TAU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Per token: statistics, rows 0 to 5 of `out`, from parts[shards, 6, n]; then modulation, loss and gradients in the
    same launch.

    Rows 6 to 8: d loss / d logp and d loss / d entropy times the token's weight, and the modulated advantage. A row of
    `out` has out_stride elements, of which this launch fills n. sums[programs, SUMS]: this program's sums in the order
    of types.METRICS. advantages None: statistics alone; h_min, h_max, change_max (of ModulationRanges) None: no
    modulation; old_logprobs None: ratio 1; without ref_logprobs or old_kl_coef none of their terms; log_ratios None:
    each token's own, logp - old.
    """
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = token < n
    token = token.to(tl.int64)
    n = n.to(tl.int64)
    part = parts + token
    m = tl.load(part, mask=live, other=0.0)
    for i in range(1, shards):
        m = tl.maximum(m, tl.load(part + i * 6 * n, mask=live, other=0.0))
    m = _finite(m)
    s = tl.zeros_like(m)
    u = tl.zeros_like(m)
    s2 = tl.zeros_like(m)
    u2 = tl.zeros_like(m)
    target = tl.zeros_like(m)
    for _ in range(0, shards):
        d = tl.maximum((tl.load(part, mask=live, other=0.0) - m) / TEMPERATURE, FLOOR)
        a = tl.exp2(d * LOG2E)
        shard_s = tl.load(part + n, mask=live, other=1.0)
        shard_s2 = tl.load(part + 3 * n, mask=live, other=1.0)
        s += a * shard_s
        u += a * tl.fma(d, shard_s, tl.load(part + 2 * n, mask=live, other=0.0))
        s2 += a * a * shard_s2
        u2 += a * a * tl.fma(d, shard_s2, tl.load(part + 4 * n, mask=live, other=0.0))
        target += tl.load(part + 5 * n, mask=live, other=0.0)
        part += 6 * n
    log_sum = tl.log(s)
    logp = (target - m) / TEMPERATURE - log_sum
    h = log_sum - u / s
    collision = s2 / (s * s)
    expected = tl.fma(h, collision, (u2 - s2 * log_sum) / (s * s))
    out += token
    out_stride = out_stride.to(tl.int64)
    tl.store(out, m, mask=live)
    tl.store(out + out_stride, log_sum, mask=live)
    tl.store(out + 2 * out_stride, logp, mask=live)
    tl.store(out + 3 * out_stride, h, mask=live)
    tl.store(out + 4 * out_stride, expected, mask=live)
    tl.store(out + 5 * out_stride, collision, mask=live)
    if advantages is not None:
        advantage = tl.load(advantages + token, mask=live, other=0.0)
        weight = tl.load(weights + token, mask=live, other=0.0)
        old = logp
        if old_logprobs is not None:
            old = tl.load(old_logprobs + token, mask=live, other=0.0)
        comp = tl.full((BLOCK,), 1.0, m.dtype)
        stab = comp
        if h_min is not None:
            low, high, most = tl.load(h_min), tl.load(h_max), tl.load(change_max)
            advantage, comp, stab = _modulate(
                advantage, logp, h, old, expected, low, high, most, LOW, HIGH, ALPHA, LAMBDA_MIN, GAMMA, TAU
            )
        own = logp - old
        drift = own
        if log_ratios is not None:
            drift = tl.load(log_ratios + token, mask=live, other=0.0)
        loss, slope, ratio, clipped, dual = _policy_loss(logp, drift, advantage, LOW, HIGH, CEILING, KIND)
        kl = tl.zeros_like(m)
        if ref_logprobs is not None:
            kl, kl_slope = _kl(logp, tl.load(ref_logprobs + token, mask=live, other=0.0), KL_KIND)
            if KL_COEF != 0:
                loss += KL_COEF * kl
                slope += KL_COEF * kl_slope
        if ENTROPY_COEF != 0:
            loss -= ENTROPY_COEF * h
        if old_kl_coef is not None:
            coef = tl.load(old_kl_coef + token, mask=live, other=0.0)
            size = tl.sqrt(tl.fma(own, own, _like(ABS_ROUNDING * ABS_ROUNDING, own)))
            loss += coef * (size - ABS_ROUNDING)
            slope += coef * own / size
        tl.store(out + 6 * out_stride, weight * slope, mask=live)
        tl.store(out + 7 * out_stride, -ENTROPY_COEF * weight, mask=live)
        tl.store(out + 8 * out_stride, advantage, mask=live)
        sums += tl.program_id(0).to(tl.int64) * SUMS
        tl.store(sums, tl.sum(tl.where(live, weight * loss, 0.0), 0))
        tl.store(sums + 1, tl.sum(tl.where(live, h, 0.0), 0))
        tl.store(sums + 2, tl.sum(tl.where(live, kl, 0.0), 0))
        tl.store(sums + 3, tl.sum(tl.where(live, kl * kl, 0.0), 0))
        tl.store(sums + 4, tl.sum(tl.where(live, ratio, 0.0), 0))
        tl.store(sums + 5, tl.sum(tl.where(live, ratio * ratio, 0.0), 0))
        trained = live & (weight != 0)
        tl.store(sums + 6, tl.sum((clipped & trained).to(m.dtype), 0))
        tl.store(sums + 7, tl.sum((dual & trained).to(m.dtype), 0))
        tl.store(sums + 8, tl.sum(((stab < DAMPED) & trained).to(m.dtype), 0))
        tl.store(sums + 9, tl.sum(((comp > BOOSTED) & trained).to(m.dtype), 0))
