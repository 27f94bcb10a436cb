"""Weight sync, in which every rank takes part, and rank 0's requests to the servers. A request during which all servers
are lost is made again after a weight sync; rollout/servers/fleet.py handles the loss of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from dynamo_megatron.rollout.result import RolloutError, SyncNeeded
from dynamo_megatron.runtime.coordination import Coordinator
from dynamo_megatron.tracking.phases import Phases
from dynamo_megatron.weight_sync.sync import SyncReport, WeightSync

if TYPE_CHECKING:
    from dynamo_megatron.policy.layout import Layout

T = TypeVar("T")
TRIES = 5  # weight syncs or requests in a row that may lose all servers before the run fails


class Serving:
    """Every rank has one. `say` prints a line for the user on rank 0; it is None elsewhere."""

    def __init__(
        self,
        weight_sync: WeightSync,
        coordinator: Coordinator,
        layout: Layout,
        phases: Phases,
        say: Callable[[str], None] | None,
    ):
        self._weight_sync, self._coordinator, self._layout, self._say = weight_sync, coordinator, layout, say
        self._phases = phases
        self._spent = SyncReport()  # total of the weight syncs since `sync` last returned

    def sync(self, version: int, on_wait: Callable[[], None] | None = None) -> SyncReport:
        """Gives the servers the weights of `version`. Returns the report of all weight syncs since the last call,
        including those that reached no server and those that `ask` needed. Raises RolloutError.

        `on_wait` is called during the wait for a server to start, and may raise. None: only a failed rank ends the
        wait. A requested stop does not, since the step whose weights are synced would be lost.
        """
        self._sync(version, on_wait or self._coordinator.check)
        spent, self._spent = self._spent, SyncReport()
        return spent

    def _sync(self, version: int, on_wait: Callable[[], None]) -> None:
        """If no server takes the weights, sends them again to the servers that were restarted. Raises RolloutError."""
        for _ in range(TRIES):
            self._phases.begin("weight sync")
            self._spent += self._weight_sync.sync(version, self._coordinator.check, on_wait)
            if not self._spent.needed:
                if self._phases.memory is not None:
                    self._phases.memory.set_servers(self._weight_sync.endpoints)
                return
        raise RolloutError(f"{TRIES} weight syncs in a row reached no server; {self._spent.needed}")

    def close(self) -> None:
        self._weight_sync.close()

    def ask(self, phase: str, what: str, make: Callable[[], T], version: int) -> T:
        """Calls `make`, which sends requests to the servers, on rank 0, and returns its result on every rank, however
        long it takes. `phase`: the run's phase meanwhile. `what`: what messages say is waited for.

        If no server with the weights of `version` is left, the restarted servers get these weights and `make` is called
        again. Raises RolloutError.
        """

        def attempt() -> tuple[T | None, str | None]:
            try:
                return make(), None
            except SyncNeeded as needed:
                self._say(str(needed))
                return None, str(needed)

        for _ in range(TRIES):
            self._phases.begin(phase)
            made, needed = self._coordinator.on_rank_0(what, attempt, self._layout)
            if needed is None:
                return made
            # The step before is saved or can be saved, so a stop need not wait for a server.
            self._sync(version, self._coordinator.check_stop)
        raise RolloutError(f"waited for {what}, and lost the servers {TRIES} times in a row: {needed}")
