"""SIGKILL to a rank before every change of a file that a save makes: the next start finds a complete one, with what was
saved, and the other rank has ended by itself."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")  # events of Python's audit


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("how", ["", "background", "background lora", "background critic"])
def test_a_killed_save_loses_at_most_that_save(make_tiny_model, tmp_path, how):
    """Run as a script, this file prints how many changes of files there were to be killed at, by rank."""
    model = make_tiny_model(tmp_path / "model", layers=2)
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-P", __file__, str(model), str(tmp_path / "run"), how]
    with open(tmp_path / "log", "w+") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        code = subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=1100).returncode
    assert code == 0, (tmp_path / "log").read_text()[-4000:]
    of_rank_0, of_rank_1 = json.loads((tmp_path / "log").read_text().splitlines()[-1])
    assert of_rank_0 >= 5 and of_rank_1 >= 1


def kill_before(change: int, folder: Path) -> None:
    """Kills this process before it makes its `change`-th change of a file in `folder` from now on."""
    lock, made = threading.Lock(), [0]

    def audit(event: str, given: tuple) -> None:
        writes = event == "open" and isinstance(given[2], int) and given[2] & (os.O_WRONLY | os.O_RDWR)
        if (writes or event in CHANGES) and str(given[0]).startswith(str(folder)):
            with lock:
                made[0] += 1
            if made[0] == change:
                os.kill(os.getpid(), 9)

    sys.addaudithook(audit)


def fingerprint(models) -> str:
    """Of this rank's weights and optimizer state."""
    digest = hashlib.sha256()
    for p in (p for model in models for chunk in model.chunks for p in chunk.parameters()):
        digest.update(p.detach().numpy().tobytes())
    for optimizer in (optimizer for model in models for optimizer in model.optimizer.chained_optimizers):
        for state in optimizer.optimizer.state.values():
            for key in sorted(state):
                digest.update(state[key].numpy().tobytes())
    return digest.hexdigest()


def on_rank(config, victim: int, change: int) -> None:
    """Resumes, checks what was found against the notes of earlier rounds, trains two steps and saves the first: the
    next round trains the second again, from the files."""
    from checkpoint_cases import train

    from dynamo_megatron.jobs.training_run import TrainingRun
    from dynamo_megatron.models import load_model_config
    from dynamo_megatron.policy.critic import Critic
    from dynamo_megatron.policy.layout import join_ranks
    from dynamo_megatron.policy.policy import Policy
    from dynamo_megatron.runtime.coordination import connect_store

    layout = join_ranks(config, connect_store(60))
    spec, progress = load_model_config(config.model.path), SimpleNamespace(step=0)  # of rank 0's state
    progress.state_dict, progress.load_state_dict = lambda: {"step": progress.step}, vars(progress).update
    policy, own = Policy(spec, config, layout), config.of_critic
    models = [policy, *([Critic(spec, own, layout)] if own is not None else [])]
    shown = SimpleNamespace(say=print, progress=SimpleNamespace(phase=lambda name: None))
    journal, folder = shown if layout.rank == 0 else None, SimpleNamespace(take_over=lambda step, ranks: None)
    job = SimpleNamespace(config=config, journal=journal, output=folder)
    run = TrainingRun(job, policy, None, {"progress": progress}, critic=models[1] if own is not None else None)
    start, output = run.start, Path(config.output_dir)
    notes = output / f"rank{layout.rank}.jsonl"
    known = dict(map(json.loads, notes.read_text().splitlines())) if notes.exists() else {}
    assert start >= max(known, default=1) - 1, f"two steps were saved before {max(known)}, and {start} was found"
    if start:
        assert fingerprint(models) == known[start], "other weights"
    if layout.rank == 0:
        assert progress.step == start, f"rank 0's state is of step {progress.step}, the weights are of {start}"
    if layout.rank == victim:
        kill_before(change, output / "checkpoints")
    for step in (start + 1, start + 2):
        for model in models:
            train(model, step)
        trained = fingerprint(models)
        assert known.get(step, trained) == trained, f"step {step}, trained again, gives other weights"
        with open(notes, "a") as file:
            file.write(json.dumps([step, trained]) + "\n")
        if step == start + 1:
            progress.step = step
            run.reached(step)
            run.save()
            run.settle()


def main(model: str, folder: Path, how: str) -> None:
    from forked_ranks import fork_ranks

    from dynamo_megatron.config import Config
    from dynamo_megatron.policy import backend

    backend.enable_cpu()
    import dynamo_megatron.policy.policy  # noqa: F401  once, before the ranks are forked

    config = Config.model_validate(
        {
            "model": {"path": model, "dtype": "float32", "lora": {"rank": 4} if "lora" in how else None},
            "data": {"source": "none"},
            "output_dir": str(folder),
            "parallel": {"pp": 2},
            "algorithm": {"modulation": None, "advantage": {"kind": "gae" if "critic" in how else "rloo"}},
            "optimizer": {"warmup_steps": 0},
            "checkpoint": {"async": "background" in how, "keep_last": 1},
            "trainer": {"timeout": 60},
        }
    )
    counts = []
    for victim in (0, 1):
        change, codes = 0, [9]
        while change < 2 or any(codes):  # without a kill at first, and until the save has no such change
            pids = fork_ranks(2, lambda v=victim, c=change: on_rank(config, v, c), folder)
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
            said = "\n".join((folder / f"rank{r}.log").read_text()[-2000:] for r in range(2))
            assert codes[victim] in (0, -9) and codes[1 - victim] in (0, 1), f"{victim} {change} {codes}\n{said}"
            assert "AssertionError" not in said, said
            change += 1
        counts.append(change - 2)
    print(json.dumps(counts))


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent))
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
