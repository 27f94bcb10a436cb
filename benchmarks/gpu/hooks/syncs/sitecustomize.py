"""A rank warns, once a place, where the host waits for the GPU: for the part `syncs`, which puts this folder first."""

import sys

if {"dynamo_megatron.cli", "train"} <= set(sys.orig_argv):
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("warn")
