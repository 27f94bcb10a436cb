"""What the faults of a soak expect of a run, shown on the part of it that they meet."""

import json
import random
import re
import urllib.request
from types import SimpleNamespace

import pytest
import soak_faults
from soak_faults import FAULTS, Fault, broken_files, lost_files
from soak_run import Soak, judged
from soak_service import RewardService
from soak_site import Site

from dynamo_megatron.checkpoint.folder import choose_checkpoint, write_manifest
from dynamo_megatron.config import Config
from dynamo_megatron.config.files import ConfigError
from dynamo_megatron.jobs.output_dir import OutputDir
from dynamo_megatron.tracking.metrics import StepLog, read_rows

SAYS = {fault.name: fault.says for fault in FAULTS}
ANSWERS_WITHIN = 60.0  # seconds for the reward service, on a machine that holds its thread up


class Folder:
    """The output folder of a run that has saved steps 10 and 20 and was killed in step 23: a site without processes."""

    def __init__(self, folder):
        self.disk, self.output = folder, folder / "run"
        config = {"model": {"path": "m"}, "data": {"source": "s"}, "output_dir": str(self.output)}
        self.config = Config(**config)
        for step in (10, 20):
            checkpoint = self.output / "checkpoints" / f"step-{step:06d}"
            checkpoint.mkdir(parents=True)
            for name in ("state.json", "__0_0.distcp", "__1_0.distcp"):
                (checkpoint / name).write_text("{}")
            write_manifest(checkpoint, {"step": step, "model": {}, "dtype": "float32", "layout": None})
        for name in ("metrics", "allocation"):
            rows = [json.dumps({"step": step, "n": 8, "reward/mean": 0.5}) + "\n" for step in range(1, 23)]
            (self.output / f"{name}.jsonl").write_text("".join(rows))
        OutputDir(self.config).take_over(0)
        self.run = SimpleNamespace(process=SimpleNamespace(wait=lambda: None))
        self.said = []

    def wait(self, condition, timeout):
        return condition()

    def refused(self, says):
        with pytest.raises(ConfigError) as error:
            OutputDir(self.config).finished()
        assert re.search(says, str(error.value)) and "\n" not in str(error.value)
        self.said.append(str(error.value))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(soak_faults, "kill_everything", lambda site, rng: "")
    return Folder(tmp_path)


@pytest.mark.parametrize("seed", range(4))
def test_a_broken_file_is_refused_and_torn_lines_are_dropped(folder, seed):
    broken_files(folder, random.Random(seed))
    assert len(folder.said) == 2
    assert OutputDir(folder.config).finished() is None
    for name in ("metrics.jsonl", "allocation.jsonl"):
        file = folder.output / name
        assert not file.read_bytes().endswith(b"\n")
        StepLog(file, 20).close()
        assert [row["step"] for row in read_rows(file)] == list(range(1, 21))


@pytest.mark.parametrize("seed", range(8))
def test_a_run_falls_back_where_its_newest_checkpoint_lost_a_file(folder, seed):
    lost_files(folder, random.Random(seed))
    assert len(folder.said) == 1
    assert OutputDir(folder.config).finished() is None
    said = []
    step, _ = choose_checkpoint(folder.output / "checkpoints", said.append)
    assert step == 10 and len(said) == 1
    assert re.search(SAYS["checkpoint lost a file"], said[0])


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (["step 3: a rank was killed"], None),
        ([], "no line matches 'killed'"),
        (["step 3: a rank was killed"] * 2, "2 lines instead of 1: "),
        (["step 3: a rank was killed", "step 3: something"], "a line of something else: 'step 3: something'"),
        (["Traceback (most recent call last): killed"], "a traceback on the console"),
    ],
)
def test_a_fault_has_the_lines_that_are_expected_and_no_others(lines, problem):
    found = judged(Fault("rank killed", hurt=None, says="killed"), lines)
    assert found == [] if problem is None else len(found) == 1 and found[0].startswith(problem)
    silent = judged(Fault("rank killed", hurt=None, says="killed", silent=True), lines)
    assert silent == ([] if not lines else found)


@pytest.mark.parametrize(
    ("code", "text", "left", "problem"),
    [
        (2, "output_dir: another process trains there", [], None),
        (0, "output_dir: another process trains there", [], "ended with exit code 0"),
        (2, "output_dir: another process trains there\nand more", [], "ended with exit code 2 and "),
        (2, "output_dir: no such folder", [], "not with 2 and 'another process'"),
        (2, "", [], "ended with exit code 2 and []"),
        (2, "output_dir: another process trains there", [SimpleNamespace(name=lambda: "sglang")], "left after 30 s"),
    ],
)
def test_a_start_is_refused_with_one_line_and_leaves_no_process(code, text, left, problem):
    site = Site.__new__(Site)
    site.run = SimpleNamespace(text="disk: 1 GB free\nstep   1/20  reward  0.5\n")
    process = SimpleNamespace(poll=lambda: code)
    other = SimpleNamespace(text=f"disk: 2 GB free\n{text}\n", process=process)
    other.wait, other.left_behind = lambda timeout: code, lambda within: left
    site._started = lambda: other
    if problem is None:
        assert site.refused("another process") == text
    else:
        with pytest.raises(ValueError, match=re.escape(problem)):
            site.refused("another process")


def test_steps_that_a_run_does_once_more_are_audited_once_more(tmp_path):
    site = SimpleNamespace(saved=10, step=10, output=tmp_path, start=lambda: None, alive=lambda: True)
    site.wait = lambda condition, timeout: True
    soak = Soak(site, every=8, steps=40, minutes=None, audited=dict.fromkeys(range(1, 21), 256))
    assert soak._starts_again()
    assert soak.audited == dict.fromkeys(range(1, 11), 256)
    row = {"step": 11, "rollout/aborted": 0.0, "rollout/failed": 0.0, "rollout/rejected": 0.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "allocation.jsonl").write_text(json.dumps({"step": 11, "n": 8}) + "\n")
    soak._audit(11)
    assert soak.audited[11] == 8 and soak.problems[0].startswith("step 11: "), "its rollouts are not on disk"


def asked(service: RewardService, samples: int) -> list | None:
    body = json.dumps({"samples": [{}] * samples}).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(service.url, body), timeout=ANSWERS_WITHIN) as reply:
            return json.loads(reply.read())["rewards"]
    except Exception:  # urllib has many for an altered answer
        return None


def test_a_reward_service_alters_its_answers_for_a_while():
    service = RewardService()
    try:
        assert asked(service, 3) == [0.0] * 3
        with service.altering(1.0, seed=5) as done:
            assert asked(service, 3) is None, "the first one is cut off"
            for _ in range(10):
                asked(service, 3)
        assert len(done) == 11 and done[0].startswith("the first ")
        with service.altering(0.0, seed=5) as done:
            answers = [asked(service, 3) for _ in range(3)]
        assert answers == [None, [0.0] * 3, [0.0] * 3] and len(done) == 1
        assert asked(service, 2) == [0.0] * 2
        service.down = True
        assert asked(service, 2) is None
    finally:
        service.close()
