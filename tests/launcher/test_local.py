import signal

from dynamo_megatron.launcher.local import run_ranks


def test_signals_are_the_callers_again_afterwards(tmp_path):
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    assert run_ranks(["report", "--help"], 1, tmp_path) == 0
    assert [signal.getsignal(number) for number in numbers] == before
