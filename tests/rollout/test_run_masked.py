import signal
import subprocess
import sys

import pytest

from dynamo_megatron.rollout.servers.server import RUN_MASKED

MODULE = """
import multiprocessing
import signal

imports = 0


def show():
    print(imports, sorted(s.name for s in signal.pthread_sigmask(signal.SIG_BLOCK, ())), flush=True)


if __name__ == "__main__":
    imports = 1  # as SGLang's modules are: there before its processes start
    multiprocessing.set_start_method("spawn", force=True)
    child = multiprocessing.Process(target=show)
    child.start()
    child.join()
"""


@pytest.mark.parametrize(("words", "inherited"), [([], 0), (["--fork"], 1)])
def test_children_keep_the_signals_blocked_and_a_fork_what_was_imported(words, inherited, tmp_path):
    (tmp_path / "server.py").write_text(MODULE)
    ran = subprocess.run(
        [sys.executable, "-P", str(RUN_MASKED), *words, "server"],
        env={"PYTHONPATH": str(tmp_path)},
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.stdout == f"{inherited} ['SIGTERM', 'SIGUSR1']\n", ran.stderr
