"""Megatron on every rank: parallel groups, packing, token statistics, update, checkpoint."""

import warnings

from dynamo_megatron.policy.megatron_versions import hide_advice

# Megatron warns in a dozen places about packages that are not installed; a run's start-up line lists them once.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
# Megatron-core 0.16 calls collectives by names that torch 2.13 has renamed.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
# Megatron's distributed optimizer keeps gradients on shards that are views of the parameters.
warnings.filterwarnings("ignore", category=UserWarning, message="The .grad attribute of a Tensor that is not a leaf")
hide_advice()

import dynamo_megatron.policy.backend  # noqa: E402, F401  before Megatron, whose import compiles where a compiler is
