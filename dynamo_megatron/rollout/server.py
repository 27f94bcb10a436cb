"""One SGLang server as a child process. HTTP is the only contract: its interpreter may be another one than ours."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import torch

from dynamo_megatron.config import ModelConfig, RolloutConfig
from dynamo_megatron.models.torch_dist import is_torch_dist
from dynamo_megatron.rollout.result import RolloutError

STOP_GRACE = 5.0  # seconds between SIGTERM and SIGKILL
CPU_STAND_INS = Path(__file__).parent / "sglang_cpu"
# A server that inherits these joins the trainer's own rendezvous, or returns logprobs from before the temperature.
FOREIGN_VARIABLES = re.compile(
    r"(TORCHELASTIC_\w+|(GROUP_|ROLE_|LOCAL_)?RANK|(GROUP_|ROLE_|LOCAL_)?WORLD_SIZE|ROLE_NAME|MASTER_(ADDR|PORT)"
    r"|SGLANG_RETURN_ORIGINAL_LOGPROB)"
)
ERROR_LINE = re.compile(r"^[\w.]*(Error|Exception|Interrupt)\b.*|.*: error: .*", re.MULTILINE)


class SGLangServer:
    """Starts, watches and stops `sglang.launch_server` on 127.0.0.1 with the weights of `model.path`.

    Without a GPU it runs SGLang's CPU engine. `log` gets the server's stdout and stderr (appended). The head's logits
    are float32, as in `dynamo_megatron.kernels`. Raises ValueError where `config.port` is taken.
    """

    def __init__(self, config: RolloutConfig, model: ModelConfig, log: str | os.PathLike):
        self.log = Path(log)
        self._config, self._model = config, model
        self._process: subprocess.Popen | None = None
        self._log_start = 0
        self.port = config.port or 0
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self.port))
            except OSError as error:
                raise ValueError(
                    f"rollout.port: port {self.port} cannot be used ({error.strerror}); free it, name another one, "
                    "or leave the key out for a free one"
                ) from None
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Returns at once. The server ends when this process does, however that happens."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        on_cpu = not torch.cuda.is_available()
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "dynamo_megatron.rollout.guard", *self._command(on_cpu)],
                env=self._environment(on_cpu),
                stdin=subprocess.PIPE,  # held open as long as this process lives
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    async def wait_ready(self) -> None:
        """Raises RolloutError where the server ends or does not answer within `config.start_timeout` seconds."""
        deadline = time.monotonic() + self._config.start_timeout
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
            while time.monotonic() < deadline:
                self.check()
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(f"{self.url}/health") as reply:
                        if reply.status == 200:
                            return
                await asyncio.sleep(0.5)
        raise RolloutError(
            f"the SGLang server did not answer within rollout.start_timeout ({self._config.start_timeout:g} s); "
            f"see {self.log}"
        )

    def check(self) -> None:
        """Raises RolloutError, with what its log says, if the server process has ended."""
        assert self._process is not None, "not started"
        code = self._process.poll()
        if code is None:
            return
        cause = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise RolloutError(f"the SGLang server ended ({cause}): {self._last_words()}; see {self.log}")

    def stop(self) -> None:
        """Ends the server and all its processes within a few seconds."""
        if self._process is None:
            return
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_GRACE)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(STOP_GRACE)
        self._process.stdin.close()
        self._process = None

    def _last_words(self) -> str:
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            text = log.read().decode(errors="replace")
        errors = [match.group().strip() for match in ERROR_LINE.finditer(text)]
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return (errors or lines or ["its log is empty"])[-1]

    def _command(self, on_cpu: bool) -> list[str]:
        config = self._config
        command = [config.python or sys.executable, "-P", "-m", "sglang.launch_server"]
        command += ["--model-path", self._model.path, "--dtype", self._model.dtype, "--enable-fp32-lm-head"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--tp-size", str(config.tp)]
        command += ["--weight-version", "0", "--skip-server-warmup", "--log-level-http", "warning"]
        if is_torch_dist(self._model.path):
            command += ["--load-format", "dummy"]  # SGLang cannot read it; the first push brings the weights
        if on_cpu:
            # Room for a few of the longest sequences; the KV cache would otherwise take a share of all memory.
            longest = self._model.max_length or 2 * config.max_new_tokens
            command += ["--device", "cpu", "--attention-backend", "torch_native", "--sleep-on-idle"]
            command += ["--max-total-tokens", str(max(16384, 2 * longest))]
            command += ["--max-running-requests", str(config.concurrency)]
        else:
            command += ["--mem-fraction-static", str(config.memory_fraction)]
        return command + config.server_args

    def _environment(self, on_cpu: bool) -> dict[str, str]:
        environment = {key: value for key, value in os.environ.items() if not FOREIGN_VARIABLES.fullmatch(key)}
        if on_cpu:
            inherited = environment.get("PYTHONPATH")
            environment["PYTHONPATH"] = os.pathsep.join([str(CPU_STAND_INS), *([inherited] if inherited else [])])
            environment["SGLANG_USE_CPU_ENGINE"] = "1"
            environment["OMP_NUM_THREADS"] = "1"
            if self._config.tp > 1:  # SGLang's default is a NUMA node for each rank
                cores = sorted(os.sched_getaffinity(0))
                binding = "|".join(str(cores[rank % len(cores)]) for rank in range(self._config.tp))
                environment.setdefault("SGLANG_CPU_OMP_THREADS_BIND", binding)
        return environment
