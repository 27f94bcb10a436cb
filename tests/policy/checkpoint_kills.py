"""Run by test_checkpoint_kills.py: two ranks train and save until they are killed, resume, and so on, ROUNDS times.

In half of the rounds one rank is killed alone: the other one has to end by itself.

Prints {"rounds", "cut_off": rounds whose kill left a save unfinished, "steps"} as JSON. Fails where a round finds less
than what was complete before, or other weights than those that were saved.
"""

import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

from checkpoint_runs import train
from forked_ranks import fork_ranks

from dynamo_megatron.config import Config
from dynamo_megatron.jobs.checkpoints import Checkpoints
from dynamo_megatron.models import load_model_config
from dynamo_megatron.policy.layout import join_ranks
from dynamo_megatron.policy.policy import Policy
from dynamo_megatron.runtime.coordination import connect_store

RANKS = 2


class Progress:
    """Rank 0's state: the step it is of."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict:
        return {"step": self.step}

    def load_state_dict(self, state: dict) -> None:
        self.step = state["step"]


def fingerprint(policy: Policy) -> str:
    """Of this rank's weights and optimizer state."""
    digest = hashlib.sha256()
    for p in (p for chunk in policy.chunks for p in chunk.parameters()):
        digest.update(p.detach().numpy().tobytes())
    for optimizer in policy.optimizer.chained_optimizers:
        for state in optimizer.optimizer.state.values():
            for key in sorted(state):
                digest.update(state[key].numpy().tobytes())
    return digest.hexdigest()


def rank(config: Config, tell: int) -> None:
    """Resumes, checks what was found against the notes of earlier rounds, trains and saves until it is killed."""
    layout = join_ranks(config, connect_store(60))
    policy, progress = Policy(load_model_config(config.model.path), config, layout), Progress()
    checkpoints = Checkpoints(policy, config, {"progress": progress}, print)
    start = checkpoints.resume()
    notes = Path(config.output_dir) / f"rank{layout.rank}.jsonl"
    known = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
    complete = max((note["complete"] for note in known), default=0)
    assert start >= complete, f"step {complete} was saved, step {start} was found"
    if start:
        assert fingerprint(policy) == [n["fingerprint"] for n in known if n["step"] == start][-1], "other weights"
    if layout.rank == 0:
        assert progress.step == start, f"rank 0's state is of step {progress.step}, the weights are of {start}"
    for step in range(start + 1, start + 1000):
        train(policy, step)
        progress.step = step
        checkpoints.reached(step)
        with open(notes, "a") as file:
            file.write(json.dumps({"step": step, "fingerprint": fingerprint(policy), "complete": complete}) + "\n")
        if layout.rank == 0:
            os.write(tell, b"s")
        checkpoints.save()
        complete = step - 1 if config.checkpoint.async_save and step > start + 1 else complete
        complete = complete if config.checkpoint.async_save else step


def end(pid: int, timeout: float) -> int | None:
    """Exit code of a process; one that has not ended within `timeout` seconds is killed: None."""
    until = time.monotonic() + timeout
    while (found := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        time.sleep(0.02)
    return os.waitstatus_to_exitcode(found[1])


def main(model: str, folder: Path, rounds: int, seed: int) -> None:
    dice, window, cut_off, steps = random.Random(seed), None, 0, 0
    for number in range(rounds):
        config = Config.model_validate(
            {
                "model": {"path": model, "dtype": "float32"},
                "data": {"source": "none"},
                "output_dir": str(folder),
                "parallel": {"pp": 2},
                "optimizer": {"warmup_steps": 0},
                "checkpoint": {"async": number % 2 == 1, "keep_last": 1},
                "trainer": {"timeout": 60},
            }
        )
        listen, tell = os.pipe()
        pids = fork_ranks(RANKS, lambda config=config, tell=tell: rank(config, tell), folder)
        os.close(tell)
        ended = not os.read(listen, 1)  # the first save begins, or the ranks have failed
        if not ended and number < 2:  # of each kind of save, the time from one save to the next one
            begun = time.monotonic()
            ended = not os.read(listen, 1)
            window = max(window or 0.0, time.monotonic() - begun)
        if not ended:
            time.sleep(dice.uniform(0, 2 * window))  # the first save, what follows it, the next one
        killed = [dice.choice(pids)] if number % 4 >= 2 else pids
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        codes = {pid: end(pid, 60) for pid in pids}
        os.close(listen)
        said = "\n".join((folder / f"rank{r}.log").read_text()[-2000:] for r in range(RANKS))
        assert not ended, f"round {number}:\n{said}"
        assert all(codes[pid] == 1 for pid in pids if pid not in killed), f"round {number}: {codes}\n{said}"
        cut_off += any((folder / "checkpoints").glob(".step-*"))
        steps = max([steps, *(int(p.name[5:]) for p in (folder / "checkpoints").glob("step-*"))])
    print(json.dumps({"rounds": rounds, "cut_off": cut_off, "steps": steps}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
