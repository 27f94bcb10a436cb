"""Rollouts: the SGLang server, its client, the process that owns both, and recorded rollouts."""
