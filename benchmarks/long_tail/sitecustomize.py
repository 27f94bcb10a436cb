"""Imported by every process of a benchmark's SGLang server: the length of each response is drawn from a heavy-tailed
distribution by the request's seed, and its end tokens do not end it."""

import importlib.abc
import importlib.util
import os
import random
import sys

MODULE = "sglang.srt.sampling.sampling_params"


def length(seed: int) -> int:
    """Tokens of the response to the request with this seed: Pareto, cut off at LONG_TAIL_MOST."""
    least, most, alpha = (float(os.environ[f"LONG_TAIL_{name}"]) for name in ("LEAST", "MOST", "ALPHA"))
    return int(min(most, least * random.Random(seed).paretovariate(alpha)))


def with_lengths(module) -> None:
    normalize = module.SamplingParams.normalize

    def with_length(self, tokenizer):
        if self.sampling_seed is not None:
            # A response that goes on after a weight sync asks for the tokens that are left of the most.
            begun = int(os.environ["LONG_TAIL_MOST"]) - self.max_new_tokens
            self.max_new_tokens, self.ignore_eos = max(1, length(self.sampling_seed) - begun), True
        normalize(self, tokenizer)

    module.SamplingParams.normalize = with_length


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            with_lengths(module)

        spec.loader.exec_module = exec_module
        return spec


if "LONG_TAIL_MOST" in os.environ:
    sys.meta_path.insert(0, Finder())
