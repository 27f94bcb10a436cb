"""All that knows a checkpoint's format: saving, loading, converting, inspecting."""
