"""Megatron on every rank: parallel groups, packing, token statistics, update, checkpoint."""

import warnings

# Megatron warns from a dozen places what is not installed; the start-up line of a run says it once.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
