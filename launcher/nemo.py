"""nemo-run: conversion, training and evaluation as the tasks of an experiment, on this machine or on a SLURM cluster.

Runs in an interpreter that has nemo-run, without torch: nemo-run's pins conflict with SGLang's. The tasks run in the
trainer's interpreter.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import nemo_run as run
from nemo_run.config import get_nemorun_home

from dynamo_megatron.config.files import ConfigError, compose
from dynamo_megatron.launcher.options import check_servers, checked_config, completed, program

# nemo-run's sbatch script has `set -vx`, which prints a line for each of its own, and requeues whatever has failed. Its
# head_node_ip is the address of the node's name on the node itself, 127.0.1.1 on many. The rest is as in slurm.sh.
SETUP = r"""set +vx
MASTER_ADDR=$(scontrol show node "$head_node" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
[[ -z ${SLURM_CPUS_PER_TASK:-} ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
[[ -n ${OMP_NUM_THREADS:-} ]] || export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1} DYNAMO_MEGATRON_RANK_THREADS=1
export MASTER_ADDR MASTER_PORT=$((12000 + (SLURM_JOB_ID * 8 + ${SLURM_RESTART_COUNT:-0}) % 20000))
# Exit code 75 is a run that was stopped and goes on where it is started again; nothing else is worth a requeue.
scontrol() { if [ "$1" != requeue ] || [ "${exitcode:-}" = 75 ]; then command scontrol "$@"; fi; }
"""


def recipe(
    files: Sequence[str],
    keys: Sequence[str],
    python: str,
    executor: run.Executor,
    *,
    convert: bool = False,
    evaluate: bool = False,
) -> dict[str, str]:
    """Returns the tasks of an experiment, each a name and bash text, in their order: a training, before it the
    conversion of its model and after it an evaluation where asked for. Raises ConfigError, also for what `executor`
    cannot run."""
    config, _ = compose(files, keys)
    skip = "if [ -e {} ]; then exit 0; fi\n"  # of a task that an earlier experiment has done
    output, words = Path(config.output_dir).absolute(), [*files, *keys]
    commands: dict[str, list[str]] = {}
    there: dict[str, str] = {}
    if convert:
        model = os.path.abspath(config.model.path)
        converted = output / f"mcore-{zlib.crc32(model.encode()):08x}"  # not another model's
        commands["convert"] = program(python, "convert", ["hf2mcore", config.model.path, str(converted)])
        words.append(f"model.path={converted}")
        there["convert"] = skip.format(shlex.quote(str(converted)))
    _check(files, words[len(files) :], executor)
    commands["train"] = program(python, "train", words)
    if evaluate:
        scores = output / "scores" / f"step-{config.trainer.steps:06d}"
        commands["eval"] = program(python, "eval", ["--model", str(output), "--out", str(scores)])
        there["eval"] = skip.format(shlex.quote(str(scores / "config.yaml")))
    start = f"cd {shlex.quote(os.getcwd())}\n"
    return {name: f"{there.get(name, '')}{start}exec {shlex.join(argv)}\n" for name, argv in commands.items()}


def _check(files: Sequence[str], keys: Sequence[str], executor: run.Executor) -> None:
    if compose(files, keys)[0].rollout.placement == "split":
        raise ConfigError("rollout.placement: nemo-run starts no servers, which split needs; use launch slurm")
    if isinstance(executor, run.SlurmExecutor):
        ranks = executor.nodes * executor.ntasks_per_node
        config = checked_config(files, keys, ranks, requeued=True)
        if executor.gpus_per_node:
            config = config.with_servers(ranks, executor.nodes)
        check_servers(config, executor.nodes, executor.nodes, executor.gpus_per_node)


@contextlib.contextmanager
def experiment(name: str, tasks: Mapping[str, str], executor: run.Executor) -> Iterator[run.Experiment]:
    """Yields nemo-run's context with the tasks in it, each to run once the one before has succeeded, not started. On
    SLURM they are jobs, of one rank but for the training; on this machine one script."""
    # nemo-run makes paths of names and does not quote them
    plain = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name)
    with run.Experiment(plain, executor=executor) as opened:
        if isinstance(executor, run.SlurmExecutor):
            before: list[str] = []
            for task, script in tasks.items():
                own = executor.clone()
                if task != "train":
                    own.nodes = own.ntasks_per_node = 1
                    own.signal = None  # it would end what cannot save
                before = [opened.add(run.Script(inline=script), executor=own, name=task, dependencies=before)]
        else:  # nemo-run's local executor goes on after a failure
            script = "set -e\n" + "".join(f"(\n{script})\n" for script in tasks.values())
            opened.add(run.Script(inline=script), executor=executor.clone(), name="-".join(tasks))
        yield opened


def launch(options: argparse.Namespace, files: Sequence[str], keys: Sequence[str]) -> int:
    """Runs the experiment on this machine or submits it, or prints what would be run. Returns an exit code: 0 if it
    succeeded or was submitted. Raises ConfigError."""
    job = completed(options)
    on_slurm = options.executor == "slurm"
    executor = _slurm_executor(job) if on_slurm else run.LocalExecutor()
    tasks = recipe(files, keys, job.python, executor, convert=options.convert, evaluate=options.eval)
    with experiment(Path(compose(files, keys)[0].output_dir).name, tasks, executor) as opened:
        if job.dry_run:
            opened.dryrun()
            return 0
        opened.run(detach=on_slurm, tail_logs=False)
    if on_slurm:
        return 0
    # Only now: leaving the context waits for the script.
    states = {name: str(task["status"]) for name, task in opened.status(return_dict=True).items()}
    for name, state in states.items():
        print(f"{name}: {state}", flush=True)
    return 0 if all(state.endswith("SUCCEEDED") for state in states.values()) else 1


def _slurm_executor(job: argparse.Namespace) -> run.SlurmExecutor:
    for option, value in (("--account", job.account), ("--time", job.time)):
        if value is None:
            raise ConfigError(f"{option}: nemo-run needs it for a SLURM job")
    executor = run.SlurmExecutor(
        account=job.account,
        partition=job.partition,
        nodes=job.nodes,
        ntasks_per_node=job.ranks_per_node,
        gpus_per_node=job.gpus_per_node or None,
        cpus_per_task=job.cpus_per_task,
        time=job.time,
        signal=f"USR1@{job.stop_before}",
        retries=1000,  # only runs that ended with 75 are requeued
        additional_parameters={"requeue": True},
        srun_args=["--mpi=none", "--cpu-bind=none", *map(shlex.quote, job.srun)],
        setup_lines=SETUP,
        packager=run.Packager(),
        tunnel=run.LocalTunnel(job_dir=os.path.join(get_nemorun_home(), "experiments")),
    )
    for option in job.sbatch:
        name, equals, value = option.removeprefix("--").partition("=")
        executor.additional_parameters[name.replace("-", "_")] = value if equals else True
    return executor
