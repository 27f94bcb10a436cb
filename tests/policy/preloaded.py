"""Scripts that use Megatron, each in a fork of one process that has imported it: an import takes seconds.

Run as a script, this file is that process: it reads a line of JSON for each script and answers with its exit code.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import subprocess
import sys
from functools import cache, partial
from pathlib import Path


@cache
def _starter(pythonpath: str | None) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )


def run_preloaded(script: Path | str, *words: str, log: Path, timeout: float) -> None:
    """Runs `python -P SCRIPT WORDS...` with OMP_NUM_THREADS=1 and its output in `log` (a rank that outlives it would
    hold a pipe). Raises AssertionError with the end of the log unless it succeeds within `timeout` seconds.

    A script that still runs when pytest ends is killed, and its ranks too."""
    starter = _starter(os.environ.get("PYTHONPATH"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    starter.stdin.write(json.dumps([[str(script), *words], str(log), environment]) + "\n")
    starter.stdin.flush()
    answered = False
    try:
        answered = bool(select.select([starter.stdout], [], [], timeout)[0])
        assert answered, f"{script}: not done after {timeout:g} s; its output is in {log}"
    finally:
        if not answered:  # pytest's own limit may have ended the wait
            os.killpg(starter.pid, signal.SIGKILL)  # the script and its ranks, too
            _starter.cache_clear()
    code = starter.stdout.readline().strip()
    assert code == "0", f"{script}: exit code {code}\n{log.read_text()[-6000:]}"


def serve() -> None:
    sys.path.append(str(Path(__file__).parent))  # for the scripts, which -P leaves without it
    from forked_ranks import fork

    from dynamo_megatron.policy import backend

    backend.enable_cpu()

    import dynamo_megatron.checkpoint.convert
    import dynamo_megatron.policy.policy
    import dynamo_megatron.weight_sync.sync  # noqa: F401

    for line in sys.stdin:
        arguments, log, environment = json.loads(line)
        pid = fork(partial(run, arguments, environment), Path(log))
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            if select.select([sys.stdin], [], [], 0.02)[0]:  # pytest has ended
                os.killpg(0, signal.SIGKILL)
        print(os.waitstatus_to_exitcode(ended[1]), flush=True)


def run(arguments: list[str], environment: dict[str, str]) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    serve()
