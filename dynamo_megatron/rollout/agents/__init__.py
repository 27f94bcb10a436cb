"""Agents: a user's function that talks with the policy in several turns makes one rollout (docs/agents.md)."""
