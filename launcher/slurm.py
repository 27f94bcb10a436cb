"""SLURM: an sbatch script that a user can read, keep and submit again, and the rank of an srun task.

The script is a head of #SBATCH lines and variables, rendered here, and `slurm.sh`, the same for every job.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
from collections.abc import MutableMapping, Sequence
from pathlib import Path

from dynamo_megatron.config.files import ConfigError
from dynamo_megatron.launcher.options import check_servers, checked_config, completed, program

BODY = Path(__file__).with_name("slurm.sh")
SHELLCHECK = "# shellcheck disable=SC2016,SC2054  # values are not for bash to expand; commas are within them"


def launch(options: argparse.Namespace, files: Sequence[str], keys: Sequence[str]) -> int:
    """Writes output_dir/train.sbatch and submits it, or prints it. Raises ConfigError; returns an exit code."""
    job = completed(options)
    config = checked_config(files, keys, job.ranks, requeued=True)
    if job.gpus_per_node:
        config = config.with_servers(job.ranks, job.nodes)
    if (config.rollout.placement == "split") != (job.rollout_nodes > 0):
        raise ConfigError("--rollout-nodes: goes with rollout.placement=split, which needs at least one of them")
    check_servers(config, job.nodes + job.rollout_nodes, job.rollout_nodes or job.nodes, job.gpus_per_node)
    output = Path(config.output_dir).absolute()
    script = render(job, files, keys, output)
    if job.dry_run:
        print(script, end="")
        return 0
    file = output / "train.sbatch"
    try:
        (output / "logs").mkdir(parents=True, exist_ok=True)  # SLURM creates no folder for a job's output
        file.write_text(script, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"output_dir: {file} cannot be written: {error.strerror}") from None
    if shutil.which("sbatch") is None:
        raise ConfigError(f"sbatch: not found here; submit {file} on a machine of the cluster, or use --dry-run")
    if subprocess.run(["sbatch", str(file)], check=False).returncode:  # it prints one line to stdout
        return 1
    print(f"script: {file}\nlogs: {output / 'logs'}", flush=True)
    if not job.time:
        before = f"{job.stop_before} s before the partition's own limit, which must be longer"
        print(f"no --time: the run is stopped {before}; give --time or --stop-before")
    return 0


def render(job: argparse.Namespace, files: Sequence[str], keys: Sequence[str], output: Path) -> str:
    """Returns the script that trains into `output` (absolute), run in the current folder. Raises ConfigError for a path
    that SLURM cannot write to."""
    if set(str(output)) & set('\\\n"'):
        raise ConfigError(f"output_dir: {str(output)!r}: SLURM takes no backslash, quote or line break in a log's path")
    words = [*files, *keys]
    commands = {"train": program(job.python, "train", words), "serve": [], "options": job.srun}
    if job.rollout_nodes:
        servers = program(job.python, "serve", ["--nodes", str(job.rollout_nodes), *words])
        commands["serve"] = ["bash", "-c", 'exec "$@" --node "$SLURM_PROCID"', "serve", *servers]
    variables = {
        "output": str(output),
        "train_nodes": job.nodes,
        "rollout_nodes": job.rollout_nodes,
        "ranks_per_node": job.ranks_per_node,
        "last_call": min(60, job.stop_before // 2),  # seconds before the limit
    }
    head = ["#!/bin/bash", SHELLCHECK, *(f"#SBATCH {line}" for line in sbatch_lines(job, output)), ""]
    head += [f"{name}={shlex.quote(str(value))}" for name, value in variables.items()]
    head += [f"{name}=({shlex.join(argv)})" for name, argv in commands.items()]
    return "\n".join(head) + "\n\n" + BODY.read_text(encoding="utf-8")


def sbatch_lines(job: argparse.Namespace, output: Path) -> list[str]:
    """Returns what follows #SBATCH on each line; the user's own options come last, and so take precedence."""
    pattern = str(output).replace("%", "%%")
    options = {
        "job-name": output.name,
        "nodes": job.nodes + job.rollout_nodes,
        "ntasks-per-node": job.ranks_per_node,
        "gpus-per-node": job.gpus_per_node or None,
        "cpus-per-task": job.cpus_per_task,
        "partition": job.partition,
        "account": job.account,
        "time": job.time,
        "signal": f"B:USR1@{job.stop_before}",  # to this script, which notifies the ranks
        "open-mode": "append",
        "chdir": Path.cwd(),
        "output": f"{pattern}/logs/slurm-%j.out",
    }
    lines = [f"--{name}={sbatch_quote(str(value))}" for name, value in options.items() if value is not None]
    own = (option.partition("=") for option in job.sbatch)
    return [*lines, "--requeue", *(f"{name}={sbatch_quote(value)}" if equals else name for name, equals, value in own)]


def sbatch_quote(value: str) -> str:
    """Quotes a value: sbatch splits #SBATCH lines at blanks outside of double quotes and drops what follows a #."""
    if value and not set(value) & set(" \t#'\"\\"):
        return value
    escaped = value.replace("\\", r"\\").replace('"', r"\"")
    return f'"{escaped}"'


def adopt_rank(environment: MutableMapping[str, str]) -> None:
    """Sets RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE where this process is a task of an srun step and no
    launcher has set them. The script sets MASTER_ADDR; a step of one task without it is a shell, not a rank.

    Raises ConfigError for several tasks without a MASTER_ADDR, and for a RANK without a WORLD_SIZE or MASTER_ADDR.
    """
    for name in ("WORLD_SIZE", "MASTER_ADDR"):
        if "RANK" in environment and name not in environment:
            raise ConfigError(f"RANK: set without {name}; set both, as torchrun does, or unset RANK")
    if "RANK" in environment or "SLURM_STEP_ID" not in environment or "SLURM_PROCID" not in environment:
        return
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if "MASTER_ADDR" not in environment:
        if tasks != "1":
            raise ConfigError(
                f"MASTER_ADDR: not set in this srun step of {tasks} tasks; export it and MASTER_PORT (rank 0's node, a "
                "free port), or use dynamo-megatron launch slurm"
            )
        return
    environment["RANK"] = environment["SLURM_PROCID"]
    environment["WORLD_SIZE"] = tasks
    environment["LOCAL_RANK"] = environment["SLURM_LOCALID"]
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE", tasks)
    environment["LOCAL_WORLD_SIZE"] = per_node.partition("(")[0].partition(",")[0]
