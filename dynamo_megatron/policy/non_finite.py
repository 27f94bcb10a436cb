"""The error of a pass whose results are not finite. A module of its own, since it needs no Megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynamo_megatron.policy.pass_inputs import PassInputs


class NonFiniteError(RuntimeError):
    """A token statistic, loss or gradient norm that is NaN or infinite; raised on every rank, before the optimizer
    step. `inputs`: the inputs of the pass."""

    def __init__(self, message: str, inputs: PassInputs):
        super().__init__(message)
        self.inputs = inputs
