"""Ray: one actor for each rank in a placement group; each runs the same `dynamo-megatron train` as its child process.

Ray only places the processes and watches them. They communicate as under other launchers: through the store at
MASTER_ADDR:MASTER_PORT, NCCL, and files in output_dir. In a split fleet each server has an actor too, which
`dynamo-megatron serve` counts as a node. The rollout process and the reward workers are rank 0's children, on its node.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dynamo_megatron.config import Config
from dynamo_megatron.errors import ConfigError, StatedError
from dynamo_megatron.launcher.options import check_servers, checked_config, program
from dynamo_megatron.rollout.retention import after_a_stop
from dynamo_megatron.runtime import guard
from dynamo_megatron.runtime.cores import choose_threads
from dynamo_megatron.runtime.listening import free_port
from dynamo_megatron.runtime.plain_text import on_one_line
from dynamo_megatron.runtime.process_signals import ASK_TO_STOP

# The variables of the caller's environment that children get. All others are those of the child's node, which has its
# own paths and addresses. This goes for secrets (WANDB_API_KEY) too: set them where `ray start` runs, or in files such
# as ~/.netrc.
PASSED_ON = re.compile(
    r"PYTHONPATH|DYNAMO_MEGATRON_RANK_THREADS|OMP_NUM_THREADS|TOKENIZERS_PARALLELISM|"
    r"(CUDA(?!_VISIBLE_DEVICES)|TORCH|NCCL|GLOO|NVTE|SGLANG)_\w+|WANDB_(MODE|PROJECT|ENTITY|DIR)|"
    r"HF_(HOME|HUB_OFFLINE|DATASETS_\w+)"
)
POLL_EVERY = 0.25  # seconds
SILENCE = 60.0  # seconds that an actor may take to answer
GRACE = 10.0  # seconds the others have to end on their own once a rank has failed


class Child:
    """An actor: a rank, or one server's `serve`, is its child process under the guard, and ends with it. `stop` may be
    called while `run` waits for the child, or before."""

    def __init__(self) -> None:
        self._started: Future[subprocess.Popen] = Future()

    def node(self) -> tuple[str, list[str], int]:
        """Returns (address, GPUs that Ray gave to this actor, a free port)."""
        return ray.util.get_node_ip_address(), [str(i) for i in ray.get_gpu_ids()], free_port()

    def run(self, command: list[str], environment: dict[str, str], folder: str, log: str) -> int | str:
        """Runs `command` in `folder`, its output appended to `log`. Returns its exit code, or why it cannot start."""
        choose_threads(environment, max(1, (os.cpu_count() or 1) // int(environment.get("LOCAL_WORLD_SIZE", "1"))))
        try:
            with open(log, "ab") as output:
                streams = {"stdout": output, "stderr": subprocess.STDOUT}
                process = guard.guarded(command, cwd=folder, env={**os.environ, **environment}, **streams)
        except OSError as error:
            return f"{type(error).__name__}: {error}"
        self._started.set_result(process)
        return process.wait()

    def stop(self) -> None:
        """Asks the child, once it has started, to save and end."""
        self._started.result(SILENCE).send_signal(signal.SIGUSR1)


@dataclass
class Placed:
    """An actor, its name, and its node: id, address, GPUs that Ray gave it, a port free there."""

    name: str
    actor: ray.actor.ActorHandle
    node: str
    address: str = ""
    gpus: Sequence[str] = ()
    port: int = 0
    ended: ray.ObjectRef | None = None  # what `run` returns
    code: int | None = None  # of its child, once that has ended
    log: str = ""  # file with its child's output
    printed: int = 0  # bytes of the log

    def print_output(self, prefix: str, ended: bool) -> None:
        """Prints the lines that the child has written since the last call; if it has `ended`, an unfinished one too."""
        text = b""
        with contextlib.suppress(OSError), open(self.log, "rb") as file:  # anew: else NFS may know an old size
            file.seek(self.printed)
            text = file.read()
        if not ended:
            text = text[: text.rfind(b"\n") + 1]
        self.printed += len(text)
        for line in text.splitlines():
            print(prefix + line.decode(errors="replace"), flush=True)


def launch(options: argparse.Namespace, files: Sequence[str], keys: Sequence[str]) -> int:
    """Trains on a Ray cluster, or with Ray on this machine alone; returns the run's exit code. Raises ConfigError."""
    words = [*files, *keys]
    config = checked_config(files, keys, options.ranks)
    servers = config.rollout.servers if config.rollout.placement == "split" else 0
    _connect(options.address, options.ranks + servers)
    try:
        gpu = ray.cluster_resources().get("GPU", 0) > 0
        return RayRun(config, words, options.ranks, servers, gpu).carry_out(options.wait)
    except StatedError as failure:
        print(failure, file=sys.stderr, flush=True)
        return 1
    finally:
        ray.shutdown()


def _connect(address: str | None, actors: int) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    how = {"address": address}
    if address is None:  # `num_cpus` is only for Ray's own count: it binds nothing to cores
        how = {"address": "local", "include_dashboard": False, "num_cpus": max(os.cpu_count() or 1, actors)}
    try:
        ray.init(**how, log_to_driver=False, logging_level="error")  # a child's lines are in its log
    except (ConnectionError, RuntimeError, ValueError) as error:
        text = on_one_line(str(error), 200)
        raise ConfigError(f"--address: no Ray cluster at {address}: {text}; start one with `ray start`") from None


class RayRun:
    """The actors of one run, from their placement to their end."""

    def __init__(self, config: Config, words: Sequence[str], ranks: int, servers: int, gpu: bool):
        self._config = config
        self._output = Path(config.output_dir).absolute()
        self._words, self._ranks, self._servers = list(words), ranks, servers
        gpus = [*[1] * ranks, *[config.rollout.tp] * servers]
        self._bundles = [{"CPU": 1, **({"GPU": n} if gpu else {})} for n in gpus]
        self._placed: list[Placed] = []
        self._asked = threading.Event()  # by a signal to stop

    def carry_out(self, wait: float) -> int:
        """Returns the run's exit code. Raises StatedError and ConfigError. Leaves no actor and no placement group
        behind."""
        before = {number: signal.signal(number, lambda *_: self._asked.set()) for number in ASK_TO_STOP}
        group = placement_group(self._bundles, strategy="PACK")
        try:
            deadline = time.monotonic() + wait
            while not (ready := group.wait(1)) and not self._asked.is_set():  # no signal ends Ray's wait
                if time.monotonic() < deadline:
                    continue
                kinds = Counter(tuple(sorted(bundle.items())) for bundle in self._bundles)
                wanted = ", ".join(f"{n} x {dict(kind)}" for kind, n in kinds.items())
                free = {key: value for key, value in ray.available_resources().items() if key in ("CPU", "GPU")}
                raise StatedError(
                    f"ray: no resources for {wanted} within {wait:g} s (--wait); free in the cluster: "
                    f"{free or 'nothing'}; lower --ranks or rollout.servers, or add nodes with `ray start`"
                )
            if ready:
                self._place(group)
            if self._asked.is_set():
                print(f"stopped while it started; {after_a_stop(self._output)}", file=sys.stderr, flush=True)
                return 75
            self._start()
            return self._watch()
        except KeyboardInterrupt:
            print(f"interrupted; {after_a_stop(self._output)}", file=sys.stderr, flush=True)
            return 130
        finally:
            for placed in self._placed:
                ray.kill(placed.actor)  # its child goes with it
            remove_placement_group(group)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _place(self, group: PlacementGroup) -> None:
        """Creates the actors in the order of their ranks: those of a node are neighbours, as tensor parallelism needs
        them.

        Raises StatedError where nodes would have different numbers of ranks, since each node runs an equal share of the
        servers, and ConfigError as `check_servers` does.
        """
        node_of = placement_group_table(group)["bundles_to_node_id"]
        if len(shares := set(Counter(node_of[b] for b in range(self._ranks)).values())) > 1:
            raise StatedError(
                f"ray: {self._ranks} ranks would lie unevenly, between {min(shares)} and {max(shares)} a node; give "
                "--ranks that fill whole nodes, or wait for nodes that are free"
            )
        nodes = {node: i for i, node in enumerate(dict.fromkeys(node_of[b] for b in range(self._ranks)))}
        config = self._config.with_servers(self._ranks, len(nodes)) if "GPU" in self._bundles[0] else self._config
        check_servers(config, len(set(node_of.values())), self._servers or len(nodes))
        bundles = sorted(range(self._ranks), key=lambda bundle: (nodes[node_of[bundle]], bundle))
        bundles += range(self._ranks, len(self._bundles))
        for i, bundle in enumerate(bundles):
            name = f"rank-{i}" if i < self._ranks else f"server-{i - self._ranks}"
            resources = self._bundles[bundle]
            actor = ray.remote(Child).options(
                name=name,
                num_cpus=resources["CPU"],
                num_gpus=resources.get("GPU", 0),
                max_restarts=0,
                max_concurrency=2,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
            )
            self._placed.append(Placed(name, actor.remote(), node_of[bundle]))
        for placed in self._placed:
            placed.address, placed.gpus, placed.port = self._get(placed, placed.actor.node.remote())

    def _start(self) -> None:
        first, trains = self._placed[0], self._placed[: self._ranks]
        passed = {k: v for k, v in os.environ.items() if PASSED_ON.fullmatch(k)}
        of_a_node = self._ranks // len({p.node for p in trains})  # as many on each, and neighbours: `_place`
        for rank, placed in enumerate(trains):
            # A rank sees all GPUs of its node, as under the other launchers, in the order of the ranks: a node's first
            # rank is RANK - LOCAL_RANK (policy/layout.py).
            local = rank % of_a_node
            gpus = [gpu for p in trains[rank - local : rank - local + of_a_node] for gpu in p.gpus]
            own = {
                **passed,
                "RANK": str(rank),
                "LOCAL_RANK": str(local),
                "WORLD_SIZE": str(self._ranks),
                "LOCAL_WORLD_SIZE": str(of_a_node),
                "MASTER_ADDR": first.address,
                "MASTER_PORT": str(first.port),
                **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}),
            }
            self._begin(placed, "train", self._words, own)
        for i, placed in enumerate(self._placed[self._ranks :]):
            self._begin(placed, "serve", [*self._words, "--nodes", str(self._servers), "--node", str(i)], passed)

    def _begin(self, placed: Placed, command: str, words: Sequence[str], environment: Mapping[str, str]) -> None:
        log = self._output / "logs" / "ray" / f"{placed.name}.log"
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as file:
                placed.log, placed.printed = str(log), file.tell()
        except OSError as error:
            raise ConfigError(f"output_dir: {log}: {error.strerror}") from None
        words = program(sys.executable, command, words)
        placed.ended = placed.actor.run.remote(words, dict(environment), os.getcwd(), str(log))

    def _watch(self) -> int:
        deadline, bad, stopping = None, [], False
        trains = self._placed[: self._ranks]
        while any(p.code is None for p in trains):
            if self._asked.is_set() and not stopping:
                stopping = True
                for placed in trains:
                    placed.actor.stop.remote()
            self._poll()
            needed = trains if stopping else self._placed  # saving needs no servers
            bad = [p for p in needed if p.code not in (None, 0, 75)]
            if bad and deadline is None:
                refused = bad[0] is trains[0] and bad[0].code == 2
                deadline = time.monotonic() + (0.0 if refused else GRACE)
            if deadline is not None and time.monotonic() > deadline:
                break
        if not bad:
            return max(p.code or 0 for p in trains)
        first_bad = min(bad, key=lambda p: p.code > 0)  # a signal before the failures that it caused
        if first_bad.code < 0 and not (stopping and -first_bad.code == signal.SIGUSR1):
            raise StatedError(
                f"{first_bad.name} on {first_bad.address} was ended by {signal.Signals(-first_bad.code).name}; "
                f"{after_a_stop(self._output)}"
            )
        return 75 if first_bad.code < 0 else first_bad.code

    def _poll(self) -> None:
        """Waits a moment, prints what the children have written, and notes which have ended. Raises StatedError for an
        actor that is gone or could not start its child."""
        running = {p.ended: p for p in self._placed if p.code is None}
        ended, _ = ray.wait(list(running), num_returns=len(running), timeout=POLL_EVERY)
        for reference, placed in running.items():
            placed.print_output("" if placed is self._placed[0] else f"[{placed.name}] ", reference in ended)
        for reference in ended:
            placed, code = running[reference], self._get(running[reference], reference)
            if isinstance(code, str):
                raise StatedError(
                    f"{placed.name} on {placed.address} cannot start: {code}; all nodes must see the current folder, "
                    "output_dir and the interpreter"
                )
            placed.code = code

    def _get(self, placed: Placed, reference: ray.ObjectRef) -> object:
        where = f"{placed.name} on {placed.address or placed.node}"
        try:
            return ray.get(reference, timeout=SILENCE)
        except GetTimeoutError:
            raise StatedError(f"{where}: no answer in {SILENCE:g} s") from None
        except RayActorError as error:
            why = on_one_line(str(error)[-300:], 300)  # the actor's names come first
            raise StatedError(f"{where}: its actor died ({why}); {after_a_stop(self._output)}") from None
