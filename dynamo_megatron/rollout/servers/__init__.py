"""Processes of rollout servers: start, supervision, addresses, health."""
