"""Servers that answer oddly: each is a ServerError, or a mismatch, of that server and no more."""

import contextlib
import json
import socketserver
import threading

import pytest

from dynamo_megatron.rollout.servers import server_api
from dynamo_megatron.rollout.servers.endpoint import Endpoint
from dynamo_megatron.rollout.servers.server_api import ServerError, call, check_version, set_version
from dynamo_megatron.weight_sync.proof import Expected, compare, mismatch, server_device


class _Handler(socketserver.StreamRequestHandler):
    def handle(self):
        head = []
        while (line := self.rfile.readline().decode().strip()) != "":
            head.append(line)
        length = next((int(h.split()[1]) for h in head if h.lower().startswith("content-length")), 0)
        self.rfile.read(length)
        self.server.heads.append(head)
        if isinstance(self.server.reply, bytes):
            self.wfile.write(self.server.reply)
            return
        status, body, lacking = self.server.reply
        self.wfile.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body) + lacking}\r\n\r\n{body}".encode())


@pytest.fixture
def odd():
    """odd(body, status, lacking) -> (an endpoint that answers so, `lacking` bytes too few; the requests' heads). A body
    in bytes is the whole reply."""
    with contextlib.ExitStack() as stack:

        def start(body, status=200, lacking=0, key=""):
            server = stack.enter_context(socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Handler))
            server.reply, server.heads = body if isinstance(body, bytes) else (status, body, lacking), []
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            stack.callback(server.shutdown)
            return Endpoint("server-0", 1, f"http://127.0.0.1:{server.server_address[1]}", 1, key), server.heads

        yield start


@pytest.mark.parametrize("status", [200, 500])
def test_a_reply_that_breaks_off(odd, status):
    endpoint, _ = odd('{"ranks": [', status, lacking=50)
    with pytest.raises(ServerError, match="/weights_checker: no answer"):
        mismatch(endpoint, Expected([{}], {}, [], []), 10)


@pytest.mark.parametrize("body", ["<html>", "[]", "null", '{"error": "no such thing"}'])
def test_a_reply_of_another_kind(odd, body):
    endpoint, _ = odd(body)
    asked = (
        lambda: mismatch(endpoint, Expected([{}], {}, [], []), 10),
        lambda: server_device(endpoint),
        lambda: check_version(endpoint, 1),
    )
    for ask, name in zip(asked, ("ranks", "device", "weight_version"), strict=True):
        with pytest.raises(ServerError, match=f"said nothing of {name}"):
            ask()


@pytest.mark.parametrize("ranks", [None, 3, [3], [{}], [{"checksums": None, "parallelism_info": [{"tp_rank": 0}]}]])
def test_checksums_of_another_kind(odd, ranks):
    endpoint, _ = odd(json.dumps({"ranks": ranks}))
    assert "form of SGLang" in mismatch(endpoint, Expected([{}], {}, [], []), 10)


def test_another_rank_than_there_are():
    one = {"checksums": {}, "parallelism_info": [{"tp_rank": 1}]}
    assert compare(Expected([{}], {}, [], []), [one]) == "1 ranks report where 1 are expected"


def test_a_push_ends_with_nothing_cached_from_before(odd):
    endpoint, heads = odd('{"weight_version": "3"}')
    set_version(endpoint, 3)
    assert [head[0].split("?")[0].split(" HTTP")[0] for head in heads] == [
        "POST /flush_cache",
        "POST /update_weight_version",
        "GET /model_info",
    ]


def test_keys_go_to_the_server_alone(odd, monkeypatch):
    proxy, asked = odd("{}")
    monkeypatch.setenv("http_proxy", proxy.url)
    for key, sent in (("", []), ("secret", ["Authorization: Bearer secret"])):
        endpoint, heads = odd("{}", key=key)
        assert call(endpoint, "/health", None, 10) == {}
        assert [h for h in heads[0] if h.startswith("Authorization")] == sent
    assert asked == []


def test_a_reply_without_an_end_is_given_up(odd, monkeypatch):
    monkeypatch.setattr(server_api, "LARGEST_REPLY", 1 << 20)
    for length in ("", "Content-Length: 100000000\r\n"):
        endpoint, _ = odd(f"HTTP/1.1 200 X\r\n{length}\r\n".encode() + bytes(4 << 20))
        with pytest.raises(ServerError, match="/server_info: a reply of more than 1048576 bytes"):
            server_device(endpoint)
