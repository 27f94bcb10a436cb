"""Computes the rollout counts that each allocator would have given each prompt of a recorded run."""
