"""What every rank does to have servers that answer with the policy's weights: pushing, asking, and both again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from dynamo_megatron.coordination import Coordinator
from dynamo_megatron.resharding.memory import MemoryTurns
from dynamo_megatron.resharding.push import PushReport, WeightPusher
from dynamo_megatron.rollout.result import PushNeeded, RolloutError

if TYPE_CHECKING:
    from dynamo_megatron.policy.layout import Layout

T = TypeVar("T")
TRIES = 5  # in a row that servers are lost in, until the run ends


class Serving:
    """Every rank's. `say` tells rank 0's user, None elsewhere; `turns`: None where servers have memory of their own."""

    def __init__(
        self,
        pusher: WeightPusher,
        coordinator: Coordinator,
        layout: Layout,
        say: Callable[[str], None] | None,
        turns: MemoryTurns | None,
    ):
        self._pusher, self._coordinator, self._layout, self._say = pusher, coordinator, layout, say
        self._turns = turns
        self._spent = PushReport()  # on pushes since `push` last returned

    def memory(self, phase: str) -> None:
        """Has servers and ranks take turns with memory (`resharding.memory.PHASES`). Collective over all ranks."""
        if self._turns is not None:
            self._turns.enter(phase)

    def push(self, version: int, on_wait: Callable[[], None] | None = None) -> PushReport:
        """Brings the servers to `version`. The report is of all pushes since the last call: those that reached no
        server, and those that `ask` needed, count. Raises RolloutError.

        `on_wait` is called while it waits for a server to be up, and may raise; None: a failed rank alone ends the
        wait, and not a stop, which would lose the step whose weights these are.
        """
        self._push(version, on_wait or self._coordinator.check)
        spent, self._spent = self._spent, PushReport()
        return spent

    def _push(self, version: int, on_wait: Callable[[], None]) -> None:
        """Where not one server takes the weights, once more to those that were restarted. Raises RolloutError.

        `on_wait` is called while it waits for a server to be up, and may raise.
        """
        for _ in range(TRIES):
            self.memory("weights")
            self._spent += self._pusher.push(version, self._coordinator.check, on_wait)
            if not self._spent.needed:
                if self._turns is not None:
                    self._turns.know(self._pusher.endpoints)
                return
        raise RolloutError(f"{TRIES} pushes in a row reached no server; {self._spent.needed}")

    def close(self) -> None:
        self._pusher.close()

    def ask(self, key: str, what: str, make: Callable[[], T], version: int) -> T:
        """What `make`, which asks the servers, gives on rank 0, on every rank, however long it takes there.

        Where no server with the weights of `version` is left, those that were restarted get them and it is asked again.
        Raises RolloutError.
        """

        def attempt() -> tuple[T | None, str | None]:
            try:
                return make(), None
            except PushNeeded as needed:
                self._say(str(needed))
                return None, str(needed)

        for number in range(TRIES):
            self.memory("generate")
            made, needed = self._coordinator.from_rank_0(f"{key}-{number}", what, attempt, self._layout)
            if needed is None:
                return made
            # The step before is saved already or can be: no need to wait for a server in order to stop.
            self._push(version, self._coordinator.check_stop)
        raise RolloutError(f"waited for {what}, and lost the servers {TRIES} times in a row: {needed}")
