"""What the pushes of a step come to, where some of them reached no server."""

import pytest

from dynamo_megatron.resharding.push import PushReport
from dynamo_megatron.rollout.result import PushNeeded, RolloutError
from dynamo_megatron.serving import TRIES, Serving


class Pushes:
    """In place of a WeightPusher: each push takes 2 s and 10 bytes; `lost` of them reach no server."""

    def __init__(self, lost: int):
        self.lost, self.versions = lost, []

    def push(self, version, on_poll):
        self.versions.append(version)
        self.lost -= 1
        return PushReport(2.0, 1.5, 0.5, 10, 8, "server-0: killed" if self.lost >= 0 else "")


class Alone:
    """The coordinator of one rank."""

    def check(self):
        pass

    def from_rank_0(self, key, what, make, host):
        return make()


def serving(lost: int) -> Serving:
    return Serving(Pushes(lost), Alone(), None, lambda text: None, None)


def test_the_report_of_a_step_has_all_its_pushes():
    one = serving(0)
    assert one.push(1) == PushReport(2.0, 1.5, 0.5, 10, 8)
    answers = [PushNeeded("all lost"), "rollouts"]

    def make():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert one.ask("rollouts", "the rollouts", make, version=1) == "rollouts"
    assert one.push(2) == PushReport(4.0, 3.0, 1.0, 20, 16)
    assert one.push(3) == PushReport(2.0, 1.5, 0.5, 10, 8)
    assert serving(2).push(1) == PushReport(6.0, 4.5, 1.5, 30, 24)


def test_pushes_that_reach_no_server_end_the_run():
    with pytest.raises(RolloutError, match=f"{TRIES} pushes in a row reached no server; server-0: killed"):
        serving(TRIES).push(1)
