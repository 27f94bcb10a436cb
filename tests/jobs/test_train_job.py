from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from dynamo_megatron.jobs.train import TrainJob
from dynamo_megatron.runtime.coordination import StopRequested


@pytest.mark.parametrize(("ending", "closes"), [(None, 1), (StopRequested("SIGTERM"), 1), (ValueError("the cause"), 0)])
def test_links_to_servers_are_closed_where_the_ranks_are_in_step(ending, closes):
    closed = []

    def run(train):
        if ending is not None:
            raise ending

    job = TrainJob.__new__(TrainJob)
    job._trainer, job._serving = SimpleNamespace(train=None), SimpleNamespace(close=lambda: closed.append(1))
    job._training = SimpleNamespace(carry_out=run)
    if ending is None:
        job.run()
    else:
        with pytest.raises(type(ending), match=str(ending)):
            job.run()
    assert len(closed) == closes


@pytest.mark.parametrize("fails", [False, True])
def test_servers_are_ended_before_the_trackers_are_waited_for(fails):
    order = []

    def end_servers():
        order.append("servers")
        if fails:
            raise RuntimeError("no answer")

    job = TrainJob.__new__(TrainJob)
    job._rollout = SimpleNamespace(close=end_servers)
    job.journal = SimpleNamespace(close=lambda: order.append("journal"))
    with pytest.raises(RuntimeError) if fails else nullcontext():
        job.close()
    assert order == ["servers", "journal"]
