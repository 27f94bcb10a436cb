"""What all launchers use: the argument list to start, and checks, also for secrets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dynamo_megatron.config import Config
from dynamo_megatron.config.files import ConfigError, compose
from dynamo_megatron.runtime.credentials import SECRET_NAME, SECRET_OPTION, SHORTEST_SECRET, secret_in_url
from dynamo_megatron.runtime.run_folder import refuse_foreign

UNQUOTED = str.maketrans("", "", "'\"\\")  # removes all quoting, to find a value however it is quoted


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


def refuse_secrets(text: str, words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Raises ConfigError where `text`, which is to be written to a file, holds the value of an environment variable
    whose name is that of a secret, where one of `words` looks like a secret, or where a URL in either has one. The
    message never shows the value."""
    bare = text.translate(UNQUOTED)
    for name, value in sorted(environment.items()):
        secret = value.translate(UNQUOTED)
        if SECRET_NAME.search(name) and len(secret) >= SHORTEST_SECRET and secret in bare:
            raise ConfigError(
                f"{name}: its value would be written into the script; leave it out: jobs get the environment of the "
                "submission, or a file of --env-file"
            )
    for word in words:
        if SECRET_OPTION.search(word):
            raise ConfigError(
                f"{word.partition('=')[0]}: looks like a secret, which would be written into the script; leave it to "
                "the environment of the submission or to --env-file"
            )
    for where, said in (("the script", text), ("the options and keys", "\n".join(words))):
        if what := secret_in_url(said.translate(UNQUOTED)):
            raise ConfigError(
                f"{where}: a URL has {what} in it, which would be written into the script; leave it to the environment "
                "of the submission or to --env-file"
            )
