"""`dynamo-megatron verify RUN`: the checks of a finished step, and their table.

The step is proved again by something that is not the trainer: advantages, weights and loss by numpy (`reference`),
logprobs and gradient by transformers (`model`), the optimizer's step from the moments in the checkpoints.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from dynamo_megatron.evaluation.results import markdown
from dynamo_megatron.models.mapping import huggingface_shapes
from dynamo_megatron.runtime.plain_text import show
from dynamo_megatron.types import RolloutBatch
from dynamo_megatron.verification.model import Gradient, ReferenceModel, Tensors
from dynamo_megatron.verification.record import Saved, StepRecord, read_step
from dynamo_megatron.verification.reference import learning_rate, not_covered, token_losses

# What counts as rounding, by the dtype that the policy computes in: relative errors of sums and gradients; and mean
# differences of logprobs, nats (the servers have kernels of their own, and may have quantised weights).
ROUNDING = {"float32": 1e-3, "bfloat16": 0.1}
LOGPROB_ROUNDING = {"float32": 1e-3, "bfloat16": 0.05, "fp8": 0.3}
MOMENTS_ROUNDING = 1e-4  # of second moments, since the gradient is recovered from a difference
HALF_ULP = 2.0**-24  # of float32, relative
NAMED = 3  # rollouts that a line names


class Check(NamedTuple):
    """A row of the table. `differs`: what differs first, "" if it holds; without `found` it was not made, and why."""

    what: str
    expected: str
    found: str
    differs: str


def not_made(what: str, why: str) -> Check:
    return Check(what, "", "", why)


def verify_step(run: Path, step: int | None) -> tuple[str, int]:
    """(the table of the checks of `step`, None: of the last one; the exit code, 1 where something differs). Raises
    InputError, one line, where there is no such step."""
    record = read_step(run, step)
    made, left = [], []
    for check in _checks(record):
        (made if check.found else left).append(check)
    rows = [Check._fields, *(check._replace(differs=check.differs or "-") for check in made)]
    lines = [f"# Step {record.step} of {run}", markdown(rows)]
    lines += [f"not checked: {check.what}: {check.differs}" for check in left]
    wrong = sum(bool(check.differs) for check in made)
    said = f"{wrong} of {len(made)} checks differ" if wrong else f"all {len(made)} checks hold"
    lines.append(said + "; some checks could not be made" * bool(left))
    return "\n\n".join(lines), int(wrong > 0)


def _numbers(what: str, expected: float, found: float, bound: float, hint: str = "") -> Check:
    """Two numbers that may differ by `bound`."""
    ratio = f"{found / expected:.4g} times what is expected" if expected else "0 is expected"
    return Check(what, f"{expected:.6g}", f"{found:.6g}", "" if abs(found - expected) <= bound else hint or ratio)


def _tensors(what: str, expected: str, hold: Mapping[str, bool]) -> Check:
    wrong = [name for name, holds in hold.items() if not holds]
    first = f"{len(wrong)} tensors, the first {wrong[0]}" if wrong else ""
    return Check(what, expected, f"{len(hold)} tensors", first)


def _checks(record: StepRecord) -> Iterator[Check]:
    config, metrics, gradient = record.config, record.metrics, None
    before, after = record.saved(record.step - 1), record.saved(record.step)
    if config.algorithm.sequential is None:
        yield _numbers("response tokens", int(record.rollouts.response_offsets[-1]), metrics["policy/tokens"], 0)
    else:  # its rule trains on some of the rollouts that the record has
        yield not_made("response tokens", "the reference does not cover algorithm.sequential")
    key = not_covered(config) if record.rollouts.step_rewards is None else "process rewards"
    if isinstance(before, str) or key is not None:
        why = before if key is None else f"the reference does not cover {key}"
        yield not_made("advantages, logprobs, loss, gradient", why)
    else:
        gradient = yield from _computed(record, before)
    if isinstance(before, str) or isinstance(after, str):
        yield not_made("optimizer and weights", before if isinstance(before, str) else after)
    elif config.algorithm.loss.mini_batches > 1:
        yield not_made("optimizer and weights", "the checkpoints have the sum of several updates")
    else:
        yield from _updated(record, before, after, gradient)


def _computed(record: StepRecord, before: Saved) -> Generator[Check, None, Gradient]:
    """What follows from the rollouts and the weights before the step."""
    config, rollouts, metrics, by_version = record.config, record.rollouts, record.metrics, {}
    show(f"computing {len(rollouts.rewards)} rollouts in float64 with transformers")
    model = ReferenceModel(config.model.path, config.rollout.temperature)
    # The weights that tokens say they are from, and those before them, which a stale server would have.
    versions = {record.step - 2, *np.unique(rollouts.weight_versions).tolist()} - {record.step - 1}
    for version in sorted(v for v in versions if v >= 0):
        if not isinstance(saved := record.saved(version), str):
            model.load(saved.weight)
            by_version[version] = model.statistics(rollouts).logprobs
    model.load(before.weight)
    seen = model.statistics(rollouts)
    loss = token_losses(rollouts, config, seen, record.history(before))
    yield from _servers(record, {**by_version, record.step - 1: seen.logprobs})
    rounding = ROUNDING[config.model.dtype]
    yield _numbers("loss", loss.loss.sum(), metrics["policy/loss"], rounding * np.abs(loss.loss).sum())
    gradient = model.gradient(rollouts, loss)
    yield _numbers("gradient norm", gradient.norm, metrics["policy/grad_norm"], rounding * gradient.norm)
    return gradient


def _servers(record: StepRecord, by_version: Mapping[int, np.ndarray]) -> Iterator[Check]:
    """Each server's logprobs against those of the weights that its tokens name, and of earlier ones."""
    rollouts, config = record.rollouts, record.config
    servers, versions = np.repeat(np.array(rollouts.servers), rollouts.response_lengths), rollouts.weight_versions
    rounding = LOGPROB_ROUNDING[config.rollout.quantization or config.model.dtype]
    for server, version in sorted(set(zip(servers.tolist(), versions.tolist(), strict=True))):
        what, here = f"logprobs of {server or 'the server'}", (servers == server) & (versions == version)
        if version not in by_version:
            yield not_made(what, f"no checkpoint of step {version}, whose weights they name")
            continue
        gaps = {v: np.abs(p - rollouts.engine_logprobs)[here] for v, p in by_version.items() if v <= version}
        own, best = gaps[version].mean(), min(gaps, key=lambda v: gaps[v].mean())
        slot = np.flatnonzero(here)[gaps[version].argmax()]
        farthest = rollouts.rollout_ids[np.searchsorted(rollouts.response_offsets, slot, side="right") - 1]
        differs = f"most in {farthest}, {gaps[version].max():.2g}" if own > rounding else ""
        if gaps[best].mean() < own / 2:
            differs = f"stale: {gaps[best].mean():.2g} from the weights of step {best}; most in {farthest}"
        yield Check(what, f"weights of step {version}", f"{own:.2g} nats from them", differs)


def _updated(record: StepRecord, before: Saved, after: Saved, expected: Gradient | None) -> Iterator[Check]:
    """What follows from the states of the optimizer."""
    config, metrics, names = record.config, record.metrics, list(huggingface_shapes(record.spec))
    had, has = ({int(group["step"]) for group in saved.groups} for saved in (before, after))
    makes = not metrics["policy/skipped_updates"]
    if expected is not None:
        makes = expected.norm > 0
    anew = max(has) < max(had) + makes
    differs = f"the optimizer began anew after {max(had)} updates" if anew else "another number of updates"
    counts = has == {count + makes for count in had}
    yield Check("optimizer's updates", f"{max(had) + makes}", f"{sorted(has)}"[1:-1], "" if counts else differs)
    if not makes:
        same = {n: torch.equal(*(saved.of_optimizer("param", n) for saved in (before, after))) for n in names}
        yield _tensors("weights", "as before: no update", same)
        return
    used, rate, last = after.groups[0]["lr"], *(learning_rate(config, record.step - k) for k in (0, 1))
    late = abs(used - last) < 1e-6 * last
    hint = f"that of step {record.step - 1}" if late else "not config.yaml's, which a resume may have changed since"
    yield _numbers("learning rate", rate, used, 1e-6 * rate, hint)
    o, clip = config.optimizer, min(1.0, config.optimizer.clip_grad / (metrics["policy/grad_norm"] + 1e-6))
    (beta1, beta2), gradients, second, weights, rounded = o.betas, {}, {}, {}, {}
    for name in names:  # Adam with decoupled weight decay (arXiv 1711.05101), in float64 from states in float32
        kinds = ("exp_avg", "exp_avg_sq", "param")
        m, v, old = (before.of_optimizer(kind, name) for kind in kinds)
        m_new, v_new, new = (after.of_optimizer(kind, name) for kind in kinds)
        if anew:
            m, v = 0 * m, 0 * v
        gradient = (m_new - beta1 * m) / (1 - beta1)
        if expected is not None:
            gradients[name] = (gradient / clip).float()
        second[name] = _relative(v_new, beta2 * v + (1 - beta2) * gradient**2) < MOMENTS_ROUNDING
        step = m_new / (1 - beta1 ** max(has)) / ((v_new / (1 - beta2 ** max(has))).sqrt() + o.eps)
        if old.dim() > 1:  # norms and biases do not decay
            step += o.weight_decay * old
        bound = 4 * HALF_ULP * old.abs() + 1e-4 * (used * step).abs() + 1e-12
        weights[name] = bool(((old - used * step - new).abs() <= bound).all())
        rounded[name] = torch.equal(after.weight(name).double(), new.to(after.dtype).double())
    if expected is not None:
        yield _gradient(record, gradients, expected)
    yield _tensors("second moments", "of that gradient", second)
    yield _tensors("weights", "Adam's update at that rate", weights)
    yield _tensors(f"weights in {config.model.dtype}", "the optimizer's, rounded", rounded)


def _gradient(record: StepRecord, found: Tensors, expected: Gradient) -> Check:
    rounding, wrong, worst = ROUNDING[record.config.model.dtype], [], 0.0
    root = sum(g.numel() for g in found.values()) ** 0.5
    for name, gradient in found.items():
        g = expected.whole[name].cpu()
        # What is left of a gradient that cancels is rounding.
        size = max(float(g.norm()), 1e-3 * expected.norm * g.numel() ** 0.5 / root)
        error = float((gradient - g).norm())
        worst, wrong = max(worst, error / size), wrong + [name] * (error > rounding * size)
    differs = _explain(found, expected, wrong[0], record.rollouts, rounding, record.config.parallel.tp) if wrong else ""
    return Check("gradient, from the moments", f"{len(found)} tensors", f"largest error {worst:.2g}", differs)


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference, relative to the larger norm; 0 for two tensors of zeros."""
    largest = max(float(found.norm()), float(expected.norm()))
    return float((found - expected).norm()) / largest if largest else 0.0


def _explain(found: Tensors, expected: Gradient, name: str, rollouts: RolloutBatch, rounding: float, tp: int) -> str:
    """How `found` differs from `expected`, by other factors of the rollouts' parts if they explain most of it, else by
    the tensor `name`. `tp`: ranks that tensors are cut over."""
    trained, sampled = np.flatnonzero(expected.parts.any(1)), expected.sample(found)
    factors = np.linalg.lstsq(expected.parts[trained].T, sampled, rcond=None)[0]
    left = np.linalg.norm(expected.parts[trained].T @ factors - sampled)
    if left < np.linalg.norm(expected.parts.sum(0) - sampled) / 5:  # not exact: the modulation depends on the advantage
        if np.ptp(factors) < 0.05 * abs(factors.mean()):
            return f"every rollout counts {factors.mean():.4g} times: the divisor of the loss, or a sum made again"
        others = np.flatnonzero(abs(factors - 1) > 0.05)
        lost = not (abs(factors[others]) > 0.05).any()
        shown = [f"{rollouts.rollout_ids[trained[i]]} ({factors[i]:.2g} times)" for i in others[:NAMED]]
        what = "are missing" if lost else "have another weight or advantage"
        return f"{len(others)} of {len(trained)} rollouts {what}, the first {', '.join(shown)}"
    gradient, other = found[name].double(), expected.whole[name].cpu()
    for dim in range(gradient.dim() if tp > 1 else 0):
        parts = gradient.chunk(tp, dim)
        for i, j in itertools.combinations(range(len(parts)), 2):
            order = [{i: j, j: i}.get(k, k) for k in range(len(parts))]
            if _relative(torch.cat([parts[k] for k in order], dim), other) < rounding:
                return f"{name}: the slices of tensor-parallel ranks {i} and {j} are exchanged"
    factor = float((gradient * other).sum() / other.square().sum())
    alike = _relative(gradient, factor * other) < rounding
    return f"{name}: {f'{factor:.4g} times what is expected' if alike else 'another gradient'}"
