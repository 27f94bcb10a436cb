"""The array of a comparison on a real SLURM: a task each, a signal before the limit, a task that fails."""

import subprocess

import pytest

from dynamo_megatron.launcher.slurm_array import array_script

# As `compare --part I/N`: asked to stop it exits 75, and started again it comes to its end.
PROGRAM = """
part=${2%/*}
trap 'touch "asked-$part"; exit 75' USR1
echo "$*" >>"started-$part"
[[ $part != 3 ]] || exit 1
if [[ $part == 2 && ! -e asked-2 ]]; then
  for _ in {1..600}; do sleep 0.1; done
fi
touch "done-$part"
"""


@pytest.fixture
def job(cluster, tmp_path, monkeypatch):
    """The id of an array of three tasks in `tmp_path`, cancelled with the test."""
    folder = tmp_path / "a folder"
    (folder / "out" / "logs").mkdir(parents=True)
    monkeypatch.chdir(folder)
    (folder / "program.sh").write_text(PROGRAM)
    (folder / "array.sbatch").write_text(array_script(["bash", "program.sh"], 3, folder / "out", ["--mem=10"]))
    number = cluster.tool("sbatch", "--parsable", "array.sbatch")
    yield number
    cluster.tool("scancel", number)
    cluster.wait_until(lambda: not cluster.tool("squeue", "-h", "-j", number), f"the end of {number}", folder)


@pytest.mark.full
def test_a_task_that_is_asked_to_stop_goes_back_to_the_queue(cluster, job, tmp_path):
    folder = tmp_path / "a folder"
    cluster.wait_until((folder / "started-2").exists, "the second task", folder)
    cluster.tool("scancel", "--batch", "--signal=USR1", f"{job}_2")
    cluster.wait_until((folder / "done-2").exists, "the second task's second start", folder)
    assert (folder / "asked-2").exists() and (folder / "started-2").read_text() == "--part 2/3\n" * 2
    cluster.wait_until((folder / "done-1").exists, "the first task", folder)
    assert (folder / "started-1").read_text() == "--part 1/3\n"
    cluster.wait_until(lambda: cluster.field(f"{job}_3", "JobState") == "FAILED", "the third task", folder)
    assert len(list((folder / "out" / "logs").glob(f"slurm-{job}-*.out"))) == 3


def test_the_script_is_sound_bash(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = array_script(["python", "-m", "x", "a spec.yaml"], 2, tmp_path / "out", [])
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    assert "command=(python -m x 'a spec.yaml')" in script
    with pytest.raises(ValueError, match="SLURM takes no backslash"):
        array_script(["x"], 2, tmp_path / 'o"ut', [])
