"""What the pushes of a step come to, where some of them reached no server."""

import pytest
from step_sampling import Alone

from dynamo_megatron.rollout.result import RolloutError, SyncNeeded
from dynamo_megatron.runtime.coordination import StopRequested
from dynamo_megatron.serving import TRIES, Serving
from dynamo_megatron.tracking.phases import Phases
from dynamo_megatron.weight_sync.sync import SyncReport


class Pushes:
    """In place of a WeightSync: each push takes 2 s and 10 bytes; `lost` of them reach no server."""

    def __init__(self, lost: int):
        self.lost, self.versions = lost, []

    def sync(self, version, on_poll, on_wait):
        on_wait()
        self.versions.append(version)
        self.lost -= 1
        return SyncReport(2.0, 1.5, 0.5, 10, 8, "server-0: killed" if self.lost >= 0 else "")


def serving(lost: int, asked: bool = False) -> Serving:
    return Serving(Pushes(lost), Alone(asked), None, Phases(None, None), lambda text: None)


def test_the_report_of_a_step_has_all_its_pushes():
    one = serving(0)
    assert one.sync(1) == SyncReport(2.0, 1.5, 0.5, 10, 8)
    answers = [SyncNeeded("all lost"), "rollouts"]

    def make():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert one.ask("generate", "the rollouts", make, version=1) == "rollouts"
    assert one.sync(2) == SyncReport(4.0, 3.0, 1.0, 20, 16)
    assert one.sync(3) == SyncReport(2.0, 1.5, 0.5, 10, 8)
    assert serving(2).sync(1) == SyncReport(6.0, 4.5, 1.5, 30, 24)


def test_pushes_that_reach_no_server_end_the_run():
    with pytest.raises(RolloutError, match=f"{TRIES} weight syncs in a row reached no server; server-0: killed"):
        serving(TRIES).sync(1)


def test_a_stop_is_heard_where_a_push_within_a_step_waits_and_not_where_one_ends_a_step():
    def make():
        raise SyncNeeded("all lost")

    one = serving(0, asked=True)
    one.sync(1)
    with pytest.raises(StopRequested):
        one.ask("generate", "the rollouts", make, version=1)
