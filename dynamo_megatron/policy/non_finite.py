"""The error of a pass or an update whose results are not finite. A module of its own, since it needs no Megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynamo_megatron.policy.pass_inputs import PassInputs


class NonFiniteError(RuntimeError):
    """A token statistic, loss or gradient norm that is NaN or infinite, or weights that an optimizer step left so;
    raised on every rank. `inputs`: the inputs of the pass, before whose optimizer step it is raised; None for weights.
    """

    def __init__(self, message: str, inputs: PassInputs | None):
        super().__init__(message)
        self.inputs = inputs
