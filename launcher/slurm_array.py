"""An sbatch array of the runs of a comparison, one run for each task."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from dynamo_megatron.config.files import ConfigError
from dynamo_megatron.launcher.command import refuse_secrets
from dynamo_megatron.launcher.options import check_sbatch
from dynamo_megatron.launcher.slurm import sbatch_option, sbatch_quote

# SLURM signals the script (B:) before the limit; the run saves and exits with 75, and its task is requeued.
BODY = """
asked=
trap 'asked=yes; kill -USR1 "$run"' USR1 TERM
"${command[@]}" --part "$SLURM_ARRAY_TASK_ID/$tasks" &
run=$!
wait "$run"
code=$?
while [[ -n $asked ]] && kill -0 "$run" 2>/dev/null; do # a signal ends a wait
  wait "$run"
  code=$?
done
((code != 75)) || scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
exit "$code"
"""


def array_script(command: Sequence[str], tasks: int, output: Path, sbatch: Sequence[str]) -> str:
    """Returns the script whose task I of 1 to `tasks` is `command --part I/TASKS`, in the current folder; its logs go
    to OUTPUT/logs (absolute). `sbatch`: further options, which take precedence. Raises ConfigError for a path that
    SLURM cannot write to, for what is no option of sbatch, and for secrets that would be written down."""
    check_sbatch(sbatch)
    if set(str(output)) & set('\\\n"'):
        raise ConfigError(f"output_dir: {str(output)!r}: SLURM takes no backslash, quote or line break in a log's path")
    pattern = str(output).replace("%", "%%")
    options = {
        "job-name": output.name,
        "array": f"1-{tasks}",
        "nodes": 1,
        "ntasks": 1,
        "signal": "B:USR1@300",  # seconds before the limit
        "open-mode": "append",
        "chdir": Path.cwd(),
        "output": f"{pattern}/logs/slurm-%A-%a.out",
    }
    lines = [f"--{name}={sbatch_quote(str(value))}" for name, value in options.items()]
    head = ["#!/bin/bash", *(f"#SBATCH {line}" for line in [*lines, "--requeue", *map(sbatch_option, sbatch)]), ""]
    head += [f"command=({shlex.join(command)})", f"tasks={tasks}"]
    script = "\n".join(head) + BODY
    refuse_secrets(script, sbatch, os.environ)
    return script
