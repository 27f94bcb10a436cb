"""What the supported versions of megatron-core, 0.16.1 and 0.19.2, do differently in a rank, and what is done about it.

- 0.19 calls GPTModel deprecated, for HybridModel. The policy is a GPTModel under both: HybridModel is not in 0.16, and
  has an attention and an MLP as two layers, under other names in a checkpoint.
- 0.19 advises to give DDP the layout of its buffers. DDP computes the same layout if it is not given, as in 0.16.
- 0.19 calls functions of RoPE with other options, which what stands for one of them passes on (backend.py).
- 0.19 finds the groups of a saved optimizer by their learning rates, too: `match_groups_by_kind`.
- 0.19 saves the data that is no tensor as a part of a checkpoint, not as `common.pt`. A run writes `common.pt` under
  both, which both read, and reads checkpoints of both (checkpoint/policy_state.py).
"""

from __future__ import annotations

import logging

ADVICE = ("megatron.core.models.gpt.gpt_model", "megatron.core.distributed.distributed_data_parallel")


def hide_advice() -> None:
    """Hides the log lines of 0.19 on GPTModel and on the layout of DDP's buffers. A user can do nothing about them."""
    for name in ADVICE:
        logging.getLogger(name).setLevel(logging.ERROR)


def match_groups_by_kind() -> None:
    """Makes Megatron find the parameter groups of a saved optimizer by the kind of their parameters. 0.19 also compares
    the configured learning rates, and fails where a run is resumed with another one."""
    from megatron.core.optimizer import distrib_optimizer

    assert hasattr(distrib_optimizer, "param_group_identifier_keys"), "megatron-core moved its groups' keys"
    distrib_optimizer.param_group_identifier_keys = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
