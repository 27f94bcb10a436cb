"""The policy head: token statistics and the DynaMO policy loss from hidden states (arXiv 2602.19208)."""

from dynamo_megatron.kernels.head import PolicyLossOutput, TokenStats, policy_loss, token_stats

__all__ = ["PolicyLossOutput", "TokenStats", "policy_loss", "token_stats"]
