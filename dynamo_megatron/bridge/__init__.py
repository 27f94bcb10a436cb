"""Models of NVIDIA's Megatron-Bridge (`model.source: bridge`), each of which proves itself before a run starts."""
