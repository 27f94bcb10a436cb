"""The data of one training step, its share-out over micro-batches and ranks, and packing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dynamo_megatron.algorithm.advantages import (
    batch_normalised,
    group_advantages,
    history_advantages,
    overlong_penalty,
    process_advantages,
    weighted,
)
from dynamo_megatron.algorithm.aggregation import token_divisors
from dynamo_megatron.algorithm.arrays import group_index
from dynamo_megatron.algorithm.diversity import diversity_factors
from dynamo_megatron.algorithm.gae import generalised_advantages, token_rewards, turn_advantages, whitened
from dynamo_megatron.algorithm.success import Baseline
from dynamo_megatron.algorithm.user_functions import AdvantageInputs, custom_advantages, load_advantage
from dynamo_megatron.config import Config
from dynamo_megatron.errors import InputError
from dynamo_megatron.kernels.chunked import to_device
from dynamo_megatron.models import ModelSpec
from dynamo_megatron.runtime.routes import no_route
from dynamo_megatron.types import RolloutBatch, Sequences


@dataclass(frozen=True)
class TrainBatch:
    """The S rollouts of a step with what the loss needs of each; the same on every rank."""

    rollouts: RolloutBatch
    advantages: np.ndarray  # float64 [S], from the outcome rewards; 0 with a critic, whose advantages are of tokens
    mini_batches: list[np.ndarray]  # the rollouts (indices, ascending) of each update of the step
    weights: np.ndarray  # float64 [S]: of each response token, normalised over the mini-batch, times the prompt's
    # float64 [R], what is added to each token's advantage: of process rewards, the teacher and, all of it, the critic
    process: np.ndarray | None = None
    implicit_rewards: np.ndarray | None = None  # float64 [R], of the reward `prime`
    teacher_gap: np.ndarray | None = None  # float64 [R], log p_teacher - log p_policy, nats
    values: np.ndarray | None = None  # float64 [R], the critic's, and what it is to learn from them
    returns: np.ndarray | None = None

    @classmethod
    def build(
        cls,
        rollouts: RolloutBatch,
        config: Config,
        gather: Callable[[str], list[str]] | None = None,
        baseline: Baseline | None = None,
        weights: np.ndarray | None = None,
        implicit_rewards: np.ndarray | None = None,
        teacher_gap: np.ndarray | None = None,
        values: np.ndarray | None = None,
    ) -> TrainBatch:
        """Computes advantages by group, and mini-batches. `gather`: as in `custom_advantages`. `baseline`: what is
        known of each rollout's prompt; None: nothing. `weights`: float64 [S], of each response token in the loss of its
        mini-batch; None: 1 / `loss_divisors`. `implicit_rewards`: from `Policy.implicit_rewards`. `teacher_gap`:
        float64 [R], log p_teacher - log p_policy of each response token, nats. `values`: float64 [R], from
        `Critic.values`, for kind `gae`.

        Raises UserCodeError if a user's function returns invalid advantages, or others on another rank.
        """
        group, _ = group_index(rollouts.group_ids, len(rollouts.group_ids))
        advantages = _advantages(rollouts, group, config, gather, baseline)
        if weight := config.algorithm.advantage.diversity:
            assert rollouts.answers is not None
            # A negative advantage stays as it is, or a rare right rollout would be pushed down more.
            right, tokens = rollouts.successes & (advantages > 0), rollouts.response_tokens
            given = (right, rollouts.answers, tokens, rollouts.response_lengths, rollouts.group_ids)
            advantages = advantages * diversity_factors(weight, *given)
        if config.algorithm.advantage.normalise == "batch" and values is None:
            advantages = batch_normalised(advantages)
        mini_batches = cut_mini_batches(rollouts.group_ids, config.algorithm.loss.mini_batches)
        if weights is None:
            weights = 1.0 / loss_divisors(rollouts, config)
        rewards = [r for r in (rollouts.step_rewards, implicit_rewards) if r is not None]
        lengths, advantage = rollouts.response_lengths, config.algorithm.advantage
        process, returns = None, None
        assert (values is not None) == (advantage.kind == "gae")
        if values is not None:
            each = token_rewards(advantages, lengths, rewards, advantage.process.weight)
            if advantage.steps == "turns" or (advantage.steps == "auto" and config.rollout.agent is not None):
                process, returns = turn_advantages(each, values, rollouts.turns(), advantage.gamma, advantage.lam)
            else:
                process, returns = generalised_advantages(each, values, lengths, advantage.gamma, advantage.lam)
            process = whitened(process) if advantage.normalise == "batch" else process
            advantages = np.zeros(len(group))
        elif rewards:
            process = sum(process_advantages(r, group, lengths, advantage) for r in rewards)
        if (teacher := config.algorithm.teacher) is not None:
            assert teacher_gap is not None
            advantages = teacher.reward_weight * advantages
            process = (0.0 if process is None else teacher.reward_weight * process) + teacher.weight * teacher_gap
        known = implicit_rewards, teacher_gap, values, returns
        return cls(rollouts, advantages, mini_batches, weights, process, *known)


def loss_divisors(rollouts: RolloutBatch, config: Config) -> np.ndarray:
    """float64 [S]: what the loss of each response token is divided by, in the mini-batch of its rollout."""
    loss, lengths, found = config.algorithm.loss, rollouts.response_lengths, np.zeros(len(rollouts.group_ids))
    group, _ = group_index(rollouts.group_ids, len(rollouts.group_ids))
    for here in cut_mini_batches(rollouts.group_ids, loss.mini_batches):
        most = config.rollout.max_new_tokens
        found[here] = token_divisors(loss.aggregation, lengths[here], group[here], max_length=most)
    return found


def cut_mini_batches(group_ids: Sequence[str], count: int) -> list[np.ndarray]:
    """Returns the rollouts (indices, ascending) of each of at most `count` mini-batches. Each has about the same number
    of whole groups, in order."""
    group, _ = group_index(group_ids, len(group_ids))
    groups = int(group.max(initial=-1)) + 1
    parts = np.array_split(np.arange(groups), min(count, groups)) if groups else []
    return [np.flatnonzero(np.isin(group, part)) for part in parts]


def _advantages(
    rollouts: RolloutBatch,
    group: np.ndarray,
    config: Config,
    gather: Callable[[str], list[str]] | None,
    baseline: Baseline | None,
) -> np.ndarray:
    """float64 [S]."""
    advantage, rewards = config.algorithm.advantage, rollouts.rewards
    if advantage.overlong_buffer is not None:
        penalty = (advantage.overlong_buffer, advantage.overlong_penalty)
        rewards = rewards + overlong_penalty(rollouts.response_lengths, config.rollout.max_new_tokens, *penalty)
    if advantage.of_the_user:
        prompt_ids, lengths = tuple(rollouts.prompt_ids), rollouts.response_lengths
        inputs = AdvantageInputs(rewards, rollouts.successes, group, prompt_ids=prompt_ids, response_lengths=lengths)
        advantages = custom_advantages(load_advantage(advantage.kind), inputs, gather)
    elif advantage.kind in ("otb", "gae"):
        advantages = rewards  # a baseline of each token is subtracted: by shape_tokens, or the critic's values
    elif config.algorithm.needs_baseline:
        b = Baseline(np.zeros(len(rewards)), np.zeros(len(rewards))) if baseline is None else baseline
        ratio, inside = b.score_ratio if advantage.score_ratio == "auto" else advantage.score_ratio, rewards
        if advantage.score_ratio == "auto" and ratio != 1:
            inside = np.clip(rewards, 0, 1)  # the first reward outside: no baseline may depend on its own rollout
        elif ratio != 1:
            _check_rewards(rollouts, rewards, f"score_ratio={ratio:g}", "set it to auto or 1")
        advantages = history_advantages(
            inside, rollouts.group_ids, b.mean, b.strength, ratio, reward_variance=b.variance
        )
        advantages = advantages + (rewards - inside)
    else:
        if advantage.kind == "reinforce":
            _check_rewards(rollouts, rewards, "kind=reinforce", "choose another kind")
        advantages = group_advantages(
            rewards, rollouts.group_ids, advantage.kind, singleton=advantage.singleton, eps=advantage.eps
        )
    return weighted(advantages, advantage.positive_weight)


def silent_rollouts(source: Sequences, config: Config) -> np.ndarray:
    """bool [S]: the rollouts that give no gradient, by their rewards alone, as in a group of equal rewards. None where
    the method adds anything to their loss, drops them, or makes them count for the others of a micro-batch."""
    algorithm, loss, modulation = config.algorithm, config.algorithm.loss, config.algorithm.modulation
    together = (
        not isinstance(source, RolloutBatch) or source.step_rewards is not None or config.reward.implicit,
        algorithm.advantage.kind not in ("grpo", "dr_grpo", "rloo") or algorithm.advantage.normalise == "batch",
        algorithm.needs_baseline or algorithm.dynamic_sampling is not None or algorithm.teacher is not None,
        loss.function is not None or loss.entropy_coef or loss.kl_cov is not None or algorithm.kl.coef,
        modulation is not None and (modulation.scope == "micro_batch" or modulation.expectation == "sequence_mean"),
        config.model.expert_bias_update_rate,
    )
    if any(together):
        return np.zeros(len(source.prompt_ids), bool)
    group, _ = group_index(source.group_ids, len(source.group_ids))
    return _advantages(source, group, config, None, None) == 0


def _check_rewards(rollouts: RolloutBatch, rewards: np.ndarray, setting: str, advice: str) -> None:
    if (bad := np.flatnonzero((rewards < 0) | (rewards > 1))).size:
        raise InputError(
            f"algorithm.advantage.{setting} needs rewards from 0 to 1, and {rollouts.name(int(bad[0]))} has "
            f"{rewards[bad[0]]:g}; {advice}"
        )


def context_positions(length: int, cp_size: int) -> np.ndarray:
    """int64 [cp_size, length / cp_size]: the positions of a segment that each context-parallel rank holds, in order.

    Megatron's zigzag, which balances causal attention: of 2 cp_size equal chunks rank r has the r-th and the r-th from
    the end.
    """
    if cp_size == 1:
        return np.arange(length)[None]
    chunks = np.arange(length).reshape(2 * cp_size, -1)
    return np.concatenate([chunks[:cp_size], chunks[: cp_size - 1 : -1]], axis=1)


@dataclass(frozen=True)
class SequenceCost:
    """The cost of a sequence of L tokens, in multiply-adds of a forward pass: `linear * L + quadratic * L^2`."""

    linear: float
    quadratic: float

    @classmethod
    def of_model(cls, spec: ModelSpec) -> SequenceCost:
        """Projections, MLP (the chosen experts') and head of every token; causal attention over the tokens before."""
        heads = spec.num_attention_heads * spec.kv_channels
        attention = spec.hidden_size * (2 * heads + 2 * spec.num_query_groups * spec.kv_channels)
        widths = spec.router_topk * spec.moe_ffn_hidden_size if spec.num_experts else spec.ffn_hidden_size
        layer = attention + 3 * spec.hidden_size * widths
        # Two products (with keys and with values), each over half the square.
        return cls(spec.num_layers * layer + spec.vocab_size * spec.hidden_size, spec.num_layers * heads)

    def __call__(self, length: int) -> float:
        return self.linear * length + self.quadratic * length * length


def assign_micro_batches(
    lengths: Sequence[int], dp_size: int, budget: int, *, cost: SequenceCost, multiple: int = 1
) -> list[list[list[int]]]:
    """`assigned[dp_rank][micro_batch]` = indices of sequences; `lengths` and `budget` in tokens; a function of these
    alone. Every rank has the same number of micro-batches, a multiple of `multiple` (Megatron's interleaved schedule
    needs the number of stages), about the smallest that the budget allows; some may be empty.

    Sequences are placed in order of falling cost, each in the cheapest micro-batch that has room for it; one that is
    longer than the budget is alone in its own. Micro-batches are dealt out by falling cost, so that the k-th ones of
    all ranks, which run at the same time, cost about the same.
    """
    if not lengths:
        return [[] for _ in range(dp_size)]
    costs = [cost(length) for length in lengths]
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    step = dp_size * multiple
    # At most k of the sequences that are longer than budget / (k + 1) fit into one.
    least = [-(-sum(length * (k + 1) > budget for length in lengths) // k) for k in range(1, 9)]
    least.append(-(-sum(min(length, budget) for length in lengths) // budget))
    count = step * -(-max(least) // step)
    while (bins := _spread(order, lengths, costs, count, budget)) is None:
        count += step * max(1, count // step // 128)
    bins.sort(key=lambda b: (-sum(costs[i] for i in b), b))
    assigned: list[list[list[int]]] = [[] for _ in range(dp_size)]
    loads = [0.0] * dp_size
    for start in range(0, count, dp_size):
        ranks = sorted(range(dp_size), key=lambda r: (loads[r], r))
        for rank, members in zip(ranks, bins[start : start + dp_size], strict=True):
            assigned[rank].append(members)
            loads[rank] += sum(costs[i] for i in members)
    return assigned


def _spread(
    order: Sequence[int], lengths: Sequence[int], costs: Sequence[float], count: int, budget: int
) -> list[list[int]] | None:
    """Puts the sequences, in this order, each into the cheapest of `count` micro-batches with room. None: no room."""
    bins: list[list[int]] = [[] for _ in range(count)]
    tokens, loads = np.zeros(count, np.int64), np.zeros(count)
    for i in order:
        fits = (tokens == 0) | (tokens + lengths[i] <= budget)
        if not fits.any():
            return None
        b = int(np.where(fits, loads, math.inf).argmin())
        bins[b].append(i)
        tokens[b] += lengths[i]
        loads[b] += costs[i]
    return [sorted(b) for b in bins]


@dataclass(frozen=True)
class MicroBatch:
    """One rank's part of packed segments. A sequence has one segment, with an agent one or more. A segment's inputs are
    tokens[:-1]. The label of a response row is the next token, whichever context-parallel rank holds that.

    T packed positions in all, t = T / cp_size here, r response rows among these. With cp_size above 1 padding (never a
    label) makes a segment's length a multiple of 2 cp_size. A last segment of padding makes t a multiple of `multiple`.
    """

    tokens: torch.Tensor  # int64 [1, t]
    positions: torch.Tensor  # int64 [1, t]: within the segment
    cu_seqlens: torch.Tensor  # int32 [segments + 1], of all T positions
    rows: torch.Tensor  # int64 [r]: indices, among the t positions here, of those that predict a response token
    labels: torch.Tensor  # int64 [r], on the CPU, where the policy head reads them
    slots: torch.Tensor  # int64 [r], on the CPU: the labels' slots (see `Sequences`)
    response_bounds: torch.Tensor  # int32 [sequences + 1]: where each sequence's rows begin and end in `rows`
    lengths: np.ndarray  # int64 [segments], of all T positions; on the host
    real: torch.Tensor  # bool [t], on the CPU: no padding
    # uint8 or int16 [t, layers, topk], on the CPU: the experts of each position, from `RolloutBatch.routes`; what is no
    # expert's number stands for a route that is not known, and in padding
    routes: torch.Tensor | None = None

    @property
    def response(self) -> torch.Tensor:
        """int64 [r], ascending: which of the packed sequences each response row belongs to."""
        counts = self.response_bounds.diff()
        return torch.arange(len(counts), device=counts.device).repeat_interleave(counts, output_size=len(self.rows))

    @classmethod
    def pack(
        cls,
        source: Sequences,
        sequences: list[int],
        *,
        multiple: int,
        device: torch.device,
        cp_rank: int = 0,
        cp_size: int = 1,
    ) -> MicroBatch:
        segment_multiple = 2 * cp_size if cp_size > 1 else 1
        chosen = np.asarray(sequences, np.int64)
        of_sequence, starts, ends = source.segments(chosen)
        lengths = ends - starts - 1  # of the inputs
        padded = -(-np.maximum(lengths, 1) // segment_multiple) * segment_multiple
        held = [context_positions(int(n), cp_size)[cp_rank] for n in padded]
        # For every position here: its segment, and its place in the segment.
        segment = np.repeat(np.arange(len(starts)), padded // cp_size)
        place = np.concatenate([*held, np.zeros(0, np.int64)])
        inside = np.flatnonzero(place < lengths[segment])
        here = (starts[segment] + place)[inside]  # in the tokens of `source`
        owner = of_sequence[segment[inside]]  # an index into `sequences`
        predicts = np.flatnonzero(source.in_response(here + 1, chosen[owner]))
        tokens = np.zeros(len(place), np.int64)
        tokens[inside] = source.tokens[here]
        trained, owner, label = inside[predicts], owner[predicts], here[predicts] + 1
        labels = source.tokens[label]
        slots = source.slots(label, chosen[owner])
        response_bounds = np.append(0, np.cumsum(np.bincount(owner, minlength=len(chosen))))
        bounds = np.append(0, np.cumsum(padded))
        whole = math.lcm(segment_multiple, multiple * cp_size)
        if padding := int(-bounds[-1] % whole or (whole if not sequences else 0)):
            tokens = np.pad(tokens, (0, padding // cp_size))
            place = np.append(place, context_positions(padding, cp_size)[cp_rank])
            bounds = np.append(bounds, bounds[-1] + padding)

        real = np.zeros(len(tokens), bool)
        real[inside] = True
        routes = None
        if source.routes is not None:
            none, dtype = no_route(source.routes.dtype), source.routes.dtype
            routes = np.full((len(tokens), *source.routes.shape[1:]), none, dtype)
            routes[inside] = source.routes[here + 1]
            routes = routes.view(np.int16) if routes.itemsize == 2 else routes  # torch computes little with uint16

        def on_device(array: np.ndarray, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return to_device(torch.from_numpy(array).to(dtype), device)

        return cls(
            tokens=on_device(tokens)[None],
            positions=on_device(place)[None],
            cu_seqlens=on_device(bounds, torch.int32),
            rows=on_device(trained),
            labels=torch.from_numpy(labels),
            slots=torch.from_numpy(slots),
            response_bounds=on_device(response_bounds, torch.int32),
            lengths=np.diff(bounds),
            real=torch.from_numpy(real),
            routes=None if routes is None else torch.from_numpy(routes),
        )


@dataclass(frozen=True)
class MiniBatch:
    """The sequences of one update, and this rank's part of them. Packed once: statistics and update run over the same
    micro-batches, of which the update leaves out silent ones, so that all ratios are exactly 1 in the first update."""

    members: np.ndarray  # int64, ascending: indices of the step's sequences
    micro_batches: list[MicroBatch]
    silent_count: int  # of the last micro-batches, which have silent rollouts alone
