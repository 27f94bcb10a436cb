"""Formats of checkpoints: saving, loading, inspecting."""
