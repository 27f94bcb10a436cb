"""Ranks that were asked to stop, or that fail."""

import datetime
import signal

import pytest
import torch.distributed as dist

from dynamo_megatron.runtime.coordination import Coordinator, RemoteFailure, StopFlag, StopRequested


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=60))


@pytest.fixture
def ranks(store):
    both = [Coordinator(store, rank, StopFlag()) for rank in (0, 1)]
    yield both
    for coordinator in both:
        coordinator.close()


def test_all_ranks_report_the_first_failure(ranks):
    first, second = ranks
    assert second.fail("rank 1: no memory") == "rank 1: no memory"
    assert first.fail("rank 0: lost rank 1") == "rank 1: no memory"
    for wait in (first.check, lambda: second.wait("never", "nothing", 60)):
        with pytest.raises(RemoteFailure, match="rank 1: no memory"):
            wait()


def test_a_signal_of_any_rank_stops_the_run(ranks):
    first, second = ranks
    first.check_stop()
    second.stop._set(signal.SIGUSR1, None)
    with pytest.raises(TimeoutError, match="rank 1 waited 0 s for the step"):
        second.wait("never", "the step", 0.0)
    with pytest.raises(StopRequested, match="SIGUSR1 on rank 1"):
        first.check_stop()
