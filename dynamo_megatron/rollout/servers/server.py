"""One SGLang server as a child process. HTTP is the only contract: its interpreter may be another one than ours."""

from __future__ import annotations

import asyncio
import contextlib
import glob
import ipaddress
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from dynamo_megatron.config import ModelConfig, RolloutConfig
from dynamo_megatron.config.rollout import FP8_CONFIG
from dynamo_megatron.errors import InputError
from dynamo_megatron.rollout.client import ServerLost, SGLangClient, open_session
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.rollout.servers.server_api import CACHES, CONTROL_TIMEOUT, LONGEST, Endpoint, call, call_for
from dynamo_megatron.runtime import guard, plain_json
from dynamo_megatron.runtime.cores import usable_cores, users_threads
from dynamo_megatron.runtime.late import torch
from dynamo_megatron.runtime.listening import GLOO_INTERFACE, check_port, free_port, http_url, interface_of
from dynamo_megatron.runtime.log_files import mark, open_log, text_since
from dynamo_megatron.runtime.plain_text import on_one_line

STOP_GRACE = 40.0  # seconds that the guard has to end the server and clear away what it leaves
POLL_EVERY = 0.5  # seconds
ALL_THAT_IS_FREE = 0.9  # SGLang's activations and CUDA graphs take the rest
ALONE = Path(__file__).parent / "sglang_alone"
FP8_PLUGINS = Path(__file__).parent / "sglang_fp8"
CPU_STAND_INS = Path(__file__).parent / "sglang_cpu"
MODELS = Path(__file__).parent / "sglang_models"
RUN_MASKED = Path(__file__).with_name("run_masked.py")
# A server that inherits these joins the trainer's own rendezvous, or returns logprobs from before the temperature.
FOREIGN_VARIABLES = re.compile(
    r"(TORCHELASTIC_\w+|(GROUP_|ROLE_|LOCAL_)?RANK|(GROUP_|ROLE_|LOCAL_)?WORLD_SIZE|ROLE_NAME|MASTER_(ADDR|PORT)"
    r"|SGLANG_RETURN_ORIGINAL_LOGPROB)"
)
# With these there are several groups of ranks, or ranks on other hosts: they meet as SGLang has them do.
SEVERAL_GROUPS = ("--dp", "--data-parallel", "--nnodes", "--dist-init-addr", "--nccl-port")
OVERRIDE = "--json-model-override-args"
CONTEXT, LONGER_CONTEXT = "--context-length", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
# Tokens. SGLang 0.5.23 takes an input of fewer than its context less 6, and a sequence of its context less 2.
BEYOND = 6
ERROR_LINE = re.compile(r"^[\w.]*(Error|Exception|Interrupt)\b.*|.*: error: .*", re.MULTILINE)
ASK_TIMEOUT = 60.0  # seconds for an interpreter to start, from a busy network file system
CUDA_RUNTIME = """
import glob, json, os, sys
files = [file for folder in sys.path for file in sorted(glob.glob(folder + "/nvidia/*/lib/libcudart.so.*"))]
print(json.dumps(list(dict.fromkeys(map(os.path.dirname, files)))))
"""
GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # NVIDIA's, AMD's, Windows's


def cuda_available() -> bool:
    """torch.cuda.is_available(), without the import of torch where there is no driver to ask."""
    return _has_driver() and torch.cuda.is_available()


def gpu_count() -> int:
    """torch.cuda.device_count(), likewise."""
    return torch.cuda.device_count() if _has_driver() else 0


def _has_driver() -> bool:
    return "torch" in sys.modules or any(map(os.path.exists, GPU_DRIVERS))  # imported, torch answers at once


def shares_memory(config: RolloutConfig, *, gpus: bool | None = None) -> bool:
    """Whether `rollout.offload` has servers and ranks take turns. `gpus`: they run on GPUs; None: if there are any."""
    if config.offload != "auto":
        return config.offload
    on_gpus = cuda_available() if gpus is None else gpus
    return config.engine == "sglang" and config.placement == "colocated" and on_gpus


def cpu_threads(config: RolloutConfig, servers: int) -> int:
    """OpenMP threads of a rank of one of `servers` on this node, without a GPU: the user's OMP_NUM_THREADS, else a
    share of the cores that this process may use. Ranks take turns with the servers, or with `rollout.max_staleness` get
    half of the cores."""
    cores = usable_cores() // (2 if config.max_staleness else 1)
    return users_threads() or max(1, cores // (servers * config.tp))


def listening_address(host: str) -> str:
    """The IP address that `rollout.host` means on this node: itself, or the IPv4 address of the interface or host it
    names.

    Raises ValueError where it is neither.
    """
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(host.strip("[]").replace("*", "0.0.0.0")))
    interfaces = psutil.net_if_addrs()
    for address in interfaces.get(host, []):
        if address.family == socket.AF_INET:
            return address.address
    try:
        return socket.gethostbyname(host)
    except OSError:
        raise InputError(
            f"rollout.host: {host!r} is neither an address nor an interface of {socket.gethostname()} "
            f"({', '.join(sorted(interfaces))})"
        ) from None


def check_reachable(config: RolloutConfig, hosts: Sequence[str]) -> None:
    """Raises ValueError where the servers beside ranks on `hosts` would hear their own host alone: the run would go on
    with those of rank 0's."""
    several = sorted(set(hosts))
    if config.engine != "sglang" or config.placement != "colocated" or len(several) == 1:
        return
    if ipaddress.ip_address(listening_address(config.host)).is_loopback:
        raise InputError(
            f"rollout.host: {config.host!r} is each host's own, and the ranks are on {len(several)} ({several[0]}, "
            f"{several[1]}...): rank 0 could not reach the others' servers; name the interface between them, as in "
            "rollout.host=ib0"
        )


def library_path(python: str) -> str | None:
    """Returns LD_LIBRARY_PATH for the ranks of a server under the interpreter `python`: the folders of the CUDA runtime
    that pip installed for it, then this process's own value. None: nothing to set.

    torch finds the runtime by itself. torch_memory_saver's hook, which SGLang preloads for `rollout.offload`, does not.
    """
    folders, asked = [], [python, "-P", "-c", CUDA_RUNTIME]
    # The server's own start says what is wrong with its interpreter.
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        done = subprocess.run(asked, capture_output=True, text=True, timeout=ASK_TIMEOUT, check=True)
        folders = json.loads(done.stdout)
    inherited = os.environ.get("LD_LIBRARY_PATH")
    return os.pathsep.join([*folders, *([inherited] if inherited else [])]) or None


def with_override(arguments: Sequence[str], fields: Mapping[str, Any]) -> list[str]:
    """Arguments of SGLang by which it takes config.json's `fields` for these, besides the others that they override."""
    others, given = list(arguments), {}
    if OVERRIDE in others[:-1]:
        place = others.index(OVERRIDE)
        given = json.loads(others[place + 1])
        del others[place : place + 2]
    return [*others, OVERRIDE, json.dumps({**given, **fields})]


def _has_home() -> bool:
    """Whether packages can keep what they compile in this user's home."""
    caches = os.path.expanduser("~/.cache")
    if not os.path.isabs(caches):  # nobody knows the user
        return False
    with contextlib.suppress(OSError):
        os.makedirs(caches, exist_ok=True)
    return os.access(caches, os.W_OK)


class SGLangServer:
    """Starts, watches and stops one `sglang.launch_server` with the weights of `model.path`.

    It is the `slot`-th of `slots` on this node, which says its GPUs, or without a GPU its CPU cores. Without a GPU it
    runs SGLang's CPU engine. `log` gets its stdout and stderr (appended, readable to its owner only: SGLang writes the
    API key there). The head's logits are float32, as in `dynamo_megatron.kernels`. `cached_tokens`: of its KV cache, as
    in an earlier start; None: what `rollout.memory_fraction` gives, which is known once the server is ready.
    Raises ValueError where `config.port` is taken or `config.host` unknown.
    """

    def __init__(
        self,
        config: RolloutConfig,
        model: ModelConfig,
        log: str | os.PathLike,
        *,
        name: str = "server-0",
        incarnation: int = 1,
        slot: int = 0,
        slots: int = 1,
        cached_tokens: int | None = None,
    ):
        self.log = Path(log)
        self._config, self._model, self._slot, self._slots = config, model, slot, slots
        self.cached_tokens = cached_tokens
        self._process: subprocess.Popen | None = None
        self._folders: list[str] = []
        self._log_start = 0
        self._served_name = f"{name}-{secrets.token_hex(8)}"  # of this start alone
        self._host = listening_address(config.host)
        self._port = config.port + slot if config.port else free_port()  # it is bound seconds later
        check_port(self._host, self._port, "rollout.port")
        url = http_url(self._host, self._port)
        # One that outlives its run (comparison/runs.py) has the key that the next run knows.
        key = os.environ[config.api_key_env] if config.api_key_env else secrets.token_hex(32)
        self.endpoint = Endpoint(name, incarnation, url, config.tp, key)

    def start(self) -> None:
        """Returns at once. The server ends when this process does, however that happens."""
        self._log_start, on_cpu = mark(self.log), not cuda_available()
        try:
            with open(open_log(self.log, 0o600), "ab") as log:
                self._folders.append(tempfile.mkdtemp(prefix="dynamo-megatron-"))
                # Its ranks meet under a lock (flock), which the temporary folder's file system may not have.
                self._folders.append(tempfile.mkdtemp(prefix="dynamo-megatron-", dir=guard.SHARED_MEMORY))
                secret = Path(self._folders[0], "server.yaml")  # `ps` shows a command line to all users
                secret.touch(mode=0o600)
                secret.write_text(yaml.safe_dump({"api-key": self.endpoint.api_key}))
                command, environment = [*self._command(on_cpu), "--config", str(secret)], self._environment(on_cpu)
                output = {"stdout": log, "stderr": subprocess.STDOUT}
                self._process = guard.guarded(command, self._folders, env=environment, **output)
        except OSError:
            self._remove_folders()
            raise

    async def wait_ready(self) -> None:
        """Until the server, and no other one at its port, has answered a request.

        Raises RolloutError where it ends, is another one, or has not come so far in `config.start_timeout` seconds.
        """
        deadline = time.monotonic() + self._config.start_timeout
        async with open_session() as session:
            client = SGLangClient(session, self.endpoint, self._config, [])
            while time.monotonic() < deadline:
                self.check()
                if await client.healthy(timeout=30.0):
                    break
                await asyncio.sleep(POLL_EVERY)
            else:
                raise RolloutError(
                    f"the SGLang server did not answer within rollout.start_timeout ({self._config.start_timeout:g} s)"
                    f"; see {self.log}"
                )
            asked = self.endpoint, "/server_info", None, CONTROL_TIMEOUT, "served_model_name", "max_total_num_tokens"
            name, cached = await asyncio.to_thread(call_for, *asked)
            if name != self._served_name:
                raise RolloutError(f"{self.endpoint.url} is answered by another server, not by the one started there")
            self.cached_tokens = self.cached_tokens or cached
            await self._warm_up(client, max(1.0, deadline - time.monotonic()))
            await client.freeze_gc()

    async def _warm_up(self, client: SGLangClient, timeout: float) -> None:
        """Has it generate a few tokens as rollouts will ask for them. Raises RolloutError."""
        try:
            response = await client.generate("warm-up", [0, 0, 0], timeout=timeout, max_new_tokens=4)
        except ServerLost as error:
            raise RolloutError(f"{error}; see {self.log}") from None
        if response.error:
            raise RolloutError(f"the SGLang server did not generate: {response.error}; see {self.log}")

    async def release_caches(self) -> None:
        """Leaves the GPU to the ranks but for the weights, until they resume the caches. Raises RolloutError."""
        given = self.endpoint, "/release_memory_occupation", {"tags": list(CACHES)}, CONTROL_TIMEOUT
        await asyncio.to_thread(call, *given)

    def check(self) -> None:
        """Raises RolloutError, with what its log says, if the server process has ended."""
        assert self._process is not None, "not started"
        if (code := self._process.poll()) is None:
            return
        cause = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise RolloutError(f"the SGLang server ended ({cause}): {self._last_words()}; see {self.log}")

    def stop(self) -> None:
        """Ends the server and all its processes at once, and clears away what they leave."""
        if self._process is None:
            return
        guard.end(self._process, STOP_GRACE)
        self._process.wait()
        self._process = None
        self._remove_folders()  # a guard that was killed has left them, and the key in one

    def _remove_folders(self) -> None:
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

    def _last_words(self) -> str:
        text = text_since(self.log, self._log_start)
        errors = [match.group().strip() for match in ERROR_LINE.finditer(text)]
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return on_one_line((errors or lines or ["its log is empty"])[-1], LONGEST)

    def _command(self, on_cpu: bool) -> list[str]:
        config = self._config
        fork = ["--fork"] if on_cpu and not config.python else []
        command = [config.python or sys.executable, "-P", str(RUN_MASKED), *fork, "sglang.launch_server"]
        command += ["--model-path", self._model_path(), "--dtype", self._model.dtype, "--enable-fp32-lm-head"]
        command += ["--host", self._host, "--port", str(self._port), "--tp-size", str(config.tp)]
        command += ["--weight-version", "0", "--skip-server-warmup", "--log-level-http", "warning"]
        command += ["--served-model-name", self._served_name]
        if not config.stop and config.agent is None:  # no text is looked for in responses, and no tool calls are parsed
            command.append("--skip-tokenizer-init")
        if config.router_replay and self._model_config().get("num_experts_per_tok"):
            command.append("--enable-return-routed-experts")
        arguments = config.server_args
        if config.quantization is not None:
            arguments = with_override(arguments, {"quantization_config": FP8_CONFIG})
        # Where SGLang cannot read the folder, or would not quantise it, the first weight sync brings the weights.
        # (checkpoint/torch_dist.py imports torch.)
        if config.quantization is not None or (Path(self._model.path) / ".metadata").is_file():
            command += ["--load-format", "dummy"]
        if on_cpu:
            # Room for a few of the longest sequences; the KV cache would otherwise take a share of all memory.
            longest = self._model.max_length or 2 * config.max_new_tokens
            command += ["--device", "cpu", "--attention-backend", "torch_native", "--sleep-on-idle"]
            command.append("--disable-overlap-schedule")  # it decodes what has ended once more, and overlaps nothing
            command += ["--max-total-tokens", str(max(16384, 2 * longest))]
            command += ["--max-running-requests", str(config.concurrency)]
        else:
            if self.cached_tokens is None or shares_memory(config):
                command += ["--mem-fraction-static", str(config.memory_fraction)]
            else:  # SGLang would take the fraction of what ranks have left free: less, or less than the weights
                command += ["--mem-fraction-static", str(max(ALL_THAT_IS_FREE, config.memory_fraction))]
                command += ["--max-total-tokens", str(self.cached_tokens)]
            command += ["--base-gpu-id", str(self._slot * config.tp)]
            if shares_memory(config):
                command += ["--enable-memory-saver"]
        return [*command, *self._context(), *arguments]

    def _model_path(self) -> str:
        """`model.path`, or a link to it where SGLang would take its name for a pattern of files."""
        path = self._model.path
        if glob.has_magic(path):
            path = os.path.join(self._folders[0], "model")
            os.symlink(os.path.abspath(self._model.path), path)
        return path

    def _context(self) -> list[str]:
        """Arguments by which a sequence may have all of `model.max_length`, wherever a weight sync interrupts it; []
        where it may without them. No position beyond the model's is ever computed: prompt and response are limited by
        ours."""
        most = self._model_config().get("max_position_embeddings")
        if type(most) is not int or any(argument.startswith(CONTEXT) for argument in self._config.server_args):
            return []
        context = (self._model.max_length or most) + BEYOND
        return [CONTEXT, str(context)] if context > most else []

    def _model_config(self) -> dict[str, Any]:
        file = Path(self._model.path) / "config.json"
        return plain_json.read_object(file) if file.is_file() else {}

    def _environment(self, on_cpu: bool) -> dict[str, str]:
        environment = {key: value for key, value in os.environ.items() if not FOREIGN_VARIABLES.fullmatch(key)}
        environment["TMPDIR"] = self._folders[0]
        if not _has_home():
            environment.setdefault("SGLANG_CACHE_DIR", f"{self._folders[0]}/caches")
            environment.setdefault("TRITON_HOME", self._folders[0])
        if not any(argument.startswith(SEVERAL_GROUPS) for argument in self._config.server_args):
            # Its ranks meet in a file: torch's store at a port would listen on every interface.
            environment.setdefault("SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE", f"file://{self._folders[1]}/ranks")
        if (interface := interface_of(self._host)) is not None:
            environment.setdefault(GLOO_INTERFACE, interface)
        # Of a restart, beside ranks of different sizes.
        environment.setdefault("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "0")
        if shares_memory(self._config):
            environment["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"  # else it cannot release them, and says nothing
            if not on_cpu and (folders := library_path(self._config.python or sys.executable)) is not None:
                environment["LD_LIBRARY_PATH"] = folders
        inherited = environment.get("PYTHONPATH")
        ours = [str(ALONE), *([str(CPU_STAND_INS)] if on_cpu else [])]
        if self._config.quantization is not None:
            ours.append(str(FP8_PLUGINS))
        if on_cpu and (file := str(self._model_config().get("model_type", ""))).isidentifier():
            ours.append(str(MODELS))
            environment["SERVED_MODEL_FILE"] = file
            environment.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", "served_models")
        if self._context():
            environment[LONGER_CONTEXT] = "1"
        environment["PYTHONPATH"] = os.pathsep.join([*ours, *([inherited] if inherited else [])])
        if on_cpu:
            environment["SGLANG_USE_CPU_ENGINE"] = "1"
            environment["OMP_NUM_THREADS"] = str(cpu_threads(self._config, self._slots))
            environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin take six times a small model's CPU
            environment |= {"MASTER_ADDR": self._host, "MASTER_PORT": str(self._port)}  # name its shared memory
            if self._slots * self._config.tp > 1:  # SGLang's default is a NUMA node for each rank of a server
                environment.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(self._cores()))
        return environment

    def _cores(self) -> list[str]:
        """CPU cores of each rank of this server: an equal share of this process's, or one that it shares."""
        cores = sorted(os.sched_getaffinity(0))
        ranks, first = self._slots * self._config.tp, self._slot * self._config.tp
        shares = [cores[r::ranks] or [cores[r % len(cores)]] for r in range(first, first + self._config.tp)]
        return [",".join(map(str, share)) for share in shares]
