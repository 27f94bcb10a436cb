"""Stands before Megatron on a server's path: SGLang imports Megatron where it can, for a debugging aid, and Megatron's
import makes torch_memory_saver use a mode in which no CUDA graph can be captured (megatron-core 0.16.1,
core/inference/contexts/dynamic_context.py)."""

raise ImportError("a server runs without Megatron")
