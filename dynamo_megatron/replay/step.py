"""`dynamo-megatron replay --step RUN N`: a job that repeats the pass of step N that gave NaN or infinity.

In the run's layout the pass is bit-identical on a CPU, and in deterministic mode on a GPU. Keys may change the layout,
the kernels or the micro-batches, to find what the fault depends on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dynamo_megatron.checkpoint.folder import checkpoint_folders, fault, read_manifest, read_state
from dynamo_megatron.config import Config
from dynamo_megatron.config.files import ConfigError, compose
from dynamo_megatron.errors import InputError
from dynamo_megatron.jobs.layout_checks import check_layout
from dynamo_megatron.jobs.run import Job
from dynamo_megatron.models import ModelSpec
from dynamo_megatron.policy.non_finite import NonFiniteError
from dynamo_megatron.runtime.coordination import Coordinator
from dynamo_megatron.runtime.run_folder import FAILED_STEPS

if TYPE_CHECKING:
    from dynamo_megatron.policy.layout import Layout
    from dynamo_megatron.policy.pass_inputs import PassInputs
    from dynamo_megatron.policy.policy import Policy


def find_failed_step(output: Path, step: int) -> Path:
    """The folder that the failed step `step` of the run in `output` has left. Raises ConfigError where there is no
    complete one."""
    steps = dict(checkpoint_folders(output / FAILED_STEPS))
    if step not in steps:
        there = f"there is {', '.join(map(str, steps))}" if steps else "no step of it ended in NaN or infinity"
        raise ConfigError(f"--step: {output} has left no batch of step {step}; {there}")
    if (why := fault(steps[step])) is not None:
        raise ConfigError(f"--step: {steps[step]} is not complete: {why}")
    return steps[step]


def step_config(folder: Path, keys: Sequence[str]) -> tuple[Config, int]:
    """(the run's configuration with `keys` and with `folder` as output_dir, the number of ranks that the run had).
    Raises ConfigError."""
    try:
        plain, ranks = read_state(folder)["failure"]["config"], read_manifest(folder)["layout"]["ranks"]
    except (InputError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder}: not what a failed step leaves: {error}") from None
    config, _ = compose([], keys, plain)
    return config.model_copy(update={"output_dir": str(folder)}), ranks


def local_ranks(asked: int | None, had: int) -> int:
    """The number of ranks to start here: `asked`, or else as many as the run `had`. Raises ConfigError where there are
    GPUs, but too few."""
    ranks = asked or had
    if 0 < (gpus := torch.cuda.device_count()) < ranks:
        what = f"the run had {had}" if asked is None else str(asked)
        raise ConfigError(
            f"--ranks: {what}, and here are {gpus} GPUs; give --ranks and a layout that fits "
            "(parallel.tp=...), or start the command on several nodes with torchrun or srun"
        )
    return ranks


class StepReplay(Job):
    """The job of `replay --step` on each rank. `code`, its exit code, is 0 where the pass gives NaN or infinity again,
    else 1."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.code = 1

    def check(self, ranks: int, *, generates: bool = False) -> dict[str, Any]:
        check_layout(self.config, ranks)
        return {}

    def prepare(self, spec: ModelSpec) -> None:
        """Nothing to prepare: there are no data and no servers."""

    def wait_ready(self, coordinator: Coordinator, layout: Layout) -> None:
        """Nothing to wait for: no process was started."""

    def set_up(self, policy: Policy, coordinator: Coordinator) -> None:
        from dynamo_megatron.checkpoint.policy_state import load_checkpoint  # these need Megatron
        from dynamo_megatron.policy.pass_inputs import PassInputs

        folder = Path(self.config.output_dir)
        load_checkpoint(policy, folder, optimizer=False)
        state = read_state(folder)
        self._message: str = state["failure"]["message"]
        self._policy, self._inputs = policy, PassInputs.from_state(state)

    def run(self) -> None:
        inputs, again = self._inputs, None
        try:
            result = repeat(self._policy, inputs)
        except NonFiniteError as error:
            again = str(error)
        if again is not None:
            self.code = 0
        if self._policy.layout.rank != 0:
            return
        what = {"fit": "update of sft"}.get(inputs.kind, inputs.kind)
        print(f"{self.config.output_dir}: {what}, {len(inputs.sequences.prompt_ids)} sequences")
        print(f"the run said: {self._message}")
        if again is None:
            print(f"NOT reproduced: everything is finite now: {result}", flush=True)
        elif again == self._message:
            print("reproduced: the same message", flush=True)
        else:
            print(f"reproduced, with another message: {again}", flush=True)


def repeat(policy: Policy, inputs: PassInputs) -> str:
    """Repeats the pass on all ranks. Returns a text of its result; raises NonFiniteError where it fails again."""
    sequences, rate = inputs.sequences, inputs.learning_rate
    if inputs.kind == "fit":
        return str(policy.fit(sequences, inputs.weights, rate))
    packed = policy.pack(sequences, inputs.rows, inputs.measured)
    if inputs.kind == "statistics":
        return f"mean logprob {float(policy.token_stats(sequences, packed).logprobs.mean()):g}"
    if inputs.kind == "reference":
        return f"mean logprob {float(policy.reference_logprobs(sequences, packed).mean()):g}"
    if inputs.kind == "implicit":
        return f"mean reward of a token {float(policy.implicit_rewards(sequences, packed).mean()):g}"
    (mini_batch,) = packed
    return str(policy.update(inputs.batch, mini_batch, inputs.stats, inputs.reference_logprobs, rate))
