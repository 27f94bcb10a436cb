"""The rollout process: a child of rank 0 that owns the servers, their client, the store and the reward workers.

JSON and scoring run in it, so that they never hold rank 0's interpreter. It is spawned, never forked, before CUDA or
the process group exists. Rank 0 sends a command through a pipe and polls for the reply. The child lives in a session of
its own (signals to rank 0's process group are for rank 0 to handle) and ends, with everything it started, when rank 0
ends.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import multiprocessing
import os
import resource
import select
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from dynamo_megatron.config import Config
from dynamo_megatron.errors import ConfigError, InputError
from dynamo_megatron.reward import RewardError
from dynamo_megatron.rollout.generator import Generator
from dynamo_megatron.rollout.result import RolloutError, RolloutResult, SyncNeeded
from dynamo_megatron.rollout.servers.announcements import end_run
from dynamo_megatron.rollout.servers.server_api import Endpoint
from dynamo_megatron.runtime.array_sharing import receive, send
from dynamo_megatron.runtime.log_files import log_to
from dynamo_megatron.runtime.plain_text import on_one_line
from dynamo_megatron.runtime.process_signals import ASK_TO_STOP, END, die_with_parent, keeping
from dynamo_megatron.runtime.routes import RouteShape
from dynamo_megatron.types import ProblemResult, Prompt

if TYPE_CHECKING:
    from tokenizers import Tokenizer

POLL_EVERY = 0.2  # seconds
BEAT_EVERY = 0.5  # seconds, while a command is under way
SILENCE = 120.0  # seconds without a beat until the child counts as hung
CLOSE_GRACE = 20.0  # seconds: more than the reward workers and the servers take to end
OnPoll: TypeAlias = Callable[[], None] | None
OnCount: TypeAlias = Callable[[int, int], None] | None
T = TypeVar("T")
MESSAGES_THAT_SPEAK = {kind.__name__: kind for kind in (ConfigError, InputError, RewardError, RolloutError, SyncNeeded)}


class RolloutWorker:
    """Rank 0's handle of the rollout process.

    `on_poll` is called about every 0.2 s while a method waits. If it raises, the wait ends, and only `close` may be
    called after that. `on_count(done, tokens)` is called with the number of finished responses and of their tokens.
    Every method raises RolloutError if the process died or fell silent. InputError, RewardError, RolloutError and
    SyncNeeded that were raised in the process are raised again here.
    """

    def __init__(
        self,
        config: Config,
        eos_token_ids: Sequence[int] | None,
        vocab_size: int,
        decoder: Tokenizer | None = None,
        routes: RouteShape | None = None,
    ):
        """`vocab_size`: rows of the model's embedding; a response with other token ids is refused. `routes`: which the
        servers are asked for with each rollout; None: none.

        `decoder`: decodes responses (`decoder_of` the tokenizer). None: the process loads the tokenizer of model.path,
        and torch with it. With `eos_token_ids` None the servers can start before there is a tokenizer: `read_with`
        brings both, after `start`.
        """
        self._config, self._vocab_size, self._routes = config, vocab_size, routes
        self._reading = None if eos_token_ids is None else (tuple(eos_token_ids), decoder)
        self.log = Path(config.output_dir) / "logs" / "rollout.log"
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None
        self._ready = False

    def start(self) -> None:
        """Returns at once. Call it from the main thread: the child ends when the thread that started it does."""
        context = multiprocessing.get_context("spawn")
        self._connection, child_end = context.Pipe()
        given = self._config, self._reading, self._vocab_size, self._routes
        self._process = context.Process(target=_child, args=(child_end, given, self.log, os.getpid()), name="rollout")
        with keeping(*ASK_TO_STOP):
            self._process.start()
        child_end.close()
        atexit.register(self.close)  # before multiprocessing's own hook, which would wait for the child for ever

    def read_with(self, eos_token_ids: Sequence[int], decoder: Tokenizer | None) -> None:
        """What a worker that was made without them needs of the tokenizer."""
        with contextlib.suppress(OSError):  # `wait_ready` raises what has ended the process
            self._connection.send((tuple(eos_token_ids), decoder))

    def wait_ready(self, on_poll: OnPoll = None) -> None:
        """Waits until the servers and the reward workers are up. Raises what kept them from it."""
        if not self._ready:
            self._reply("its start", on_poll, None, SILENCE + self._config.rollout.start_timeout)
            self._ready = True

    def dispatch(
        self, step: int, prompts: Sequence[Prompt], counts: Sequence[int], on_poll: OnPoll = None, first: int = 0
    ) -> None:
        """Starts the sampling of `counts[i]` responses to each `prompts[i]` (tokenized), and returns; `collect` waits
        for them. Does nothing where they are under way already. `first`: the position of `prompts[0]` in the step's
        batch, of which this may be a later part.

        Steps are dispatched in order, and the requests of a step are sent after those of all earlier steps.
        `rollout.at_sync` decides what a weight sync does to responses under way. Finished rollouts of this step that
        are on disk already are reused where the prompt is the same and the weights that sampled them are recent enough
        for the step (`rollout.max_staleness`) and no newer than those that this run began with.
        """
        self._call(Generator.dispatch, step, list(prompts), [int(n) for n in counts], first, on_poll=on_poll)

    def collect(self, step: int, on_poll: OnPoll = None, on_count: OnCount = None, first: int = 0) -> RolloutResult:
        """Waits for all rollouts that were dispatched, scored and on disk, and returns them. The result may have no
        rollout; its notes say why. Raises SyncNeeded where no server with the current weights is left, RewardError."""
        return self._call(Generator.collect, step, first, on_poll=on_poll, on_count=on_count)

    def evaluate(
        self, prompts: Sequence[Prompt], on_poll: OnPoll = None, on_count: OnCount = None
    ) -> list[ProblemResult]:
        """Returns `eval.samples` scored responses to each of `prompts` (tokenized), in their order; nothing is stored.

        Raises RewardError, and RolloutError where not one response came.
        """
        return self._call(Generator.evaluate, list(prompts), on_poll=on_poll, on_count=on_count)

    def begin_evaluation(self, prompts: Sequence[Prompt], on_poll: OnPoll = None) -> None:
        """Starts what `evaluate` does, and returns; `end_evaluation` waits for it, and so does the next weight sync."""
        self._call(Generator.begin_evaluation, list(prompts), on_poll=on_poll)

    def end_evaluation(self, on_poll: OnPoll = None) -> list[ProblemResult]:
        """Returns and raises what `evaluate` does; raises SyncNeeded, too, where the servers were lost."""
        return self._call(Generator.end_evaluation, on_poll=on_poll)

    def reject(self, step: int, rollout_ids: Sequence[str], on_poll: OnPoll = None) -> None:
        """Marks rollouts of the step as rejected, in the record of the run."""
        self._call(Generator.reject, step, list(rollout_ids), on_poll=on_poll)

    def begin_sync(self, version: int, on_poll: OnPoll = None) -> list[Endpoint]:
        """Takes every healthy server out of the rotation and brings it to rest: nothing under way, no cached prefix.
        Returns these servers.

        Where none is up, waits up to `rollout.start_timeout` seconds for the first one; with `rollout.offload`, for
        every one that is out. Raises RolloutError rather than return no server.
        """
        return self._call(Generator.begin_sync, version, on_poll=on_poll)

    def end_sync(self, version: int, outcomes: dict[Endpoint, str | None], on_poll: OnPoll = None) -> None:
        """`outcomes`: one for each server that begin_sync returned. None: it was proved to have `version`, and joins
        the rotation. Otherwise the reason why not: it is restarted, counted and noted. A server restarted since then is
        stale. Raises SyncNeeded where no server took the weights."""
        self._call(Generator.end_sync, version, outcomes, on_poll=on_poll)

    def condemn(self, lost: dict[Endpoint, str]) -> None:
        """Takes servers that failed a request of a rank, each with the reason, out of the rotation; they are
        restarted."""
        self._call(Generator.condemn, lost)

    def close(self) -> None:
        """Stops the child and everything that it started. May be called twice."""
        if self._process is None:
            return
        atexit.unregister(self.close)
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self._process.join(CLOSE_GRACE)
        self._process.kill()  # if it has not ended; the server and the reward workers die with it
        self._process.join()
        if self._process.exitcode and self._config.rollout.placement == "split":
            end_run(self._config.output_dir)
        self._connection.close()
        self._process = self._connection = None

    def _call(
        self, command: Callable[..., Awaitable[T]], *arguments: Any, on_poll: OnPoll = None, on_count: OnCount = None
    ) -> T:
        """Returns what `command`, a method of Generator, returns in the rollout process."""
        self.wait_ready(on_poll)
        try:
            self._connection.send((command, arguments))
        except OSError:
            raise self._death() from None
        return self._reply(command.__name__, on_poll, on_count, SILENCE)

    def _reply(self, what: str, on_poll: OnPoll, on_count: OnCount, silence: float) -> Any:
        polls = 0  # without a message; the clock goes on while the run is suspended
        while True:
            try:
                message = receive(self._connection) if self._connection.poll(POLL_EVERY) else None
            except (EOFError, OSError):
                raise self._death() from None
            match message:
                case ("done", result):
                    return result
                case ("failed", kind, text):
                    raise MESSAGES_THAT_SPEAK[kind](text)
                case ("beat", done, tokens):
                    polls = 0
                    if on_count is not None:
                        on_count(done, tokens)
            polls += 1
            if polls * POLL_EVERY > silence:
                raise RolloutError(
                    f"the rollout process (pid {self._process.pid}) gave no sign of life for {silence:g} s during "
                    f"{what}; see {self.log}"
                )
            if on_poll is not None:
                on_poll()

    def _death(self) -> RolloutError:
        self._process.join(5.0)
        code = self._process.exitcode
        cause = f"signal {-code}" if code and code < 0 else f"exit code {code}"
        return RolloutError(f"the rollout process (pid {self._process.pid}) ended ({cause}); see {self.log}")


def _child(connection: Connection, given: tuple, log: Path, parent: int) -> None:
    """`given`: the arguments of `_serve` after `connection`."""
    os.setsid()
    die_with_parent(END, parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log_to(log)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # of more than the kernel's fs.nr_open
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each request that a server has may take one
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_serve(connection, *given))


async def _serve(
    connection: Connection, config: Config, reading: tuple | None, vocab_size: int, routes: RouteShape | None
) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    inbox: asyncio.Queue = asyncio.Queue()

    def leave() -> None:
        loop.remove_reader(connection.fileno())
        signal.alarm(int(CLOSE_GRACE))  # a clean-up that hangs does not outlive the run
        task.cancel()

    def read() -> None:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            message = None
        if message is None:
            leave()
        else:
            inbox.put_nowait(message)

    loop.add_signal_handler(END, leave)
    loop.add_reader(connection.fileno(), read)
    async with contextlib.AsyncExitStack() as stack:
        ends, decoder = reading or ((), None)
        generator = Generator(config, ends, vocab_size, stack, decoder, routes)
        opened = await _answer(connection, generator, generator.open(inbox.get if reading is None else None))
        gc.freeze()  # else each reply's thousands of lists start collections over all imports: 4 times as slow
        stack.callback(gc.unfreeze)  # else libraries report a hundred lines of leaks at the exit
        while opened:
            command, arguments = await inbox.get()
            await _answer(connection, generator, generator.watched(command(generator, *arguments)))


async def _answer(connection: Connection, generator: Generator, work: Awaitable[Any]) -> bool:
    """Awaits `work` and sends its result or its error; returns False where it failed."""
    generator.done = generator.tokens = 0

    async def beat() -> None:
        while True:
            await asyncio.sleep(BEAT_EVERY)
            # Rank 0 may read nothing for minutes while it starts: a write that waits for it would stop this loop.
            if select.select([], [connection], [], 0)[1]:
                send(connection, ("beat", generator.done, generator.tokens))

    beating = asyncio.create_task(beat())
    try:
        send(connection, ("done", await work))
        return True
    except Exception as error:  # whatever it is, rank 0 is the one to raise it
        kind, text = type(error).__name__, on_one_line(str(error))
        if isinstance(error, RewardError):  # of the user's code: our frames would hide it
            text = str(error)
            print(text, file=sys.stderr, flush=True)
        else:
            traceback.print_exc()
        if kind not in MESSAGES_THAT_SPEAK:
            kind, text = "RolloutError", f"{kind}: {text} (traceback in logs/rollout.log)"
        send(connection, ("failed", kind, text))
        return False
    finally:
        beating.cancel()
