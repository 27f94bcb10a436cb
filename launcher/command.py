"""What all launchers use: the argument list to start, and checks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dynamo_megatron.config import Config
from dynamo_megatron.config.files import ConfigError, compose
from dynamo_megatron.runtime.run_folder import refuse_foreign


def program(python: str | Path, command: str, words: Sequence[str]) -> list[str]:
    """Returns the argument list of `dynamo-megatron COMMAND WORDS` under that interpreter."""
    return [str(python), "-P", "-m", "dynamo_megatron.cli", command, *words]


def checked_config(files: Sequence[str], keys: Sequence[str], ranks: int) -> Config:
    """Returns the composed config; errors in it are found now and not after hours in a queue. Needs neither torch nor
    the model.

    Raises ConfigError as `compose` does, for an output_dir with files that are not of a run, and for a number of ranks
    that the layout does not divide.
    """
    config, _ = compose(files, keys)
    refuse_foreign(Path(config.output_dir))
    p = config.parallel
    if ranks % p.model_ranks:
        raise ConfigError(
            f"parallel: {ranks} ranks can't be cut into tp {p.tp} x pp {p.pp} x cp {p.cp} = {p.model_ranks}; "
            "change --nodes, --ranks-per-node or the layout"
        )
    return config


def check_servers(config: Config, nodes: int, server_nodes: int) -> None:
    """Raises ConfigError where the run's own servers are not an equal share for each of `server_nodes`, or cannot be
    reached from the other ones of all its `nodes`."""
    rollout = config.rollout
    if rollout.engine == "recorded" or rollout.placement == "external":
        return
    if rollout.servers % server_nodes:
        raise ConfigError(
            f"rollout.servers: {rollout.servers} servers are not an equal share for each of {server_nodes} nodes"
        )
    if nodes > 1 and "host" not in rollout.model_fields_set:
        raise ConfigError(
            f"rollout.host: its default, {rollout.host}, is out of the other nodes' reach, and there are {nodes}; name "
            "a network interface of all of them, as in rollout.host=ib0"
        )
