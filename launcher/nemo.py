"""nemo-run: conversion, training and evaluation as the tasks of an experiment, on this machine or on a SLURM cluster.

Runs in an interpreter that has nemo-run, without torch: nemo-run's pins conflict with SGLang's. The tasks run in the
trainer's interpreter.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import shlex
import time
from collections.abc import Iterator, Sequence
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


@dataclasses.dataclass(frozen=True)
class Task:
    """A command of dynamo-megatron, as bash text; `after` names the task that must have succeeded."""

    name: str
    script: str
    after: str | None = None
    one_rank: bool = False


def recipe(
    files: Sequence[str],
    keys: Sequence[str],
    python: str,
    executor: run.Executor,
    tasks: Sequence[str] = ("train",),
    sweep: Sequence[str] = (),
) -> list[Task]:
    """Returns the tasks of an experiment: one conversion, and a training and an evaluation for each combination of the
    values in `sweep` (key=value,value). Raises ConfigError, also for what `executor` cannot run."""
    config, _ = compose(files, keys)
    base = Path(config.output_dir).absolute()
    found, after, words = [], None, [*files, *keys]
    if "convert" in tasks:
        source, converted = config.model.path, base / "mcore"
        script = _script(program(python, "convert", ["hf2mcore", source, str(converted)]))
        found.append(Task("convert", f"if [ -e {shlex.quote(str(converted))} ]; then exit 0; fi\n{script}", None, True))
        after = "convert"
        words.append(f"model.path={converted}")
    for chosen in _combinations(sweep):
        suffix = "".join(f"-{key.rpartition('.')[2]}-{value}" for key, value in chosen)
        output = base / suffix[1:].replace("/", "_") if chosen else base
        own = [*words, *(f"{key}={value}" for key, value in chosen), f"output_dir={output}"]
        name = _plain(suffix)
        before = after
        if "train" in tasks:
            _check(files, own[len(files) :], executor)
            found.append(Task(f"train{name}", _script(program(python, "train", own)), before))
            before = f"train{name}"
        if "eval" in tasks:
            scores = ["--model", str(output), "--out", str(output / "scores")]
            found.append(Task(f"eval{name}", _script(program(python, "eval", scores)), before, True))
    return found


def _check(files: Sequence[str], keys: Sequence[str], executor: run.Executor) -> None:
    if compose(files, keys)[0].rollout.placement == "split":
        raise ConfigError("rollout.placement: nemo-run starts no servers, which split needs; use launch slurm")
    if isinstance(executor, run.SlurmExecutor):
        ranks = executor.nodes * executor.ntasks_per_node
        config = checked_config(files, keys, ranks)
        if executor.gpus_per_node:
            config = config.with_servers(ranks, executor.nodes)
        check_servers(config, executor.nodes, executor.nodes)


def _combinations(sweep: Sequence[str]) -> list[tuple[tuple[str, str], ...]]:
    choices = []
    for entry in sweep:
        key, equals, values = entry.partition("=")
        if not equals or not all(values.split(",")):
            raise ConfigError(f"--sweep: {entry!r} is not key=value,value,...")
        choices.append([(key, value) for value in values.split(",")])
    return list(itertools.product(*choices))


def _plain(name: str) -> str:
    """Returns `name` with "-" for all but ASCII letters and digits: nemo-run makes paths of names and does not quote
    them."""
    return "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name)


def _script(argv: Sequence[str]) -> str:
    return f"cd {shlex.quote(os.getcwd())}\nexec {shlex.join(argv)}\n"


@contextlib.contextmanager
def experiment(name: str, tasks: Sequence[Task], executor: run.Executor) -> Iterator[run.Experiment]:
    """Yields nemo-run's context with the tasks in it, not started. On SLURM they have their dependencies, and a task of
    one rank runs on one node; on this machine they are to be run with `sequential`."""
    done = Path(get_nemorun_home(), "done", f"{_plain(name)}-{time.time_ns()}")
    ids: dict[str, str] = {}
    with run.Experiment(_plain(name), executor=executor) as opened:
        for task in tasks:
            own = executor.clone()
            if isinstance(own, run.SlurmExecutor):
                if task.one_rank:
                    own.nodes = own.ntasks_per_node = 1
                script, after = task.script, [ids[task.after]] if task.after else []
            else:
                script, after = _guarded(task, done), []
            ids[task.name] = opened.add(run.Script(inline=script), executor=own, name=task.name, dependencies=after)
        yield opened


def _guarded(task: Task, done: Path) -> str:
    """Returns a script that runs the task only after `task.after` has succeeded: the local executor runs it even after
    a failure."""
    check = f"[ -e {done}/{task.after} ] || {{ echo '{task.after} has not succeeded' >&2; exit 1; }}\n"
    marked = f"(\n{task.script})\ncode=$?\n[ $code -ne 0 ] || touch {done}/{task.name}\nexit $code\n"
    return f"mkdir -p {done}\n{check if task.after else ''}{marked}"


def launch(options: argparse.Namespace, files: Sequence[str], keys: Sequence[str]) -> int:
    """Runs the experiment, or prints what would be run. Returns an exit code: 0 if all tasks succeeded or, detached,
    were submitted. Raises ConfigError."""
    job = completed(options)
    if options.venv is None and not options.container_image:
        raise ConfigError("--venv: name the trainer's virtual environment; this command's own has nemo-run, not torch")
    on_slurm = options.executor == "slurm"
    output = Path(compose(files, keys)[0].output_dir).absolute()
    executor = _slurm_executor(job, str(output)) if on_slurm else run.LocalExecutor()
    tasks = recipe(files, keys, job.python, executor, options.tasks, options.sweep)
    with experiment(output.name, tasks, executor) as opened:
        if job.dry_run:
            opened.dryrun()
            return 0
        opened.run(sequential=not on_slurm, detach=options.detach, tail_logs=False)
    if options.detach:
        return 0
    # Only now: leaving the context waits for tasks that run on a cluster.
    states = {name: str(task["status"]) for name, task in opened.status(return_dict=True).items()}
    for name, state in states.items():
        print(f"{name}: {state}", flush=True)
    return 0 if all(state.endswith("SUCCEEDED") for state in states.values()) else 1


def _slurm_executor(job: argparse.Namespace, output: str) -> run.SlurmExecutor:
    for option, value in (("--account", job.account), ("--time", job.time)):
        if value is None:
            raise ConfigError(f"{option}: nemo-run needs it for a SLURM job")
    setup = SETUP
    if job.container_image:
        setup += f"mkdir -p {shlex.quote(output)}\n"  # only a folder that exists can be mounted
    executor = run.SlurmExecutor(
        account=job.account,
        partition=job.partition,
        nodes=job.nodes,
        ntasks_per_node=job.ranks_per_node,
        gpus_per_node=job.gpus_per_node or None,
        cpus_per_task=job.cpus_per_task,
        time=job.time,
        signal=f"USR1@{job.stop_before}",
        retries=job.retries,
        additional_parameters={"requeue": True},
        srun_args=["--mpi=none", "--cpu-bind=none"],
        setup_lines=setup,
        packager=run.Packager(),
        tunnel=run.LocalTunnel(job_dir=os.path.join(get_nemorun_home(), "experiments")),
    )
    for option in job.sbatch:
        name, equals, value = option.removeprefix("--").partition("=")
        executor.additional_parameters[name.replace("-", "_")] = value if equals else True
    if job.container_image:
        mounts = [f"{folder}:{folder}" for folder in dict.fromkeys((os.getcwd(), output))]
        mounts += filter(None, (job.container_mounts or "").split(","))
        executor.container_image = shlex.quote(job.container_image)  # nemo-run does not
        executor.container_mounts = [shlex.quote(mount) for mount in mounts]
    if job.ssh:
        user, _, host = job.ssh.rpartition("@")
        executor.tunnel = run.SSHTunnel(host=host, user=user, job_dir=job.job_dir)
    return executor
