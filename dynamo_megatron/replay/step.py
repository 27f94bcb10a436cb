"""`dynamo-megatron replay --step RUN N`: a job that repeats the pass of step N that gave NaN or infinity.

In the run's layout the pass is bit-identical on a CPU, and in deterministic mode on a GPU. Keys may change the layout,
the kernels or the micro-batches, to find what the fault depends on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo_megatron.checkpoint.folder import checkpoint_folders, fault, read_manifest, read_state
from dynamo_megatron.config import Config
from dynamo_megatron.config.files import ConfigError, compose
from dynamo_megatron.jobs.run import Job
from dynamo_megatron.jobs.start_checks import check_layout
from dynamo_megatron.models import ModelSpec
from dynamo_megatron.policy.non_finite import NonFiniteError, PassInputs
from dynamo_megatron.runtime.coordination import Coordinator
from dynamo_megatron.runtime.run_folder import FAILED_STEPS, PASS_FILE

if TYPE_CHECKING:
    from dynamo_megatron.policy.policy import Policy


def failed_step(output: Path, step: int, keys: Sequence[str]) -> tuple[Config, int]:
    """(the configuration of the run in `output` with `keys`, and with the folder of its failed `step` as output_dir;
    the number of ranks that the run had). Raises ConfigError if there is no complete folder, and for another kind of
    advantages than those that the folder has."""
    folder = dict(checkpoint_folders(output / FAILED_STEPS)).get(step)
    if folder is None or fault(folder) is not None or not (folder / PASS_FILE).is_file():
        raise ConfigError(f"--step: {output / FAILED_STEPS} has no complete folder of step {step}")
    had = read_state(folder)["failure"]["config"]
    config, _ = compose([], keys, had)
    if config.algorithm.advantage != compose([], [], had)[0].algorithm.advantage:
        raise ConfigError("algorithm.advantage: the step is repeated with the advantages that it had; leave it out")
    return config.model_copy(update={"output_dir": str(folder)}), read_manifest(folder)["layout"]["ranks"]


class StepReplay(Job):
    """The job of `replay --step` on each rank. `code`, its exit code, is 0 where the pass gives NaN or infinity again,
    else 1."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.code = 1

    def check(self, ranks: int) -> dict[str, Any]:
        check_layout(self.config, ranks)
        return {}

    def prepare(self, spec: ModelSpec) -> None:
        """Nothing to prepare: there are no data and no servers."""

    def set_up(self, policy: Policy, coordinator: Coordinator) -> None:
        from dynamo_megatron.checkpoint.policy_state import load_checkpoint  # needs Megatron

        self._policy, self._folder = policy, Path(self.config.output_dir)
        load_checkpoint(policy, self._folder, optimizer=False)

    def run(self) -> None:
        inputs, before = PassInputs.load(self._folder / PASS_FILE), read_state(self._folder)["failure"]["message"]
        found, policy = "NOT reproduced: everything is finite now", self._policy
        try:
            packed = policy.pack(inputs.sequences, inputs.rows)
            if inputs.method == "fit":
                policy.fit(inputs.sequences, **inputs.given)
            elif inputs.method == "update":
                policy.update(mini_batch=packed[0], **inputs.given)
            else:
                policy.token_stats(inputs.sequences, packed, **inputs.given)
        except NonFiniteError as error:
            self.code = 0
            again = str(error)
            found = f"reproduced{': the same message' if again == before else f', with another message: {again}'}"
        if policy.layout.rank == 0:
            print(f"{self._folder}: {inputs.method}, {len(inputs.sequences.prompt_ids)} sequences")
            print(f"the run's error: {before}\n{found}", flush=True)
