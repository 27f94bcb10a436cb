"""What `launch slurm` writes: read by bash, by shellcheck, and by us."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path

import pytest

from dynamo_megatron.cli import main
from dynamo_megatron.config.files import ConfigError
from dynamo_megatron.launcher.slurm import adopt_rank, render

NASTY = [
    "tracking.name=two words",
    'tracking.name=it\'s "quoted" `date` $HOME $(id) \\ # ; & | * ~ !',
    "tracking.name=line\nbreak",
    "rollout.stop=['\\n\\n', 'x']",
    "tracking.name=Ünï",
    "",
]
CONTAINER = ("--srun=--container-image=/images/it's new.sqsh", "--srun=--container-mounts=/data:/data,/runs:/runs")


def script(job: argparse.Namespace, *keys: str, output: str = "/runs/a") -> str:
    return render(job, ["a config.yaml"], keys, Path(output))


def variables(text: str, name: str) -> list[str]:
    """The words of an array, as bash understands the head of the script."""
    head = text.partition("# ---- from here on")[0]
    body = f'for word in "${{{name}[@]}}"; do printf "%s\\0" "$word"; done'
    done = subprocess.run(["bash", "-c", head + body], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


def test_every_value_survives_bash(job):
    text = script(job(python="/opt/my env/bin/python", rollout_nodes=2), *NASTY)
    python = ["/opt/my env/bin/python", "-P", "-m", "dynamo_megatron.cli"]
    assert variables(text, "train") == [*python, "train", "a config.yaml", *NASTY]
    assert variables(text, "serve")[-len(NASTY) :] == NASTY
    assert variables(text, "options") == []
    assert variables(script(job(*CONTAINER)), "options") == [word.removeprefix("--srun=") for word in CONTAINER]


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="needs shellcheck")
def test_shellcheck(tmp_path, job):
    jobs = [job(), job(nodes=2, rollout_nodes=2, ranks_per_node=8, sbatch="--qos=a b"), job(*CONTAINER)]
    files = [tmp_path / f"{number}.sh" for number in range(len(jobs))]
    for one, file in zip(jobs, files, strict=True):
        file.write_text(script(one, *NASTY))
    here = Path(__file__)
    scripts = [*files, here.with_name("slurm_cluster.sh"), here.parents[2] / "tools" / "debian_packages.sh"]
    done = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_what_sbatch_is_asked(job):
    own = [f"--sbatch={option}" for option in ("--qos=high # one", "--exclusive", "--comment=to be")]
    limits = {"partition": "gpu", "account": "us", "time": "1-00:00:00", "stop_before": 600}
    made = job(*own, nodes=4, rollout_nodes=2, gpus_per_node=8, **limits)
    lines = [line for line in script(made, output="/r/a % b").splitlines() if "#SBATCH" in line]
    assert [line.removeprefix("#SBATCH ") for line in lines] == [
        '--job-name="a % b"',
        "--nodes=6",
        "--ntasks-per-node=8",
        "--gpus-per-node=8",
        "--cpus-per-task=8",
        "--partition=gpu",
        "--account=us",
        "--time=1-00:00:00",
        "--signal=B:USR1@600",
        "--open-mode=append",
        f"--chdir={Path.cwd()}",
        '--output="/r/a %% b/logs/slurm-%j.out"',
        "--requeue",
        '--qos="high # one"',
        "--exclusive",
        '--comment="to be"',
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--time", "soon"), "--time: 'soon' is none of"),
        (("--time", "10", "--stop-before", "600"), "--stop-before: 600 s must be below --time (600 s)"),
        (("--sbatch=--gres=gpu:8",), "--sbatch: request GPUs with --gpus-per-node"),
        (("--sbatch=--time=20",), "--sbatch: give the limit with --time"),
        (("dpo.beta=0.2",), "dpo: is for the command dpo, and the job runs train"),
        (("output_dir=c.yaml/run",), "output_dir: "),
        (("--sbatch=qos",), "--sbatch, --srun: 'qos' is no --option"),
        (("parallel.tp=3", "--nodes", "2"), "parallel: 2 ranks can't be cut into tp 3"),
        (("parallel.ep=3", "--nodes", "2"), "parallel.ep: 3 does not divide the 2 ranks of a pipeline stage"),
        (
            ("rollout.tp=4", "--gpus-per-node", "2"),
            "rollout.servers: 1 x rollout.tp 4 do not fit on the 2 GPUs of a node",
        ),
        (("rollout.servers=3", "--nodes", "2"), "rollout.servers: 3 servers are not an equal share for each of 2"),
        (("rollout.servers=2", "--nodes", "2"), "rollout.host: its default, 127.0.0.1, is out of"),
        (("--rollout-nodes", "1"), "--rollout-nodes: goes with rollout.placement=split"),
        (("rollout.placement=split", "--rollout-nodes", "1"), "rollout.servers: missing; with placement split name"),
        (("trainer.resume=never",), "trainer.resume: never: the job could not go on once it is requeued"),
        (("output_dir=a\\b",), "output_dir: "),
        (("output_dir=.",), "output_dir: . holds c.yaml, which is not of a run"),
    ],
)
def test_what_is_refused_before_anything_is_submitted(words, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("model: {path: m}\ndata: {source: d}\noutput_dir: out\n")
    assert main(["launch", "slurm", "c.yaml", *words]) == 2
    said = capsys.readouterr()
    assert message in said.err and len(said.err.splitlines()) == 1 and not said.out
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]


def test_a_folder_of_another_run_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder, model in ((".", "m"), ("out", "other")):
        Path(folder).mkdir(exist_ok=True)
        Path(folder, "config.yaml").write_text(f"model: {{path: {model}}}\ndata: {{source: d}}\noutput_dir: out\n")
    Path("out/metrics.jsonl").write_text("{}\n")
    assert main(["launch", "slurm", "config.yaml"]) == 2
    assert "out holds a run with another model.path" in capsys.readouterr().err


def test_a_rank_takes_its_place_from_srun():
    task = {"SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "16"}
    task |= {"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "MASTER_ADDR": "n0", "MASTER_PORT": "1"}
    environment = dict(task)
    adopt_rank(environment)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert [environment[name] for name in names] == ["9", "16", "1", "8"]
    others = [
        {**task, "RANK": "3", "WORLD_SIZE": "4"},  # torchrun, Ray
        {name: value for name, value in task.items() if name != "SLURM_STEP_ID"},  # the batch shell
        {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash
        {},
    ]
    for other in others:
        environment = dict(other)
        adopt_rank(environment)
        assert environment == other
    del task["MASTER_ADDR"]
    with pytest.raises(ConfigError, match="MASTER_ADDR: not set in this srun step of 16 tasks"):
        adopt_rank(task)
    with pytest.raises(ConfigError, match="RANK: set without WORLD_SIZE"):
        adopt_rank({"RANK": "0"})
    with pytest.raises(ConfigError, match="RANK: set without MASTER_ADDR"):
        adopt_rank({"RANK": "0", "WORLD_SIZE": "2"})


def test_another_number_of_ranks_than_the_launcher_s_is_refused(monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "n0"}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "c.yaml", "--ranks", "8"]) == 2
    assert "--ranks: 8, but this is one of 4 ranks (WORLD_SIZE)" in capsys.readouterr().err


def test_defaults_of_the_options(job):
    assert (job(gpus_per_node=8, nodes=3).ranks, job().ranks) == (24, 1)
    for time, seconds in ((None, 1800), ("1-0", 1800), ("1:00:00", 900), ("8", 120), ("8:08", 122), ("0-0:10:04", 151)):
        assert job(**({"time": time} if time else {})).stop_before == seconds
