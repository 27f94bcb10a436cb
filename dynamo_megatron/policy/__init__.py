"""Megatron on every rank: parallel groups, packing, token statistics, update, checkpoint."""

import logging
import warnings

# Megatron warns in a dozen places about packages that are not installed; a run's start-up line lists them once.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
# Megatron-core 0.16 calls collectives by names that torch 2.13 has renamed.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
# Megatron's distributed optimizer keeps gradients on shards that are views of the parameters.
warnings.filterwarnings("ignore", category=UserWarning, message="The .grad attribute of a Tensor that is not a leaf")
# Megatron-core 0.19 calls GPTModel deprecated for HybridModel, which 0.16 lacks, and advises to give DDP the layout of
# its buffers, which DDP computes itself.
for name in ("megatron.core.models.gpt.gpt_model", "megatron.core.distributed.distributed_data_parallel"):
    logging.getLogger(name).setLevel(logging.ERROR)

import dynamo_megatron.policy.backend  # noqa: E402, F401  before Megatron, whose import compiles where a compiler is
