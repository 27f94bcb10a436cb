"""The asynchronous client of one SGLang server: token ids in, token ids and logprobs out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp

from dynamo_megatron.config import RolloutConfig
from dynamo_megatron.rollout.result import RolloutError

CONTROL_TIMEOUT = 30.0  # seconds, for calls that do no work to speak of


@dataclass(frozen=True)
class Response:
    """A response of R tokens. `logprobs`: float [R], natural log of softmax(z/T) at the sampling temperature.

    `weight_versions`: (version, start, end) spans over the response. `finish_reason`: "stop" (the end token, if that is
    what stopped it, is the last token), "length", or, with no tokens and `error` saying why, "abort" (timed out, or
    ended by the engine) and "error" (refused by the server).
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weight_versions: list[tuple[int, int, int]] = field(default_factory=list)
    finish_reason: str = "error"
    error: str = ""


class SGLangClient:
    """Use as `async with`. At most `config.concurrency` requests are under way."""

    def __init__(self, url: str, config: RolloutConfig, eos_token_ids: Sequence[int]):
        self.url = url
        self._config = config
        self._slots = asyncio.Semaphore(config.concurrency)
        # Everything that reshapes the distribution is said here, so that no default of server or model can.
        self._sampling = {
            "temperature": config.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "max_new_tokens": config.max_new_tokens,
            "stop": list(config.stop),
            "stop_token_ids": list(eos_token_ids),
        }

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            base_url=self.url,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONTROL_TIMEOUT),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def check(self) -> None:
        """Raises RolloutError where no SGLang server answers at `url`."""
        status, reply = await self._control("GET", "/model_info", CONTROL_TIMEOUT)
        if status != 200 or not isinstance(reply, dict):
            raise RolloutError(f"{self.url} is no SGLang server: /model_info says {status} {_message(reply)!r:.80}")

    async def generate(
        self,
        rollout_id: str,
        prompt_tokens: Sequence[int],
        *,
        temperature: float | None = None,
        max_new_tokens: int | None = None,
    ) -> Response:
        """One response. What goes wrong with this request alone is in the Response.

        temperature (0: greedy) and max_new_tokens: None for the config's. Raises RolloutError where the server cannot
        be reached.
        """
        sampling = dict(self._sampling)
        if temperature is not None:
            sampling["temperature"] = temperature
        if max_new_tokens is not None:
            sampling["max_new_tokens"] = max_new_tokens
        payload = {"input_ids": list(prompt_tokens), "return_logprob": True, "sampling_params": sampling}
        async with self._slots:
            try:
                async with asyncio.timeout(self._config.timeout):
                    status, reply = await self._generate(rollout_id, payload)
            except TimeoutError:
                await self._abort(rollout_id)
                message = f"no response to {rollout_id} within rollout.timeout ({self._config.timeout:g} s)"
                return Response(finish_reason="abort", error=message)
        if status != 200:
            return Response(error=f"{rollout_id}: the server refused it: {_message(reply)}")
        return self._response(rollout_id, reply["meta_info"])

    async def rest(self) -> None:
        """Ends all requests under way and drops cached prefixes. Raises RolloutError."""
        await self._control("POST", "/abort_request", CONTROL_TIMEOUT, {"abort_all": True})
        status, reply = await self._control("POST", f"/flush_cache?timeout={CONTROL_TIMEOUT:g}", 2 * CONTROL_TIMEOUT)
        if status != 200:
            raise RolloutError(f"the rollout server {self.url} cannot come to rest: {_message(reply)}")

    async def update_weights(self, folder: str, version: int) -> None:
        """Loads the Hugging Face folder's weights; requests still under way are aborted, cached prefixes dropped.

        Raises RolloutError with the server's message where it fails or the server then reports another version.
        """
        # The update refuses to drop cached prefixes while a timed-out request is still being ended; flushing waits.
        await self.rest()
        payload = {"model_path": folder, "weight_version": str(version), "flush_cache": True}
        what = f"weight version {version} from {folder}"
        status, reply = await self._control("POST", "/update_weights_from_disk", self._config.start_timeout, payload)
        if status != 200:
            raise RolloutError(f"the rollout server {self.url} did not load {what}: {_message(reply)}")
        status, reply = await self._control("GET", "/model_info", CONTROL_TIMEOUT)
        if status != 200:
            raise RolloutError(f"the rollout server {self.url} does not tell its weight version: {_message(reply)}")
        if reply["weight_version"] != str(version):
            raise RolloutError(f"the rollout server {self.url} got {what} but reports {reply['weight_version']!r}")

    async def _generate(self, rollout_id: str, payload: dict[str, Any]) -> tuple[int, Any]:
        lost = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError)
        try:
            return await self._post("/generate", payload | {"rid": rollout_id})
        except lost:
            # A kept-alive connection may be closed under a request. The server may know the first one's id still.
            try:
                return await self._post("/generate", payload | {"rid": f"{rollout_id}-retry"})
            except lost as error:
                raise RolloutError(f"the rollout server {self.url} does not answer: {error}") from error

    async def _abort(self, rollout_id: str) -> None:
        # The timed-out request has lost its connection, which aborts it too, only later.
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with asyncio.timeout(CONTROL_TIMEOUT):
                await self._post("/abort_request", {"rid": rollout_id})

    async def _control(self, method: str, path: str, timeout: float, payload: dict | None = None) -> tuple[int, Any]:
        try:
            async with asyncio.timeout(timeout), self._session.request(method, path, json=payload) as reply:
                return reply.status, await _body(reply)
        except TimeoutError:
            raise RolloutError(f"the rollout server {self.url} did not answer {path} within {timeout:g} s") from None
        except aiohttp.ClientError as error:
            raise RolloutError(f"the rollout server {self.url} does not answer {path}: {error}") from error

    async def _post(self, path: str, payload: dict[str, Any]) -> tuple[int, Any]:
        async with self._session.post(path, json=payload) as reply:
            return reply.status, await _body(reply)

    def _response(self, rollout_id: str, meta: dict[str, Any]) -> Response:
        finish = meta["finish_reason"]
        matched = finish.get("matched")
        if finish["type"] == "abort":
            return Response(finish_reason="abort", error=f"{rollout_id}: the engine aborted it: {finish['message']}")
        if isinstance(matched, str) and matched not in self._config.stop:
            # The engine ends a sequence whose logits are NaN like one that met a stop text.
            return Response(error=f"{rollout_id}: the engine stopped it: {matched}")
        return Response(
            tokens=[token for _, token, _ in meta["output_token_logprobs"]],
            logprobs=[logprob for logprob, _, _ in meta["output_token_logprobs"]],
            weight_versions=[(int(span["version"]), span["start"], span["end"]) for span in meta["weight_versions"]],
            finish_reason=finish["type"],
        )


async def _body(reply: aiohttp.ClientResponse) -> Any:
    return await reply.json() if reply.content_type == "application/json" else await reply.text()


def _message(reply: Any) -> str:
    """The server's own words in one line: error replies have several shapes."""
    if isinstance(reply, dict):
        error = reply.get("error")
        reply = error.get("message") if isinstance(error, dict) else reply.get("message", reply)
    return " ".join(str(reply).split())
