"""Servers that answer with the policy's weights: every rank pushes the weights, and rank 0 asks. Lost servers are
handled here alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from dynamo_megatron.phases import Phases
from dynamo_megatron.rollout.result import PushNeeded, RolloutError
from dynamo_megatron.runtime.coordination import Coordinator
from dynamo_megatron.weight_sync.push import PushReport, WeightPusher

if TYPE_CHECKING:
    from dynamo_megatron.policy.layout import Layout

T = TypeVar("T")
TRIES = 5  # in a row that servers are lost in, until the run ends


class Serving:
    """Every rank's. `say` prints a line for the user on rank 0, None elsewhere."""

    def __init__(
        self,
        pusher: WeightPusher,
        coordinator: Coordinator,
        layout: Layout,
        phases: Phases,
        say: Callable[[str], None] | None,
    ):
        self._pusher, self._coordinator, self._layout, self._say = pusher, coordinator, layout, say
        self._phases = phases
        self._spent = PushReport()  # on pushes since `push` last returned

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
        """If no server takes the weights, pushes them again to those that were restarted. Raises RolloutError."""
        for _ in range(TRIES):
            self._phases.begin("push weights")
            self._spent += self._pusher.push(version, self._coordinator.check, on_wait)
            if not self._spent.needed:
                if self._phases.memory is not None:
                    self._phases.memory.set_servers(self._pusher.endpoints)
                return
        raise RolloutError(f"{TRIES} pushes in a row reached no server; {self._spent.needed}")

    def close(self) -> None:
        self._pusher.close()

    def ask(self, phase: str, what: str, make: Callable[[], T], version: int) -> T:
        """What `make`, which asks the servers, returns on rank 0, on every rank, however long it takes there. `phase`
        lasts meanwhile; `what` is waited for, in messages.

        If no server with the weights of `version` is left, those that were restarted get them and it is asked again.
        Raises RolloutError.
        """

        def attempt() -> tuple[T | None, str | None]:
            try:
                return make(), None
            except PushNeeded as needed:
                self._say(str(needed))
                return None, str(needed)

        for _ in range(TRIES):
            self._phases.begin(phase)
            made, needed = self._coordinator.on_rank_0(what, attempt, self._layout)
            if needed is None:
                return made
            # The step before is saved already or can be: no need to wait for a server in order to stop.
            self._push(version, self._coordinator.check_stop)
        raise RolloutError(f"waited for {what}, and lost the servers {TRIES} times in a row: {needed}")
