"""Servers and ranks that take turns with memory through whole runs, on the CPU: not a bit changes, no server dies."""

import os
import re
import signal
from pathlib import Path

import pytest
from background_run import exported, same_weights, step_lines, timeless

from dynamo_megatron.checkpoint.inspection import describe, differences, inspect
from dynamo_megatron.rollout.store import read_rollouts, step_file

pytestmark = pytest.mark.full
POISONING = Path(__file__).with_name("poisoning_saver")
STEPS = 5
CRITIC = (
    "algorithm.advantage={kind: gae}",
    "algorithm.modulation=null",
    "critic.optimizer={lr: 1.0e-3, warmup_steps: 0}",
)
# A tracker, which is called between a weight sync and the next rollouts: bytes of each model's parts on the device.
WITNESS = """
import gc
from dynamo_megatron.policy.offload import PARTS, Offload
class Resident:
    def __init__(self, config, start):
        self.close = lambda: None
    def write(self, row):
        for offload in [each for each in gc.get_objects() if type(each) is Offload]:
            held = [sum(storage.nbytes() for storage in offload._storages(part)) for part in PARTS]
            print("resident:", type(offload._policy).__name__, *held, flush=True)
"""


def test_servers_live_through_every_phase_and_a_stop(workspace, start_run, tmp_path):
    """On a CPU they free nothing, but die of the same calls: a release in generation, a second one, two ranks'."""
    output = tmp_path / "run"
    keys = ["rollout.offload=true", "rollout.servers=2", "rollout.max_new_tokens=150", "checkpoint.every=2"]
    command = (workspace / "config.yaml", *keys, "trainer.steps=5", f"output_dir={output}")
    run = start_run(workspace, *command)
    stopped_in = step_file(output, 3)
    run.wait_until(lambda: stopped_in.is_file() and stopped_in.stat().st_size, "rollouts of step 3")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 75, run.text[-3000:]
    assert "left the rotation" not in run.text
    again = start_run(workspace, *command)
    assert again.wait() == 0, again.text[-3000:]
    assert "left the rotation" not in again.text
    rows = step_lines(output)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    for row in rows:
        assert row["rollout/logprob_gap_max"] <= 1e-4 and row["fleet/restarts"] == 0
        assert row["time/memory"] > 0


@pytest.fixture
def colocated(workspace, start_run, tmp_path):
    """colocated(name, *keys, poisoned, path=()) -> a run of STEPS steps whose servers and ranks take turns. `poisoned`:
    what the server releases is lost (poisoning_saver/torch_memory_saver.py); `path`: folders to import from."""

    def start(name: str, *keys: str, poisoned: bool, path: tuple[Path, ...] = ()):
        path = (*path, POISONING) if poisoned else path
        keys += ('rollout.server_args=["--enable-memory-saver"]',) if poisoned else ()
        found = os.pathsep.join([*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])])
        keys = ("rollout.offload=true", f"trainer.steps={STEPS}", *keys, f"output_dir={tmp_path / name}")
        return start_run(workspace, workspace / "config.yaml", *keys, environment={"PYTHONPATH": found})

    return start


def test_nothing_that_a_server_has_released_is_read_and_a_push_covers_everything(colocated, tmp_path):
    """Through all phases, to the same bits: generation, log-probs, values, updates of policy and critic, pushes, saves,
    evaluations."""
    keys = (*CRITIC, "checkpoint.every=2", "eval.data=problems.jsonl", "eval.every=2", "eval.samples=2")
    names = ("plain", "poisoned")
    for name in names:
        run = colocated(name, *keys, poisoned=name == "poisoned")
        assert run.wait() == 0, run.text[-3000:]
        assert "left the rotation" not in run.text
    plain, poisoned = (tmp_path / name / "hf" for name in names)
    log = (tmp_path / "poisoned" / "logs" / "sglang-server-0.log").read_text()
    lost = re.findall(r"^lost: (\w+) (\d+)$", log, re.MULTILINE)
    weights = [int(size) for tag, size in lost if tag == "weights"]
    assert len(weights) >= STEPS and min(weights) >= sum(tensor.nbytes for tensor in exported(plain).values())
    assert all(int(size) > 0 for tag, size in lost if tag == "kv_cache")
    assert same_weights(plain, poisoned)
    for row, other in zip(*(step_lines(tmp_path / name) for name in names), strict=True):
        same = {key for key in row if key.startswith(("policy/", "critic/", "reward/", "allocation/", "eval/"))}
        assert {key: other[key] for key in same} == {key: row[key] for key in same}
    for step in range(1, STEPS + 1):
        files = (step_file(tmp_path / name, step) for name in names)
        tokens, others = ({r.rollout_id: r.tokens for r in read_rollouts(file)} for file in files)
        assert tokens == others


def test_policy_and_critic_take_turns_to_the_same_bits(workspace, replay):
    """On recorded rollouts, against a run that keeps both; weights, moments and heads are compared."""
    (workspace / "witness.py").write_text(WITNESS)
    keys = (*CRITIC, "tracking={backends: ['witness:Resident'], profile_steps: [2]}")
    saved, said, rows = [], [], []
    for offload in ("false", "true"):
        code, text, output = replay(f"critic-{offload}", lambda rollout: rollout, *keys, f"rollout.offload={offload}")
        assert code == 0, text[-3000:]
        saved.append(inspect(output / "checkpoints" / "step-000002"))
        rows.append(list(map(timeless, step_lines(output))))
        traces = sorted(trace.name for trace in (output / "profile").iterdir())
        assert traces == [f"step-000002-rank-{rank}.json.gz" for rank in range(2)]
        said.append(re.findall(r"^resident: (\w+) (\d+) (\d+) (\d+)$", text, re.MULTILINE))
    kept, turns = said
    assert kept == [] and {name for name, *_ in turns} == {"Policy", "Critic"}
    for name, *parts in turns:  # the servers' next rollouts need the policy's weights at most
        weights, optimizer, gradients = map(int, parts)
        assert (weights > 0) == (name == "Policy") and optimizer == gradients == 0
    assert "critic: " in describe(saved[0]) and list(differences(*saved)) == [] and rows[0] == rows[1]


LEAVE_OUT = """
import os
if os.environ.get("RANK"):
    from dynamo_megatron.weight_sync.schedule import BucketSource
    gather = BucketSource.gather
    def without_the_last_norm(self, number):
        tensors = gather(self, number)
        if tensors:
            tensors.pop("model.norm.weight", None)
        return tensors
    BucketSource.gather = without_the_last_norm
"""


def test_a_parameter_that_every_push_leaves_out(colocated, tmp_path):
    """Without checksums only a server that has freed its memory tells."""
    (tmp_path / "sitecustomize.py").write_text(LEAVE_OUT)
    keys = ("rollout.proof.checksums=false", "trainer.steps=2")
    run = colocated("run", *keys, poisoned=True, path=(tmp_path,))
    assert run.wait() == 0, run.text[-3000:]
    assert "server-0 left the rotation" in run.text, run.text
