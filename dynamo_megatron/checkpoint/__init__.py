"""The formats of checkpoints: saving, loading, inspecting."""
