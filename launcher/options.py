"""What the launchers share: options, the argument list to start, checks; without nemo-run and without torch."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo_megatron.errors import ConfigError
from dynamo_megatron.runtime.run_folder import refuse_foreign

if TYPE_CHECKING:  # `--help` does without pydantic
    from dynamo_megatron.config import Config

CORES = 8  # of a rank on a GPU: itself, the processes of its server, reward workers; nodes have 12 or more for each
TIME = re.compile(r"(?:(?P<days>\d+)-(?P<rest>\d+(:\d+){0,2})|\d+(:\d+){0,2})")


def completed(options: argparse.Namespace) -> argparse.Namespace:
    """The options of a job on a SLURM cluster (JOB), with what follows from them: `ranks` and `cpus_per_task`. Raises
    ConfigError for values that no cluster accepts."""
    own = options.sbatch
    options.ranks_per_node = options.ranks_per_node or options.gpus_per_node or 1
    options.ranks = options.nodes * options.ranks_per_node
    given = not options.gpus_per_node or any(option.startswith("--cpus-per-") for option in own)
    options.cpus_per_task = None if given else CORES
    limit = (_seconds(options.time) or None) if options.time else None  # 0: none
    if options.stop_before is None:
        options.stop_before = 1800 if limit is None else min(1800, limit // 4)
    elif limit is not None and options.stop_before >= limit:
        raise ConfigError(f"--stop-before: {options.stop_before} s must be below --time ({limit} s)")
    if not options.gpus_per_node and any(re.match("--(gres=gpu|gpus)", option) for option in own):
        raise ConfigError("--sbatch: request GPUs with --gpus-per-node, one rank each")
    if any(option.partition("=")[0] == "--time" for option in own):
        raise ConfigError("--sbatch: give the limit with --time, which --stop-before is measured from")
    if wrong := [option for option in own + options.srun if not re.fullmatch(r"--[a-z][a-z-]*(=[^\n]*)?", option)]:
        raise ConfigError(f"--sbatch, --srun: {wrong[0]!r} is no --option or --option=value")
    return options


def _seconds(time: str) -> int:
    """The seconds of a time limit: minutes, minutes:seconds, hours:minutes:seconds, or days-hours with or without the
    rest. Raises ConfigError."""
    if (match := TIME.fullmatch(time)) is None:
        raise ConfigError(f"--time: {time!r} is none of minutes, HH:MM:SS, D-HH, D-HH:MM:SS")
    parts = [int(part) for part in (match["rest"] or time).split(":")]
    hours, minutes, seconds = [*parts, 0, 0][:3] if match["days"] or len(parts) == 3 else [0, *parts, 0][:3]
    return ((int(match["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _count_or_0(text: str) -> int:
    return 0 if text == "0" else positive(text)


def option(*names: str, **how: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The arguments of a parser's `add_argument`."""
    return names, how


JOB = (  # of slurm and nemo
    option("--nodes", type=positive, default=1, help="nodes that train (default 1)"),
    option("--gpus-per-node", type=_count_or_0, default=0, metavar="N", help="default 0: a CPU run"),
    option("--ranks-per-node", type=positive, metavar="N", help="default: a node's GPUs, at least 1"),
    option("--partition", help="default: the cluster's"),
    option("--account", help="default: the user's"),
    option("--time", metavar="LIMIT", help="minutes, HH:MM:SS, D-HH ...; default: the partition's"),
    option(
        "--stop-before",
        type=positive,
        metavar="SECONDS",
        help="before the limit: save at the next safe point, exit 75 and requeue (default: 1800, at most a quarter of "
        "--time; `plan` prints what a run needs)",
    ),
    option(
        "--sbatch",
        action="append",
        default=[],
        metavar="=--OPTION[=value]",
        help=f"any option of sbatch, as in --sbatch=--mem=500G; repeatable; --cpus-per-task is {CORES} with GPUs",
    ),
    option(
        "--srun",
        action="append",
        default=[],
        metavar="=--OPTION[=value]",
        help="any option of srun for ranks and servers, as in --srun=--container-image=IMAGE; repeatable",
    ),
    option("--dry-run", action="store_true", help="print the script, submit nothing"),
)
SLURM = (
    option("--python", metavar="PATH", default=sys.executable, help="of the ranks (default: this command's own)"),
    option(
        "--rollout-nodes",
        type=_count_or_0,
        default=0,
        metavar="K",
        help="further nodes that only run SGLang servers, for rollout.placement=split (default 0: none)",
    ),
)
NEMO = (
    option("--python", metavar="PATH", required=True, help="the trainer's; this command's own has nemo-run, not torch"),
    option("--executor", choices=("local", "slurm"), default="local", help="default: this machine"),
    option("--convert", action="store_true", help="convert the model first, into output_dir"),
    option("--eval", action="store_true", help="evaluate what was trained"),
)


def program(python: str | Path, command: str, words: Sequence[str]) -> list[str]:
    """Returns the argument list of `dynamo-megatron COMMAND WORDS` under that interpreter."""
    return [str(python), "-P", "-m", "dynamo_megatron.cli", command, *words]


def checked_config(files: Sequence[str], keys: Sequence[str], ranks: int, *, requeued: bool = False) -> Config:
    """Returns the composed config; errors in it are found now and not after hours in a queue. Needs neither torch nor
    the model.

    Raises ConfigError as `compose` does, for an output_dir with files that are not of this run, for a number of ranks
    that the layout does not divide, and for a job that may be `requeued` and must not resume.
    """
    from dynamo_megatron.config.files import compose

    config, _ = compose(files, keys)
    if config.dpo is not None:
        raise ConfigError("dpo: is for the command dpo, and the job runs train; take it out")
    try:
        from dynamo_megatron.jobs.output_dir import OutputDir
    except ModuleNotFoundError:  # an environment for launchers alone, without zstandard
        refuse_foreign(Path(config.output_dir))
    else:
        OutputDir(config).check()
    if requeued and config.trainer.resume == "never":
        raise ConfigError("trainer.resume: never: the job could not go on once it is requeued; set auto")
    if misfit := config.parallel.misfit(ranks):
        raise ConfigError(misfit)
    return config


def check_servers(config: Config, nodes: int, server_nodes: int, gpus_per_node: int | None = None) -> None:
    """Raises ConfigError where the run's own servers are not an equal share for each of `server_nodes`, do not fit on
    its GPUs (None: their number is not known), or cannot be reached from the other ones of all its `nodes`."""
    rollout = config.rollout
    if rollout.engine == "recorded" or rollout.placement == "external":
        return
    if rollout.placement == "split" and "servers" not in rollout.model_fields_set:
        raise ConfigError(
            "rollout.servers: missing; with placement split name how many servers the nodes without ranks have"
        )
    if rollout.servers % server_nodes:
        raise ConfigError(
            f"rollout.servers: {rollout.servers} servers are not an equal share for each of {server_nodes} nodes"
        )
    here = rollout.servers // server_nodes
    if gpus_per_node and here * rollout.tp > gpus_per_node:
        raise ConfigError(
            f"rollout.servers: {here} x rollout.tp {rollout.tp} do not fit on the {gpus_per_node} GPUs of a node"
        )
    if nodes > 1 and "host" not in rollout.model_fields_set:
        raise ConfigError(
            f"rollout.host: its default, {rollout.host}, is out of the other nodes' reach, and there are {nodes}; name "
            "a network interface of all of them, as in rollout.host=ib0"
        )
