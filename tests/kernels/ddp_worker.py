"""One rank of Megatron's data parallelism over gloo with a tied policy head: `ddp_worker.py RANK SIZE FOLDER`.

Leaves FOLDER/rank-RANK.pt: the gradients of every case. The last rank's micro-batches have no loss token.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from dynamo_megatron.config import PolicyLossConfig
from dynamo_megatron.kernels import policy_loss

CONFIG = PolicyLossConfig(entropy_coef=0.02)
VOCAB, ROWS, H, TOKENS, MICRO_BATCHES = 29, 32, 8, 6, 3
CASES = {
    f"{backend}-{gradient}-{overlap}": (backend, gradient, overlap == "overlap")
    for backend in ("torch", "triton")
    for gradient in ("eager", "recompute")
    for overlap in ("overlap", "at_the_end")
}


class Tied(torch.nn.Module):
    """Embedding, one layer, and the embedding again as head."""

    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.embedding = torch.nn.Parameter(torch.randn(ROWS, H, generator=g))
        self.layer = torch.nn.Parameter(torch.randn(H, H, generator=g))
        self.embedding.zero_out_wgrad = True  # as the policy sets it where the head is tied

    def forward(self, tokens):
        return torch.tanh(self.embedding[tokens] @ self.layer)


def micro_batch(rank: int, size: int, index: int) -> tuple[torch.Tensor, ...]:
    """(tokens, labels, advantages, old logprobs, weights), [TOKENS] each."""
    g = torch.Generator().manual_seed(100 * rank + index)
    tokens, labels = torch.randint(0, VOCAB, (2, TOKENS), generator=g)
    if rank == size - 1:
        labels = torch.full_like(labels, -100)
    return tokens, labels, *torch.randn(2, TOKENS, generator=g).sub(torch.tensor([[0.0], [3.0]])), torch.ones(TOKENS)


def gradients(rank: int, size: int, backend: str, gradient: str, overlap: bool) -> dict[str, torch.Tensor]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=1, hidden_size=H, num_attention_heads=1, calculate_per_token_loss=True, use_cpu_initialization=True
    )
    ddp = DistributedDataParallelConfig(overlap_grad_reduce=overlap, grad_reduce_in_fp32=True, bucket_size=10)
    model = DistributedDataParallel(config, ddp, Tied())
    model.zero_grad_buffer()
    for index in range(MICRO_BATCHES):
        tokens, labels, *rest = micro_batch(rank, size, index)
        last = index == MICRO_BATCHES - 1
        with model.no_sync() if not last else torch.enable_grad():
            out = policy_loss(
                model(tokens),
                model.module.embedding,
                labels,
                *rest,
                CONFIG,
                vocab_size=VOCAB,
                backend=backend,
                gradient=gradient,
            )
            out.loss.backward()
    model.finish_grad_sync()
    return {name: p.main_grad.clone() for name, p in model.module.named_parameters()}


def main(rank: int, size: int, folder: str) -> None:
    # Here and in `gradients`, since the test takes its cases from this file and needs no Megatron.
    from dynamo_megatron.policy.backend import enable_cpu

    enable_cpu()
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )
    parallel_state.initialize_model_parallel()
    results = {name: gradients(rank, size, *case) for name, case in CASES.items()}
    torch.save(results, f"{folder}/rank-{rank}.pt")
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
