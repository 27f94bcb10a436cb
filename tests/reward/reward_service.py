"""A reward service whose answers a test makes up."""

import asyncio
import contextlib
import itertools
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from dynamo_megatron.types import Prompt

PROMPT = Prompt("p7", text="?", answer="1")


class Service(ThreadingHTTPServer):
    """`answer(samples, n)` gives the n-th request (from 1) a body or (status, body); None drops the connection."""

    request_queue_size = 64

    def __init__(self, answer):
        self.answer = answer
        self.requests, self.under_way, self.most_under_way = [], 0, 0
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/score?strict=1"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def die(self):
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        service = self.server
        assert self.path == "/score?strict=1" and self.headers["Content-Type"] == "application/json"
        service.headers = self.headers
        samples = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["samples"]
        with service.lock:
            service.requests.append(samples)
            number = len(service.requests)
            service.under_way += 1
            service.most_under_way = max(service.most_under_way, service.under_way)
        answer = service.answer(samples, number)
        with service.lock:
            service.under_way -= 1
        if answer is None:
            return
        status, body, headers = (*answer, {})[:3] if isinstance(answer, tuple) else (200, answer, {})
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if isinstance(body, itertools.repeat):  # until the reader has enough
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                self.wfile.writelines(body)
            return
        encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_header("Content-Length", str(len(encoded)))
        self.send_header("Location", "/elsewhere")
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(encoded)

    def log_message(self, *_):
        pass


def lengths(samples, _number):
    return {"rewards": [len(sample["response"]) for sample in samples]}


def scored(reward_pool, *responses, prompt=PROMPT):
    """Each response's score, or the error it raised."""

    async def gather():
        return await asyncio.gather(*(reward_pool.score(prompt, r) for r in responses), return_exceptions=True)

    return asyncio.run(gather())
