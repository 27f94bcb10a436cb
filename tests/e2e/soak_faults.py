"""The faults of a soak: each hurts a run, and says which lines the run may have of it and whether it ends.

Not among them: nodes other than the run's first one (`rollout.remote`, SLURM) and the network between nodes, servers
that somebody else has started, GPUs, and what tests/rollout/test_hostile_servers.py and docs/security.md have of
attackers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import resource
import shutil
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from safetensors.numpy import load_file, save_file
from soak_site import SERVERS, VICTIM, Site

from dynamo_megatron.checkpoint.folder import complete_checkpoints
from dynamo_megatron.rollout.store import RolloutStore, read_rollouts, step_file

STRANGERS = 2000
FROZEN = (1 / 6, 2 / 3, 3 / 2)  # of rollout.health_timeout
CLOSED = 4.0  # of rollout.health_timeout
FULL_FOR = 10.0  # seconds
OUT = f"step \\d+: {VICTIM} (left the rotation|did not come up): "
LOST = r"step \d+: \d+ of \d+ rollouts (failed|rejected)"
ALL_OUT = f"step \\d+: server-[01] (left the rotation|did not come up): |no server (has|took) the weights|{LOST}"
UNSCORED = r"step \d+: \d+ of \d+ rollouts have reward 0 for a reward_(error|timeout)"
SPACE = "(disk is full|No space left on device)"


@dataclass(frozen=True)
class Fault:
    """`hurt(site, rng)` returns what it did; it raises ValueError or OSError where something is not as it should be
    that the run's console does not show. `says`: every line that the console has of it matches. There are at most
    `most`, and at least one except where it is `silent`. `codes`: exit codes with which the run may end, None among
    them where it may go on; it is started again then. `leaves`: `says` is about the run that is started after it.
    `litters`: guards are killed too, so that nothing clears up after their servers."""

    name: str
    hurt: Callable[[Site, random.Random], str]
    says: str
    silent: bool = False
    most: int = 1
    codes: tuple[int | None, ...] = (None,)
    leaves: bool = False
    litters: bool = False


def _send(number: signal.Signals, processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _frozen(site: Site, processes: list[psutil.Process], share: float) -> str:
    seconds = share * site.health_timeout
    _send(signal.SIGSTOP, processes)
    site.pause(seconds)
    _send(signal.SIGCONT, processes)
    return f"SIGSTOP for {seconds:g} s"


# -- servers -----------------------------------------------------------------------------------------------------------
def kill_server(site: Site, rng: random.Random) -> str:
    processes = site.server()  # the guard first
    some = rng.choice([processes, processes[1:2], processes[-1:]])
    _send(signal.SIGKILL, some)
    return f"SIGKILL to {len(some)} of {len(processes)} processes"


def kill_guard(site: Site, rng: random.Random) -> str:
    """What it guards ends with it."""
    processes = site.server()
    _send(signal.SIGKILL, processes[:1])
    if not site.gone(processes):
        raise TimeoutError(f"of {len(processes)} processes some outlive their guard")
    return f"SIGKILL; the other {len(processes) - 1} processes have ended"


def close_servers(site: Site, rng: random.Random) -> str:
    """All servers are gone, and none comes back for a while."""
    seconds = CLOSED * site.health_timeout
    with site.closed():
        for name in SERVERS:
            _send(signal.SIGKILL, site.server(name)[1:])
        site.pause(seconds)
    return f"SIGKILL to all; none starts for {seconds:g} s"


def freeze_server(site: Site, rng: random.Random) -> str:
    processes = site.server()[1:]
    some = rng.choice([processes, processes[:1], processes[-1:]])
    return f"{_frozen(site, some, rng.choice(FROZEN))} of {len(some)} of {len(processes)} processes"


def alter_replies(site: Site, rng: random.Random) -> str:
    share, seed = rng.choice([0.02, 0.2, 1.0]), rng.randrange(1 << 30)
    with site.proxy(share=share, seed=seed):
        _two_steps(site)
    return f"{share:.0%} of the replies altered, seed {seed}"


def slow_server(site: Site, rng: random.Random) -> str:
    seconds = rng.choice([0.5, 2.0, site.health_timeout / 2])
    with site.proxy(delay=seconds):
        _two_steps(site)
    return f"{seconds:g} s late"


def _two_steps(site: Site) -> None:
    begun = site.step
    site.wait(lambda: site.step >= begun + 2, 120)


def other_weights(site: Site, rng: random.Random) -> str:
    """Another model in one server, under the version that the run has given it."""
    folder = site.folder / "task" / "other"
    if not folder.is_dir():
        shutil.copytree(site.folder / "task" / "model", folder)
        file = folder / "model.safetensors"
        tensors = load_file(file)
        head = tensors["lm_head.weight"]  # random weights of the usual size would sample as those of the run do
        tensors["lm_head.weight"] = np.random.default_rng(0).normal(0.0, 2.0, head.shape).astype(head.dtype)
        save_file(tensors, file, {"format": "pt"})
    with site.proxy(model=str(folder)):
        _two_steps(site)
    return "for two steps"


def strangers(site: Site, rng: random.Random) -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    ports, made = site.ports(), 0
    with contextlib.ExitStack() as stack:
        for number in range(STRANGERS):
            connection = stack.enter_context(socket.socket())
            connection.settimeout(1.0)
            with contextlib.suppress(OSError):
                connection.connect(("127.0.0.1", ports[number % len(ports)]))
                connection.sendall(rng.randbytes(rng.randrange(1, 200)))
                made += 1
        _two_steps(site)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return f"{made} connections to {len(ports)} ports"


# -- the run's own processes -------------------------------------------------------------------------------------------
def freeze_rollout_process(site: Site, rng: random.Random) -> str:
    return _frozen(site, [site.one("rollout process")], rng.choice(FROZEN))


def freeze_rank(site: Site, rng: random.Random) -> str:
    rank = rng.choice([0, 1])
    return f"{_frozen(site, [site.one(f'rank {rank}')], rng.choice(FROZEN))} of rank {rank}"


def kill_rollout_process(site: Site, rng: random.Random) -> str:
    _send(signal.SIGKILL, [site.one("rollout process")])
    return "SIGKILL"


def kill_rank(site: Site, rng: random.Random) -> str:
    rank = rng.choice([0, 1])
    _send(signal.SIGKILL, [site.one(f"rank {rank}")])
    return f"SIGKILL to rank {rank}"


def kill_launcher(site: Site, rng: random.Random) -> str:
    site.processes()  # all are noted: who has lost its parent is not found any more
    site.run.process.kill()
    return "SIGKILL"


def kill_everything(site: Site, rng: random.Random) -> str:
    processes = site.processes()
    _send(signal.SIGSTOP, processes)  # so that none hears of another's end
    _send(signal.SIGKILL, rng.sample(processes, len(processes)))
    return f"SIGKILL to {len(processes)} processes"


def altered_file(site: Site, rng: random.Random) -> str:
    """All are killed in the midst of a step, and in the file of the step that is next after the resume some rollouts
    have tokens that no model has."""
    site.wait(lambda: site.step == site.saved, 300)  # what a step reuses is of the weights that it begins with
    file = step_file(site.output, site.saved + 1)
    site.wait(lambda: file.is_file() and len(read_rollouts(file)) > 20, 60)
    kill_everything(site, rng)
    site.run.process.wait()
    step = site.saved + 1
    found = read_rollouts(step_file(site.output, step))
    store = RolloutStore(site.output)
    some = rng.sample(found, min(5, len(found)))
    for rollout in some:
        store.append(dataclasses.replace(rollout, tokens=[*rollout.tokens[:-1], 10_000_000]))
    store.close()
    return f"{len(some)} of {len(found)} rollouts of step {step}"


def broken_files(site: Site, rng: random.Random) -> str:
    """All are killed. No run starts with a config.yaml that is no YAML, nor with half a line and a newline at the end
    of one of the files of JSON lines. Where the newline is missing, as after a kill, it does."""
    kill_everything(site, rng)
    site.run.process.wait()
    config, broken, torn = (site.output / name for name in ("config.yaml", "metrics.jsonl", "allocation.jsonl"))
    if rng.random() < 0.5:
        broken, torn = torn, broken
    for file, end, says in (
        (config, b"[", f"^output_dir: .*{config.name}.*; restore it from a copy, or name another folder$"),
        (broken, _half_a_line(broken) + b"\n", f"^output_dir: {broken}:\\d+: not JSON .*, or delete this line of it$"),
    ):
        whole = file.read_bytes()
        file.write_bytes(whole + end)
        try:
            site.refused(says)
        finally:
            file.write_bytes(whole)
    for file in (broken, torn):
        half = _half_a_line(file)
        with file.open("ab") as opened:
            opened.write(half)
    return f"config.yaml and {broken.name} were refused; then a torn line was in each of both files of lines"


def _half_a_line(file: Path) -> bytes:
    line = file.read_bytes().split(b"\n")[-2]
    return line[: len(line) // 2]


def lost_files(site: Site, rng: random.Random) -> str:
    """All are killed, and every checkpoint loses a file: no run starts. Then all but the newest get it back."""
    root = site.output / "checkpoints"
    if not site.wait(lambda: len(complete_checkpoints(root)) > 1, 300):
        raise TimeoutError("no two checkpoints after 300 s")
    kill_everything(site, rng)
    site.run.process.wait()
    lost = []
    for _, folder in complete_checkpoints(root):
        file = rng.choice(sorted(folder.iterdir()))
        lost.append((file, file.rename(site.disk / f"{folder.name}-{file.name}")))
    try:
        site.refused("^output_dir: .* is damaged: .*, and no other is complete; to start from step 0 move .* away$")
    finally:
        for file, aside in lost[:-1]:
            aside.rename(file)
    return f"{len(lost)} checkpoints without a file were refused; then the newest alone had lost {lost[-1][0].name}"


def second_run(site: Site, rng: random.Random) -> str:
    """The same command once more, while the run goes on."""
    site.refused("^output_dir: another process trains in .*; end it or name another folder$")
    return "refused"


def ask_to_stop(number: signal.Signals, times: int = 1) -> Callable[[Site, random.Random], str]:
    def hurt(site: Site, rng: random.Random) -> str:
        site.processes()
        for _ in range(times):
            site.run.process.send_signal(number)
            site.pause(rng.choice([0.0, 0.1, 0.5]))
        return f"{number.name}, {times} times"

    return hurt


def interrupt_a_save(site: Site, rng: random.Random) -> str:
    """Ctrl-C while a checkpoint is written."""
    folder = site.output / "checkpoints"
    during = site.wait(lambda: any(folder.glob(".*.unfinished")), 120)
    site.processes()
    site.run.process.send_signal(signal.SIGINT)
    return "SIGINT during a save" if during else "SIGINT; no save was seen within 120 s"


# -- rewards, disks ----------------------------------------------------------------------------------------------------
def fail_reward(name: str) -> Callable[[Site, random.Random], str]:
    def hurt(site: Site, rng: random.Random) -> str:
        file, done = site.folder / f"fault-{name}", site.folder / f"done-{name}"
        done.unlink(missing_ok=True)
        file.touch()
        took = site.wait(done.is_file, 60)
        return "one call" if took else "no call within 60 s"

    return hurt


def leave_a_process(site: Site, rng: random.Random) -> str:
    """A reward function starts a process in a session of its own, and its worker is killed: both are to end."""
    pid = site.folder / "left.pid"
    pid.unlink(missing_ok=True)
    what = fail_reward("leave")(site, rng)
    site.wait(pid.is_file, 60)
    with contextlib.suppress(psutil.NoSuchProcess):
        if not site.gone([psutil.Process(int(pid.read_text()))]):
            raise TimeoutError("a process that a reward function has started outlives its worker")
    return f"{what}, its process has ended"


def altered_answers(site: Site, rng: random.Random) -> str:
    share, seed = rng.choice([0.1, 0.5]), rng.randrange(1 << 30)  # more may leave three steps in a row without rewards
    with site.service.altering(share, seed) as done:
        _two_steps(site)
    return f"{share:.0%} of the answers altered, {len(done)} of them, seed {seed}"


def service_down(site: Site, rng: random.Random) -> str:
    seconds = rng.choice([2.0, 8.0])  # less and more than reward.deadline
    site.service.down = True
    site.pause(seconds)
    site.service.down = False
    return f"503 for {seconds:g} s"


def full_disk(site: Site, rng: random.Random) -> str:
    with site.full(site.disk):
        site.pause(FULL_FOR)
    return f"full for {FULL_FOR:g} s"


def full_shared_memory(site: Site, rng: random.Random) -> str:
    with site.full(site.shared_memory):
        site.pause(FULL_FOR)
    return f"full for {FULL_FOR:g} s"


STOPPED = "stopped by SIG(TERM|USR1).*the same command (resumes|starts)"
FELL_BACK = r"warning: the checkpoint of step \d+ is damaged: .*; going on from step \d+"
NONE = "$^"
FAULTS = (
    Fault("server killed", kill_server, f"{OUT}|{LOST}", most=2, litters=True),
    Fault("server's guard killed", kill_guard, f"{OUT}|{LOST}", most=2, litters=True),
    Fault("no server", close_servers, ALL_OUT, most=4),
    Fault("server frozen", freeze_server, f"{OUT}|{LOST}", silent=True, most=2),
    Fault("server's replies altered", alter_replies, f"{OUT}|{LOST}", silent=True, most=4),
    Fault("server slow", slow_server, NONE, silent=True),
    Fault("server has other weights", other_weights, f"{OUT}|{LOST}", most=4),
    Fault("strangers at a server's ports", strangers, NONE, silent=True),
    Fault("rollout process frozen", freeze_rollout_process, NONE, silent=True),
    Fault("rank frozen", freeze_rank, NONE, silent=True),
    Fault("second run in the folder", second_run, NONE, silent=True),
    Fault("reward worker: SIGSEGV", fail_reward("segv"), UNSCORED),
    Fault("reward worker: SIGKILL", fail_reward("kill"), UNSCORED),
    Fault("reward worker: no memory", fail_reward("memory"), UNSCORED),
    Fault("reward worker: hangs", fail_reward("hang"), UNSCORED),
    Fault("reward worker: leaves a process", leave_a_process, UNSCORED),
    Fault("reward service down", service_down, UNSCORED, silent=True, most=3),
    Fault("reward service's answers altered", altered_answers, UNSCORED, most=4),
    Fault("/dev/shm full", full_shared_memory, SPACE, silent=True, codes=(None, 1)),
    Fault("disk full", full_disk, SPACE, silent=True, codes=(None, 1)),
    Fault("rank killed", kill_rank, r"rank [01] was ended by SIGKILL", codes=(1,)),
    Fault(
        "rollout process killed",
        kill_rollout_process,
        r"the rollout process \(pid \d+\) ended \(signal 9\)",
        codes=(1,),
    ),
    Fault("launcher killed", kill_launcher, NONE, silent=True, codes=(-9,)),
    Fault("everything killed", kill_everything, NONE, silent=True, codes=(-9,), litters=True),
    Fault("rollouts altered on disk", altered_file, "discarded", codes=(-9,), leaves=True, litters=True),
    Fault("broken config and lines", broken_files, NONE, silent=True, codes=(-9,), litters=True),
    Fault("checkpoint lost a file", lost_files, FELL_BACK, codes=(-9,), leaves=True, litters=True),
    Fault("SIGTERM", ask_to_stop(signal.SIGTERM), STOPPED, codes=(75,)),
    Fault("SIGTERM three times", ask_to_stop(signal.SIGTERM, times=3), STOPPED, codes=(75,)),
    Fault("SIGUSR1", ask_to_stop(signal.SIGUSR1), STOPPED, codes=(75,)),
    Fault("SIGINT during a save", interrupt_a_save, "interrupted; .*the same command (resumes|starts)", codes=(130,)),
)
NEED_SMALL_DISKS = {"/dev/shm full", "disk full"}


def order(kinds: list[Fault], count: int, rng: random.Random) -> list[Fault]:
    """`count` faults: each kind once, in random order, then each once again, and so on. Of each round those that the
    run outlives come first, then those that it may outlive: a process has to live long enough to show a leak."""
    found: list[Fault] = []
    while kinds and len(found) < count:
        whole = rng.sample(kinds, len(kinds))
        found += sorted(whole, key=lambda fault: (fault.codes != (None,), None not in fault.codes))
    return found[:count]
