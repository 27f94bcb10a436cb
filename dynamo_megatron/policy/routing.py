"""Router replay (R3, arXiv 2510.11370), and how evenly a mixture's experts are used.

megatron-core's RouterReplay holds the experts of one micro-batch for all layers of the process, and whoever uses it has
to change them in the order of the pipeline's passes. Here they come with the micro-batch, in `Segments`, so that a
recomputed layer gets those of its first pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from dynamo_megatron.models import ModelSpec
from dynamo_megatron.policy.batch import MicroBatch, to_device
from dynamo_megatron.policy.layout import Layout

if TYPE_CHECKING:
    from dynamo_megatron.policy.model import PolicyModel

MISMATCHED, REPLAYED, TOKENS = range(-3, 0)  # columns of the counts, after one for each expert


class Routing(NamedTuple):
    """Of the t' positions of a micro-batch whose routers this rank computes."""

    experts: torch.Tensor | None  # [t', layers of the model, topk] of the rollouts; no expert's number: not known
    real: torch.Tensor  # bool [t'], no padding


class Replay:
    """Stands in a router for megatron-core's RouterReplay. `counts`: int64 [experts + 3], what the layer adds to.
    `trained`: int64 [experts], likewise of passes with a gradient."""

    def __init__(self, layer: int, counts: torch.Tensor, trained: torch.Tensor):
        self._layer, self._counts, self._trained = layer, counts, trained
        self._given: Routing | None = None  # None: as without it

    def before_layer(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """The layer's pre-hook, which the recomputation of a layer calls, too."""
        self._given = kwargs["packed_seq_params"].routing

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the scores, with their gradient, and the numbers of each token's experts, both [t', topk]: those of
        its rollout, where they are known, else the router's own. scores: [t', experts], of the present weights."""
        assert default_compute_topk is not None
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self._given is None:
            return values, own
        experts, real = self._given
        chosen = own
        if experts is not None:
            given = experts[:, self._layer].long()
            known = ((given >= 0) & (given < scores.shape[1])).all(1)
            known &= (given[:, :, None] == given[:, None, :]).sum((1, 2)) == topk  # no expert twice
            chosen = torch.where(known[:, None], given, own)
            values = scores.gather(1, chosen)
            same = (own[:, :, None] == chosen[:, None, :]).any(2).all(1)
            self._counts[MISMATCHED] += (~same).sum()
            self._counts[REPLAYED] += known.sum()
        self._counts[TOKENS] += real.sum()
        chosen_by = chosen.flatten(), real.long().repeat_interleave(topk)
        self._counts.index_add_(0, *chosen_by)
        if torch.is_grad_enabled():  # once a micro-batch, also where its layers are recomputed
            self._trained.index_add_(0, *chosen_by)
        return values, chosen


class ExpertRouting:
    """The routers of `chunks`, this rank's part of a mixture of experts."""

    def __init__(self, chunks: Sequence[PolicyModel], spec: ModelSpec, layout: Layout):
        self._layout = layout
        shape = spec.num_layers, spec.num_experts + 3
        self._counts = torch.zeros(shape, dtype=torch.int64, device=layout.device)
        self._trained = torch.zeros_like(self._counts[:, :MISMATCHED])
        self._routers: dict[int, torch.nn.Module] = {}  # by layer
        for chunk in chunks:
            for number, layer in enumerate(chunk.decoder.layers, chunk.layer_offset):
                if not hasattr(layer.mlp, "router"):  # a mixture of experts may begin with dense layers
                    continue
                self._routers[number] = layer.mlp.router
                layer.mlp.router.router_replay = replay = Replay(number, self._counts[number], self._trained[number])
                layer.register_forward_pre_hook(replay.before_layer, with_kwargs=True)

    def of(self, micro_batch: MicroBatch, sequence_parallel: bool) -> Routing:
        """For `PolicyModel.forward_packed`. With sequence parallelism each rank routes a share of the positions."""
        tp, device = self._layout.tp, self._layout.device
        share = len(micro_batch.real) // (tp.size() if sequence_parallel else 1)
        start = tp.rank() * share if sequence_parallel else 0
        here, routes = slice(start, start + share), micro_batch.routes
        experts = None if routes is None else to_device(routes[here], device)
        return Routing(experts, to_device(micro_batch.real[here], device))

    def take(self) -> dict[str, float]:
        """The metrics of all passes of the policy since the last call; collective over all ranks. `moe/load_mean` and
        `load_max`, over the layers: tokens of the busiest expert over the experts' mean. `moe/replayed`: share of
        tokens and layers with a known route; `moe/route_mismatch`, of these: those where the router, with the weights
        that the pass had, would have chosen other experts."""
        counts = self._counts.to("cpu", copy=True)
        self._counts.zero_()
        dist.all_reduce(counts, group=self._layout.host)
        mismatched, replayed, tokens = (int(counts[:, column].sum()) for column in (MISMATCHED, REPLAYED, TOKENS))
        if not tokens:
            return {}
        load = counts[:, :MISMATCHED].double()
        load /= load.mean(1, keepdim=True)  # NaN in a layer without experts
        peak = load[counts[:, TOKENS] > 0].amax(1)
        loads = {"moe/load_max": float(peak.max()), "moe/load_mean": float(peak.mean())}
        metrics = {**loads, "moe/replayed": replayed / tokens}
        return metrics | ({"moe/route_mismatch": mismatched / replayed} if replayed else {})

    def begin_gradient(self) -> None:
        self._trained.zero_()

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Moves the bias of each expert in its router's choice by `rate` (`model.expert_bias_update_rate`): up if the
        last gradient had fewer tokens for it than for the layer's experts on average, down if more. Collective over all
        ranks, whose biases stay equal bit by bit."""
        counts = self._trained.to("cpu", copy=True)
        dist.all_reduce(counts, group=self._layout.host)
        steps = (counts.sum(1, keepdim=True) - counts * counts.shape[1]).sign() * rate
        for layer, router in self._routers.items():
            router.expert_bias += steps[layer].to(router.expert_bias)
