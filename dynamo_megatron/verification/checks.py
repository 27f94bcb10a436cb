"""The checks of a finished step: what each expects, what the run's files have, and what differs first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from dynamo_megatron.checkpoint.weights import open_weights
from dynamo_megatron.models.mapping import huggingface_shapes
from dynamo_megatron.rollout.store import tokens_file
from dynamo_megatron.tracking.token_rows import read_token_rows, response_hash
from dynamo_megatron.verification.adam import AdamUpdate
from dynamo_megatron.verification.explain import explain_gradient, norm_of, relative
from dynamo_megatron.verification.model import ReferenceGradient, ReferenceModel
from dynamo_megatron.verification.record import Saved, StepRecord
from dynamo_megatron.verification.reference import learning_rate, not_covered, token_losses

# What counts as rounding, by the dtype that the policy computes in: relative errors of sums and gradients; and mean
# differences of logprobs, nats (the servers have kernels of their own).
ROUNDING = {"float32": 1e-3, "bfloat16": 0.1}
LOGPROB_ROUNDING = {"float32": 1e-3, "bfloat16": 0.05}
MOMENTS = 1e-4  # relative error of second moments: the gradient is recovered from a difference in float32


class Check(NamedTuple):
    """A row of the table. `differs`: what differs first; `holds` None: the check was not made, `differs` says why."""

    what: str
    expected: str = ""
    found: str = ""
    differs: str = ""
    holds: bool | None = True


def _numbers(what: str, expected: float, found: float, scale: float, rounding: float, hint: str = "") -> Check:
    """Two numbers that may differ by `rounding` times `scale`."""
    holds = bool(abs(found - expected) <= rounding * scale)
    ratio = f"{found / expected:.4g} times what is expected" if expected else ""
    return Check(what, f"{expected:.6g}", f"{found:.6g}", "" if holds else hint or ratio, holds)


def checks(record: StepRecord, say: Callable[[str], None]) -> Iterator[Check]:
    """The checks of a step, in its order. `say` gets a line before what may take long."""
    before, after = record.saved(record.step - 1), record.saved(record.step)
    tokens = int(record.rollouts.response_offsets[-1])
    yield _numbers("response tokens trained", tokens, record.metrics["policy/tokens"], 1, 0)
    gradient = None
    if (why := before if isinstance(before, str) else not_covered(record.config)) is not None:
        yield Check("advantages, logprobs, loss, gradient", differs=why, holds=None)
    else:
        say(f"computing {len(record.rollouts.rewards)} rollouts in float64 with transformers")
        gradient = yield from _computed(record, before)
    if (why := next((s for s in (before, after) if isinstance(s, str)), None)) is not None:
        rate = learning_rate(record.config, record.step)
        yield _numbers("learning rate", rate, record.metrics["policy/learning_rate"], rate, 1e-6)
        yield Check("moments, weights", differs=why, holds=None)
    else:
        yield from _updated(record, before, after, gradient)


def _computed(record: StepRecord, before: Saved) -> Iterator[Check]:
    """Advantages, logprobs, loss and gradient norm. Returns the gradient."""
    config, rollouts, metrics = record.config, record.rollouts, record.metrics
    rounding = ROUNDING[config.model.dtype]
    model = ReferenceModel(config.model.path, config.rollout.temperature)

    def logprobs_of(get: Callable[[str], torch.Tensor]) -> np.ndarray:
        model.load(get)
        return model.statistics(rollouts).logprobs

    compared = None
    if config.algorithm.kl.coef:
        with open_weights(config.frozen_models["algorithm.kl.reference"], record.spec) as folder:
            compared = logprobs_of(folder.get)
    older = {}  # the weights that tokens say they are from, and those before them, which a stale server would have
    versions = {record.step - 2, *np.unique(rollouts.weight_versions).tolist()} - {record.step - 1}
    for version in sorted(v for v in versions if v >= 0):
        if not isinstance(saved := record.saved(version), str):
            older[version] = logprobs_of(saved.weight)
    model.load(before.weight)
    statistics = model.statistics(rollouts)._replace(reference=compared)
    loss = token_losses(rollouts, config, statistics, record.baselines(before))
    yield from _token_rows(record, loss.advantages, statistics.logprobs)
    yield from _servers(record, {**older, record.step - 1: statistics.logprobs})
    yield _numbers("loss", loss.loss.sum(), metrics["policy/loss"], np.abs(loss.loss).sum(), rounding)
    gradient = model.gradient(rollouts, loss)
    norm = float(torch.stack([g.square().sum() for g in gradient.whole.values()]).sum().sqrt())
    yield _numbers("gradient norm", norm, metrics["policy/grad_norm"], norm, rounding)
    return gradient


def _token_rows(record: StepRecord, advantage: np.ndarray, logprobs: np.ndarray) -> Iterator[Check]:
    """Against tokens/, which has some rollouts' advantages and logprobs in six digits."""
    rollouts, offsets = record.rollouts, record.rollouts.response_offsets
    path = tokens_file(record.run, record.step)
    if not (rows := read_token_rows(path)):
        why = f"{path}: no such file (tracking.token_rollouts was 0); the gradient shows them too"
        yield Check("advantages, the policy's logprobs", differs=why, holds=None)
        return
    known = [(s, name, rows[name]) for s, name in enumerate(rollouts.rollout_ids) if name in rows]
    known = [k for k in known if k[2].response == response_hash(rollouts.response(k[0]).tolist())]
    for what, key, expected, rounding in (
        ("advantages", "advantage", advantage, 1e-5),
        ("the policy's logprobs", "logprob", logprobs, LOGPROB_ROUNDING[record.config.model.dtype]),
    ):
        pairs = [
            (n, expected[offsets[s] : offsets[s + 1]], np.array(r.lists[key])) for s, n, r in known if key in r.lists
        ]
        apart = [float(np.abs(e - f).mean()) if len(e) else 0.0 for _, e, f in pairs]
        wrong = [
            i
            for i, (a, (_, e, _)) in enumerate(zip(apart, pairs, strict=True))
            if a > rounding * max(1, np.abs(e).max(initial=0))
        ]
        shown = pairs[wrong[0] if wrong else 0]
        first = f"{len(wrong)} of {len(pairs)} rollouts, the first {shown[0]}" if wrong else ""
        yield Check(f"{what}, {len(pairs)} rollouts", *(f"{v.mean():.6g}" for v in shown[1:]), first, not wrong)


def _servers(record: StepRecord, by_version: dict[int, np.ndarray]) -> Iterator[Check]:
    """Each server's logprobs against those of the weights that its tokens name, and of the step before these."""
    rollouts = record.rollouts
    servers = np.repeat(np.array(rollouts.servers), rollouts.response_lengths)
    for server in sorted(set(rollouts.servers)):
        for version in np.unique(rollouts.weight_versions[servers == server]).tolist():
            what, here = (
                f"logprobs of {server or 'the server'}",
                (servers == server) & (rollouts.weight_versions == version),
            )
            if version not in by_version:
                yield Check(what, differs=f"no checkpoint of step {version}, whose weights it names", holds=None)
                continue
            gaps = {v: np.abs(p - rollouts.engine_logprobs)[here] for v, p in by_version.items() if v <= version}
            own, best = gaps[version].mean(), min(gaps, key=lambda v: gaps[v].mean())
            holds, differs = bool(own <= LOGPROB_ROUNDING[record.config.model.dtype]), ""
            if not holds:
                slot = np.flatnonzero(here)[gaps[version].argmax()]
                first = rollouts.rollout_ids[int(np.searchsorted(rollouts.response_offsets, slot, side="right")) - 1]
                differs = f"farthest in {first}, by {gaps[version].max():.2g}"
            if best != version and gaps[best].mean() < own / 2:
                holds, differs = False, f"stale: {gaps[best].mean():.2g} from the weights of step {best}"
            yield Check(what, f"weights of step {version}", f"{own:.2g} nats from them", differs, holds)


def _updated(record: StepRecord, before: Saved, after: Saved, expected: ReferenceGradient | None) -> Iterator[Check]:
    """Gradient, optimizer and weights, from the moments that the checkpoints have."""
    made = 1 - record.metrics["policy/skipped_updates"]
    counted, names = before.updates + made, list(huggingface_shapes(record.spec))
    hint = f"the optimizer began anew after {before.updates} updates" if after.updates < before.updates else ""
    yield _numbers("optimizer's step counter", counted, after.updates, 1, 0, hint)
    if not made:
        kinds = ("param", "exp_avg", "exp_avg_sq")
        moved = [n for n in names for k in kinds if not torch.equal(*(s.of_optimizer(k, n) for s in (before, after)))]
        yield Check(
            "weights of a skipped update",
            "as before",
            "" if moved else "as before",
            moved[0] if moved else "",
            not moved,
        )
        return
    o, norm = record.config.optimizer, record.metrics["policy/grad_norm"]
    update = AdamUpdate(before, after, o.betas, o.eps, o.weight_decay, min(1.0, o.clip_grad / (norm + 1e-6)))
    if expected is not None:
        yield _gradient(record, update, expected)
    wrong = [n for n in names if relative(*update.second_moments(n)) > MOMENTS]
    yield Check("second moments", "of the same gradient", *_of_tensors(wrong, names))
    rate = learning_rate(record.config, record.step)
    used, noise = update.learning_rate(names)
    check = _numbers("learning rate, by the weights", rate, used, max(rate, 1e-30), 1e-3 + noise / max(rate, 1e-30))
    if (
        not check.holds
        and record.step > 1
        and abs(used - (last := learning_rate(record.config, record.step - 1))) < 1e-3 * last
    ):
        check = check._replace(differs=f"that of step {record.step - 1}")
    yield check
    wrong = [n for n in names if not update.moves(n, rate if check.holds else used)]
    yield Check("weights", "old + Adam's update", *_of_tensors(wrong, names))
    wrong = [n for n in names if not torch.equal(after.weight(n), after.of_optimizer("param", n).to(after.dtype))]
    yield Check(f"weights in {record.config.model.dtype}", "the optimizer's, rounded", *_of_tensors(wrong, names))


def _of_tensors(wrong: list[str], names: list[str]) -> tuple[str, str, bool]:
    """`found`, `differs` and `holds` of a check of all tensors."""
    found = f"{len(names) - len(wrong)} of {len(names)} tensors"
    return found, f"the first is {wrong[0]}" if wrong else "", not wrong


def _gradient(record: StepRecord, update: AdamUpdate, expected: ReferenceGradient) -> Check:
    """Each tensor's gradient, before clipping, from the first moments."""
    rounding, tp = ROUNDING[record.config.model.dtype], record.config.parallel.tp
    found = {name: update.gradient(name) for name in expected.whole}
    total, count = norm_of(expected.whole), sum(g.numel() for g in found.values())
    wrong, worst = [], 0.0
    for name, gradient in found.items():
        e = expected.whole[name].cpu()
        # What is left of a gradient that cancels is rounding.
        least = 1e-3 * total * (e.numel() / count) ** 0.5
        error = float((gradient - e).norm()) / max(float(e.norm()), least)
        worst = max(worst, error)
        wrong += [name] if error > rounding + update.lost(name) / max(float(e.norm()), least) else []
    why = ""
    if wrong:
        moments = {name: update.gradient_without_past(name) for name in found}
        if total and all(relative(m, expected.whole[n].cpu()) < rounding for n, m in moments.items() if n in wrong):
            why = "the first moments before the step were taken as 0"
        else:
            why = explain_gradient(found, expected, record.rollouts, rounding, tp)
    return Check(
        "gradient, by the first moments", f"{len(found)} tensors", f"largest error {worst:.2g}", why, not wrong
    )
