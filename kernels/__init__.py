"""The policy head: token statistics and the DynaMO policy loss from hidden states (arXiv 2602.19208).

Importing this package imports nothing heavy: the public names load with their first use.
"""

__all__ = ["PolicyLossOutput", "TokenLogprobs", "TokenStats", "policy_loss", "token_logprobs", "token_stats"]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dynamo_megatron.kernels import head

    return getattr(head, name)
