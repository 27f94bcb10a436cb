"""Scripts that use Megatron, each in a fork of one process that has imported it: an import takes seconds.

Run as a script, this file is that process: it reads a line of JSON for each script and answers with its exit code.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import traceback
from pathlib import Path


@functools.cache
def _starter(pythonpath: str | None) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )


def run_preloaded(script: Path | str, *words: str, log: Path, timeout: float) -> None:
    """Runs `python -P SCRIPT WORDS...` with OMP_NUM_THREADS=1 and its output in `log` (a rank that outlives it would
    hold a pipe). Raises AssertionError with the end of the log unless it succeeds within `timeout` seconds."""
    starter = _starter(os.environ.get("PYTHONPATH"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    starter.stdin.write(json.dumps([[str(script), *words], str(log), environment]) + "\n")
    starter.stdin.flush()
    if not select.select([starter.stdout], [], [], timeout)[0]:
        os.killpg(starter.pid, signal.SIGKILL)  # the script and its ranks, too
        _starter.cache_clear()
        raise AssertionError(f"{script}: not done after {timeout:g} s; its output is in {log}")
    code = starter.stdout.readline().strip()
    assert code == "0", f"{script}: exit code {code}\n{log.read_text()[-6000:]}"


def serve() -> None:
    sys.path.append(str(Path(__file__).parent))  # for the scripts, which -P leaves without it
    from dynamo_megatron.policy import backend

    backend.enable_cpu()

    import dynamo_megatron.checkpoint.convert
    import dynamo_megatron.policy.policy
    import dynamo_megatron.weight_sync.sync  # noqa: F401

    for line in sys.stdin:
        arguments, log, environment = json.loads(line)
        pid = os.fork()
        if pid == 0:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.environ.clear()
            os.environ.update(environment)
            sys.argv = arguments
            code = 1
            try:
                runpy.run_path(arguments[0], run_name="__main__")
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve()
