"""An SGLang plugin: on a CPU, too, requests are sampled with their `sampling_seed`.

SGLang itself uses a request's seed only with --enable-deterministic-inference, which has no CPU kernels and goes
through a torch.compile that needs seconds and a C++ compiler. Here a token is a function of the request's seed, its
position and its distribution, whatever else is in the batch. (The logits still depend on the batch, in their last
bits.)
"""

import dataclasses

import torch

INFO = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
SAMPLE = "sglang.srt.layers.sampler.Sampler._sample_from_probs"


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(INFO, _add_seeds, HookType.AFTER)
    HookRegistry.register(SAMPLE, _sample, HookType.AROUND)


def _add_seeds(info, cls, batch, vocab_size):
    """Requests without a seed draw one from the server's random numbers (--random-seed)."""
    seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
    drawn = torch.randint(2**63 - 1, (len(seeds),))
    for row, seed in enumerate(seeds):
        if seed is not None:
            drawn[row] = seed
    info.sampling_seed = drawn
    return info


def _sample(original, sampler, probs, info, positions, simple):
    """Returns (token ids int32 [n], None). Filters other than greedy sampling (top_k 1) are left to SGLang,
    unseeded."""
    greedy = info.top_ks == 1
    if not simple and (info.need_top_p_sampling or info.need_min_p_sampling or (info.top_ks[~greedy] < 1 << 30).any()):
        return original(sampler, probs, dataclasses.replace(info, sampling_seed=None), positions, simple)
    tokens = sample(probs, info.sampling_seed, positions)
    return torch.where(greedy, probs.argmax(-1), tokens).int(), None


def sample(probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Returns int64 [n]: for each row of `probs` [n, V], which need not sum to 1, the first token at which the
    cumulative share of the row's sum exceeds the uniform number of the row's seed (int64 [n], any) and position (int64
    [n])."""
    sums = probs.double().cumsum(-1)
    return torch.searchsorted(sums, (uniform(seeds, positions) * sums[:, -1])[:, None], right=True)[:, 0]


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Returns float64 [n] in [0, 1), multiples of 2**-52: the number at `positions` in the SplitMix64 stream of each
    seed (Steele, Lea and Flood 2014, doi 10.1145/2714064.2660195)."""
    x = seeds + (positions.long() + 1) * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    return _shifted(x ^ _shifted(x, 31), 12).double() * 2.0**-52


def _signed(word: int) -> int:
    """Returns the int64 with the bits of `word`, at least 2**63. int64 arithmetic wraps, as the generator needs it
    to."""
    return word - (1 << 64)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
