"""The policy head's GEMMs, over one chunk of labelled tokens after another: logits, their statistics, and gradients.

A backend does what lies between the GEMMs; it is a module: `reference` or `triton_backend`.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from dynamo_megatron.algorithm.modulation import ModulationRanges
from dynamo_megatron.config import PolicyLossConfig
from dynamo_megatron.errors import InputError
from dynamo_megatron.kernels import reference
from dynamo_megatron.kernels.types import METRICS, Shard, Statistics, Terms, Tokens

IGNORE = -100
WORKSPACE_BYTES = 2_500_000_000
TILE = 128  # rows: a GEMM works in tiles of about this size
STATISTICS = len(Statistics._fields)


def find_backend(name: str, device: torch.device) -> ModuleType:
    """Returns the backend's module: `auto`, `torch` or `triton`. Raises ValueError for triton on a CPU without Triton's
    interpreter."""
    if name == "torch" or (name == "auto" and device.type != "cuda"):
        return reference
    from dynamo_megatron.kernels import triton_backend

    if device.type != "cuda" and not triton_backend.INTERPRETED:
        raise InputError(
            "backend: 'triton' needs a GPU, or TRITON_INTERPRET=1 in the environment from the process's start"
        )
    return triton_backend


def chunk_size(row_bytes: int) -> int:
    """Returns how many rows of logits, whose buffers take `row_bytes` each, fit in WORKSPACE_BYTES; at least 1."""
    rows = max(1, WORKSPACE_BYTES // row_bytes)
    return rows if rows < TILE else rows // TILE * TILE


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a @ b, summed in `dtype` and not rounded further."""
    if a.is_cuda and a.dtype != dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def add_product_(total: Tensor, a: Tensor, b: Tensor, scale: float = 1.0) -> None:
    """total += scale * a @ b, rounded once to total's dtype; for a bfloat16 total on a CPU the product before, too."""
    if a.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, alpha=scale, out_dtype=total.dtype, out=total)
    elif not a.is_cuda and total.dtype == torch.bfloat16:  # as a product, which policy/backend.py may sum in float32
        total.add_(a.matmul(b), alpha=scale)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype), alpha=scale)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Through pinned memory: a copy to a GPU from other memory would wait for all earlier work of the GPU."""
    pinned = values.pin_memory() if device.type == "cuda" and not values.is_cuda else values
    return pinned.to(device, non_blocking=True)


class ChunkedHead:
    """The checked geometry of one call: labelled rows, vocabulary shard, chunks, dtypes.

    Raises ValueError that names the argument.
    """

    def __init__(self, hidden, weight, labels, temperature, vocab_size, tp_group, backend, chunk_tokens):
        self.backend = find_backend(backend, hidden.device)
        if hidden.ndim != 2 or weight.ndim != 2 or weight.shape[1] != hidden.shape[1]:
            raise ValueError(f"weight: {list(weight.shape)} does not fit hidden, {list(hidden.shape)}")
        if labels.shape != hidden.shape[:1] or labels.dtype != torch.int64:
            raise ValueError(f"labels: needs int64 [{hidden.shape[0]}], got {labels.dtype} {list(labels.shape)}")
        self.group, self.temperature = tp_group, float(temperature)
        self.size = 1 if tp_group is None else dist.get_world_size(tp_group)
        rank = 0 if tp_group is None else dist.get_rank(tp_group)
        rows = weight.shape[0]
        vocab_size = rows * self.size if vocab_size is None else vocab_size
        if not 1 <= vocab_size <= rows * self.size:
            raise ValueError(f"vocab_size: {vocab_size} is outside [1, {rows * self.size}], the rows of all shards")
        self.shard = Shard(rank * rows, rows, min(max(vocab_size - rank * rows, 0), rows))
        self.dtype = torch.float64 if torch.float64 in (hidden.dtype, weight.dtype) else torch.float32
        self.operand = self.backend.operand_dtype(hidden.dtype, weight.dtype, self.dtype)
        here = labels.cpu()  # all that the host reads of a GPU, and nothing where the labels are on the host
        labelled = here != IGNORE
        wrong = (labelled & ((here < 0) | (here >= vocab_size))).nonzero()
        if len(wrong):
            at = int(wrong[0, 0])
            raise ValueError(
                f"labels: {here[at]} at token {at} is outside [0, {vocab_size}) and not {IGNORE} (left out)"
            )
        self.tokens, self.count = len(labels), int(labelled.sum())
        self.rows: slice | Tensor = slice(0, self.tokens)  # views, and no launch, where every row has a label
        if self.count < self.tokens:
            self.rows = to_device(labelled.nonzero()[:, 0], hidden.device)
        self.labels = to_device(labels, hidden.device)[self.rows].contiguous()
        buffers = self.backend.workspace_buffers(self.operand, hidden.device)
        self.chunk_tokens = chunk_tokens or chunk_size(buffers * rows * self.dtype.itemsize)

    def chunks(self) -> Iterator[slice]:
        """Yields slices of the labelled rows; the same on every rank of the group, which shares the labels."""
        for start in range(0, self.count, self.chunk_tokens):
            yield slice(start, min(start + self.chunk_tokens, self.count))

    def as_operand(self, t: Tensor) -> Tensor:
        """Returns `t` as the GEMMs take it. A CPU has no GEMM from bfloat16 to float32, so there bfloat16 is widened,
        once."""
        return t.to(self.operand if t.is_cuda else self.dtype)

    def logits(self, hidden: Tensor, weight: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
        """Returns the chunk's hidden states [c, h], an operand like `weight`, and logits [c, V/tp] in the compute
        dtype."""
        whole = isinstance(self.rows, slice)
        x = self.as_operand(hidden[chunk] if whole else hidden.index_select(0, self.rows[chunk]))
        return x, _product(x, weight.t(), self.dtype)

    def partials_(self, logits: Tensor, chunk: slice) -> tuple[Tensor, Tensor | None]:
        """Returns every shard's row statistics [tp, 6, c], and what was subtracted from each row of the logits, [c];
        None: nothing."""
        part, shift = self.backend.shard_statistics_(logits, self.labels[chunk], self.shard, self.temperature)
        parts = part[None]
        if self.size > 1:
            parts = part.new_empty(self.size, *part.shape)
            dist.all_gather_into_tensor(parts.view(-1, part.shape[1]), part, group=self.group)
        return parts, shift

    def statistics(self, hidden: Tensor, weight: Tensor) -> Statistics:
        """Returns the statistics of all labelled rows, [n] each."""
        out = hidden.new_empty(STATISTICS, self.count, dtype=self.dtype)
        w = self.as_operand(weight)
        for chunk in self.chunks():
            parts, _ = self.partials_(self.logits(hidden, w, chunk)[1], chunk)
            self.backend.merge(parts, self.temperature, out[:, chunk])
        return Statistics(*out)

    def loss_and_gradients(
        self, hidden: Tensor, weight: Tensor, config: PolicyLossConfig, tokens: Tokens, ranges: ModulationRanges | None
    ) -> tuple[Statistics, Terms, tuple[Tensor, Tensor | None]]:
        """Returns statistics, loss terms and (dX, dW) from one pass, 3 GEMMs: a chunk's loss and gradients use the same
        logits."""
        out = hidden.new_empty(STATISTICS + 3, self.count, dtype=self.dtype)  # and gradients and advantages
        sums: Tensor | None = None
        gradients = _Gradients(self, hidden, weight)
        w = self.as_operand(weight)
        if ranges is not None:  # to the device once, not with every chunk
            ranges = ModulationRanges(*(torch.as_tensor(r, dtype=self.dtype, device=hidden.device) for r in ranges))
        for chunk in self.chunks():
            x, z = self.logits(hidden, w, chunk)
            parts, shift = self.partials_(z, chunk)
            stats, t = self.backend.merge_with_loss(
                parts, self.temperature, config, tokens.at(chunk), ranges, out[:, chunk]
            )
            maximum = stats.maximum if shift is None else stats.maximum - shift
            g_h = t.grad_entropy if config.entropy_coef else None
            gradients.add(chunk, x, w, z, maximum, stats.log_sum, stats.entropy, t.grad_logprobs, g_h)
            del z  # else two chunks of logits would be alive at once
            sums = t.sums if sums is None else sums + t.sums
        sums = out.new_zeros(len(METRICS)) if sums is None else sums
        return Statistics(*out[:STATISTICS]), Terms(*out[STATISTICS:], sums), gradients.finish()

    def gradients(
        self,
        hidden: Tensor,
        weight: Tensor,
        stats: Statistics,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns (dX, dW) for gradients [n] of logprobs and entropy (None: 0). The logits are computed again: 3
        GEMMs."""
        grad_logprobs = torch.zeros_like(stats.logprobs) if grad_logprobs is None else grad_logprobs.contiguous()
        # autograd hands out expanded scalars
        grad_entropy = None if grad_entropy is None else grad_entropy.contiguous()
        gradients = _Gradients(self, hidden, weight)
        w = self.as_operand(weight)
        for chunk in self.chunks():
            x, z = self.logits(hidden, w, chunk)
            g_h = None if grad_entropy is None else grad_entropy[chunk]
            row = (stats.maximum, stats.log_sum, stats.entropy, grad_logprobs)
            gradients.add(chunk, x, w, z, *(r[chunk] for r in row), g_h)
            del z
        return gradients.finish()

    def take(self, values: Tensor) -> Tensor:
        """Returns `values` [T] of the labelled rows, [n], contiguous, in the compute dtype; a view where it can be."""
        return values[self.rows].to(self.dtype).contiguous()

    def scatter(self, values: Tensor) -> Tensor:
        """Returns [T] with `values` [n] in the labelled rows and 0 elsewhere; differentiable. With a label in every row
        these are `values`."""
        if isinstance(self.rows, slice):
            return values
        return values.new_zeros(self.tokens).index_copy(0, self.rows, values)


class _Gradients:
    """dX [T, h] and dW [V/tp, h], built chunk by chunk; a weight that needs no gradient has no dW."""

    def __init__(self, head: ChunkedHead, hidden: Tensor, weight: Tensor):
        self.head, self.dtype = head, weight.dtype
        rows = {"memory_format": torch.contiguous_format}  # whatever the strides of `hidden` and `weight`
        self.whole = isinstance(head.rows, slice)  # every row is written
        self.hidden = (torch.empty_like if self.whole else torch.zeros_like)(hidden, **rows)
        self.frozen = not weight.requires_grad
        if self.frozen:
            return
        self.main = getattr(weight, "main_grad", None)
        # A main_grad of the compute dtype takes the GEMMs' results directly; any other is rounded to once, at the end.
        self.direct = self.main is not None and self.main.dtype == head.dtype
        self.weight = self.main if self.direct else torch.zeros_like(weight, dtype=head.dtype, **rows)

    def add(self, chunk: slice, x: Tensor, weight: Tensor, logits: Tensor, *row: Tensor | None) -> None:
        """row: maximum, log_sum, entropy, grad_logprobs, grad_entropy of `logits_gradient_`, [c] each."""
        head = self.head
        dz = head.backend.logits_gradient_(logits, head.labels[chunk], head.shard, *row, head.temperature, head.operand)
        dx = _product(dz, weight, head.dtype)
        reduced = dist.all_reduce(dx, group=head.group, async_op=True) if head.size > 1 else None
        if not self.frozen:
            add_product_(self.weight, dz.t(), x)
        if reduced is not None:
            reduced.wait()
        if self.whole:
            self.hidden[chunk] = dx
        else:
            self.hidden.index_copy_(0, head.rows[chunk], dx.to(self.hidden.dtype))

    def finish(self) -> tuple[Tensor, Tensor | None]:
        """Returns (dX, dW in the weight's dtype); dW is None where it went to main_grad, or there is none."""
        if self.frozen:
            return self.hidden, None
        if self.main is None:
            return self.hidden, self.weight.to(self.dtype)
        if not self.direct:
            self.main.add_(self.weight)
        return self.hidden, None
