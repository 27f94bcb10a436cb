"""`launch nemo` with nemo-run itself, which has an interpreter of its own: EXTRA_PYTHON or .venv-extra/bin/python."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEMO_PYTHON = os.environ.get("EXTRA_PYTHON", str(ROOT / ".venv-extra" / "bin" / "python"))
pytestmark = pytest.mark.skipif(not Path(NEMO_PYTHON).is_file(), reason=f"no {NEMO_PYTHON} (make extra)")
SLURM = ("--executor", "slurm", "--account", "us", "--time", "10:00", "--nodes", "2", "--python", "x")


@pytest.fixture
def nemo(tmp_path):
    """nemo(folder, *words) -> (exit code, output) of `launch nemo` in nemo-run's interpreter."""
    environment = {"OMP_NUM_THREADS": "1", "NEMORUN_HOME": str(tmp_path / "nemo"), "COLUMNS": "5000"}

    def run(folder: Path, *words: object) -> tuple[int, str]:
        log = tmp_path / f"nemo-{time.monotonic_ns()}.log"
        with open(log, "w") as file:
            code = subprocess.run(
                [NEMO_PYTHON, "-P", "-m", "dynamo_megatron.cli", "launch", "nemo", *map(str, words)],
                cwd=folder,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=500,
            ).returncode
        return code, log.read_text()

    return run


def test_a_dry_run_prints_the_jobs(nemo, run_folder, tmp_path):
    words = ("config.yaml", f"output_dir={tmp_path / 'run'}", "tracking.name=it's $HOME")
    asked = ("--executor", "slurm", "--account", "us", "--time", "2:00:00", "--nodes", "2", "--sbatch=--qos=high")
    more = ("--convert", "--eval", "--python", "/opt/python", "--srun=--container-image=an image", "--dry-run")
    code, text = nemo(run_folder, *words, *asked, *more)
    assert code == 0, text
    for name in ("convert", "train", "eval"):
        assert f"Task {name}" in text
    for flag in ("account=us", "time=2:00:00", "nodes=2", "qos=high", "signal=USR1@1800", "requeue"):
        assert f"#SBATCH --{flag}" in text
    assert text.count("#SBATCH --signal=") == 1  # of the training
    assert "--mpi=none --cpu-bind=none '--container-image=an image'" in text and "TORCHX_MAX_RETRIES=1000" in text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--executor", "slurm", "--nodes", "2", "--python", "x", "--time", "10"), "--account: nemo-run needs it"),
        ((*SLURM, "rollout.placement=split"), "rollout.placement: nemo-run starts no servers"),
        ((*SLURM, "trainer.resume=never"), "trainer.resume: never: the job could not go on once it is requeued"),
    ],
)
@pytest.mark.full
def test_what_is_refused(nemo, run_folder, words, message):
    code, text = nemo(run_folder, "config.yaml", *words)
    assert code == 2 and message in text.splitlines()[-1], text


@pytest.mark.parametrize(("cores", "threads"), [("12", ["12", "12"]), (None, ["", "1"])])
def test_what_is_set_before_the_ranks_start(cores, threads, tmp_path):
    setup = subprocess.check_output(
        [NEMO_PYTHON, "-P", "-c", "from dynamo_megatron.launcher.nemo import SETUP; print(SETUP)"], text=True
    )
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho NodeName=n0 NodeAddr=10.0.0.3 NodeHostName=n0\n")
    (tmp_path / "scontrol").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "head_node": "n0"}
    environment |= {"SLURM_CPUS_PER_TASK": cores} if cores else {}
    names = ("MASTER_ADDR", "MASTER_PORT", "SRUN_CPUS_PER_TASK", "OMP_NUM_THREADS")
    shown = "; ".join(f'echo "$(printenv {name})"' for name in names)
    said = subprocess.check_output(["bash", "-c", f"{setup}\n{shown}"], env=environment, text=True)
    assert said.splitlines() == ["10.0.0.3", "12056", *threads]


def test_an_evaluation_of_the_step_that_is_there_is_skipped(run_folder, tmp_path):
    keys = [f"output_dir={tmp_path / 'a run'}", "trainer.steps=4"]
    made = (
        "import sys; from nemo_run import LocalExecutor; from dynamo_megatron.launcher.nemo import recipe; "
        "print(recipe(sys.argv[1:2], sys.argv[2:], 'echo', LocalExecutor(), evaluate=True)['eval'])"
    )
    words = [NEMO_PYTHON, "-P", "-c", made, str(run_folder / "config.yaml"), *keys]
    script, scores = subprocess.check_output(words, text=True), tmp_path / "a run" / "scores" / "step-000004"
    said = [subprocess.check_output(["bash", "-c", script], text=True)]
    scores.mkdir(parents=True)
    (scores / "config.yaml").touch()
    said += [subprocess.check_output(["bash", "-c", script], text=True)]
    assert said[0].endswith(f" eval --model {tmp_path / 'a run'} --out {scores}\n") and said[1] == ""


@pytest.mark.full
def test_convert_train_and_eval_on_this_machine(nemo, run_folder, tmp_path):
    output = tmp_path / "a run"
    keys = ("trainer.steps=4", f"eval.data={run_folder / 'problems.jsonl'}", "eval.samples=2", f"output_dir={output}")
    words = ("config.yaml", *keys, "--python", sys.executable, "--convert", "--eval")
    code, text = nemo(run_folder, *words)
    assert code == 0, text[-5000:]
    assert "convert-train-eval: SUCCEEDED" in text
    assert len(list(output.glob("mcore-*/config.json"))) == 1
    assert len((output / "metrics.jsonl").read_text().splitlines()) == 4
    (results,) = (output / "scores" / "step-000004").glob("*/problems.jsonl")
    assert len(results.read_text().splitlines()) == 6
