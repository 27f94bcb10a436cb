"""Servers that answer oddly: each is a ServerError, or a mismatch, of that server and no more."""

import contextlib
import json
import socketserver
import threading

import pytest

from dynamo_megatron.rollout.servers import server_api as api
from dynamo_megatron.rollout.servers.server_api import Endpoint, ServerError, call
from dynamo_megatron.weight_sync.proof import mismatch

NOTHING = [{}]


class _Handler(socketserver.StreamRequestHandler):
    def handle(self):
        head = []
        while (line := self.rfile.readline().decode().strip()) != "":
            head.append(line)
        length = next((int(h.split()[1]) for h in head if h.lower().startswith("content-length")), 0)
        self.rfile.read(length)
        self.server.heads.append(head)
        status, body, lacking = self.server.replies[min(len(self.server.heads), len(self.server.replies)) - 1]
        self.wfile.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body) + lacking}\r\n\r\n{body}".encode())


@pytest.fixture
def odd():
    """odd(*replies) -> (an endpoint that gives these replies, the last one again and again; the requests' heads). A
    reply is (status, body, bytes that the body lacks)."""
    with contextlib.ExitStack() as stack:

        def start(*replies, key=""):
            server = stack.enter_context(socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Handler))
            server.replies, server.heads = replies, []
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            stack.callback(server.shutdown)
            return Endpoint("server-0", 1, f"http://127.0.0.1:{server.server_address[1]}", 1, key), server.heads

        yield start


def called(heads) -> list[str]:
    return [head[0].split("?")[0].split(" HTTP")[0] for head in heads]


def test_a_reply_that_breaks_off(odd):
    endpoint, _ = odd((200, '{"ranks": [', 50))
    with pytest.raises(ServerError, match="/weights_checker: no answer"):
        mismatch(endpoint, NOTHING, 60)


@pytest.mark.parametrize("body", ["<html>", "[]", '{"error": "no such thing"}'])
def test_a_reply_of_another_kind(odd, body):
    endpoint, _ = odd((200, body, 0))
    asked = {"ranks": lambda: mismatch(endpoint, NOTHING, 60), "weight_version": lambda: api.check_version(endpoint, 1)}
    for name, ask in asked.items():
        with pytest.raises(ServerError, match=f"said nothing of {name}"):
            ask()


@pytest.mark.parametrize("ranks", [None, 3, [3], [{}], [{"checksums": None, "parallelism_info": [{"tp_rank": 0}]}]])
def test_checksums_of_another_kind(odd, ranks):
    endpoint, _ = odd((200, json.dumps({"ranks": ranks}), 0))
    assert "form of SGLang" in mismatch(endpoint, NOTHING, 60)


def test_a_sync_ends_with_nothing_cached_and_the_version_is_read_back(odd):
    endpoint, heads = odd((200, '{"weight_version": "3"}', 0))
    api.set_version(endpoint, 3)
    assert called(heads) == ["POST /flush_cache", "POST /update_weight_version", "GET /model_info"]
    with pytest.raises(ServerError, match="says weight version '3', not 4"):
        api.check_version(endpoint, 4)


def test_a_session_that_was_left_open_is_closed_first(odd):
    endpoint, heads = odd((400, "a session is already open", 0), (200, "{}", 0))
    api.open_session(endpoint)
    assert called(heads) == ["POST /begin_weight_update", "POST /end_weight_update", "POST /begin_weight_update"]
    with pytest.raises(ServerError, match="/begin_weight_update said 500: no"):
        api.open_session(odd((500, "no", 0))[0])


def test_keys_go_to_the_server_alone(odd, monkeypatch):
    proxy, asked = odd((200, "{}", 0))
    monkeypatch.setenv("http_proxy", proxy.url)
    for key, sent in (("", []), ("secret", ["Authorization: Bearer secret"])):
        endpoint, heads = odd((200, "{}", 0), key=key)
        assert call(endpoint, "/health", None, 60) == {}
        assert [h for h in heads[0] if h.startswith("Authorization")] == sent
    assert asked == []
