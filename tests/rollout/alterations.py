"""Altered JSON replies, by a seeded grammar: what a broken or hostile server, service or file may send. Pure.

    alteration = alter(random.Random(7), b'{"reward": 1.0}')
    socket.sendall(alteration.http())                     # after alteration.delay seconds; then close the connection
    line = alter(rng, row, kinds=CONTENT).body            # of a file: one row with something wrong in it

An alteration may leave the meaning as it is (a key that nobody reads, a delay): who uses it compares.
"""

from __future__ import annotations

import gzip
import json
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

Path = tuple[str | int, ...]

MARK = "@@altered@@"  # stands for bytes that json cannot write
DEEP = 200_000  # brackets
MORE = 5_000  # items
RANGES = ("-1", "2147483648", "1099511627776", "9223372036854775808", "-9223372036854775809", "1e400", "-1e400", "NaN",
          "-Infinity", "1e308", "-1e308", "1.5", "-0.5", "1e-400", "9" * 40, "-" + "9" * 40, "9" * 6000)  # fmt: skip
TYPES = ("null", "true", "false", '""', '"text"', '"7"', "1.0", "[]", "{}", "[[]]", '{"a": 1}')
TEXTS = (
    "\x1b[2J\x1b[31mred\x1b[0m",  # clears a terminal
    "\x1b]0;title\x07",
    "two\nlines\r\nand\ttab",
    "\x00\x01\x7f\x9b31m",
    "\u202eesrever\u2066",
    "\u2028\u2029\ufeff",
    "a" * 100_000,
    "\U0010ffff\U0001f9e8e\u0301",
    "../../../etc/passwd",
    "%s %n {0} ${HOME} $(id) `id`",
)
NESTED = ("[" * DEEP, "[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP)
PAGE = b"<!DOCTYPE html><html><head><title>502 Bad Gateway</title></head><body>\x1b[31mnginx</body></html>"

CONTENT = ("type", "range", "length", "nesting", "text", "encoding", "key", "cut")  # alter the body alone
TRANSPORT = ("redirect", "broken_off", "content_length", "delay", "compression", "huge", "page", "status")
KINDS = CONTENT + TRANSPORT


@dataclass(frozen=True)
class Alteration:
    """`what`: in a few words, for messages. The reply is sent `delay` seconds late, and of its body the first `sent`
    bytes (None: all), after which the connection is closed."""

    kind: str
    what: str
    body: bytes = field(repr=False)
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0
    sent: int | None = None

    def http(self) -> bytes:
        """The reply as bytes of HTTP/1.1."""
        headers = {"Content-Type": "application/json", "Content-Length": str(len(self.body)), "Connection": "close"}
        lines = [f"HTTP/1.1 {self.status} Altered", *(f"{k}: {v}" for k, v in (headers | self.headers).items())]
        return "\r\n".join([*lines, "", ""]).encode() + self.body[: self.sent]


def alter(
    rng: random.Random,
    body: bytes,
    *,
    kinds: Sequence[str] = KINDS,
    elsewhere: str = "http://127.0.0.1:9/elsewhere",
    huge: int = 64 << 20,
    longest_delay: float = 0.2,
) -> Alteration:
    """`body` (JSON in UTF-8) with one thing wrong. `kinds`: of KINDS; CONTENT for a row of a file. `elsewhere`: where
    redirects lead. `huge`: bytes of a huge body, and of what a gzip bomb becomes. `longest_delay`: seconds."""
    kind = rng.choice(kinds)
    if kind in CONTENT:
        what, altered = CONTENT_ALTERATIONS[kind](rng, body)
        return Alteration(kind, what, altered)
    if kind == "redirect":
        status = rng.choice((301, 302, 303, 307, 308))
        return Alteration(kind, f"{status} to {elsewhere}", body, status, {"Location": elsewhere})
    if kind == "broken_off":
        sent = rng.randrange(len(body))
        return Alteration(kind, f"connection closed after {sent} of {len(body)} bytes", body, sent=sent)
    if kind == "content_length":
        said = rng.choice((str(len(body) // 2), str(len(body) + 1000), str(1 << 62), "-1", "many", "9" * 40, ""))
        return Alteration(
            kind, f"Content-Length {said[:20]!r} for {len(body)} bytes", body, 200, {"Content-Length": said}
        )
    if kind == "delay":
        delay = rng.uniform(0, longest_delay)
        return Alteration(kind, f"{delay:.3f} s late", body, delay=delay)
    if kind == "compression":
        return _compressed(rng, body, huge)
    if kind == "huge":
        what = rng.choice(("zeros", "blanks after it", "one text"))
        altered = {
            "zeros": bytes,
            "blanks after it": lambda n: body + b" " * n,
            "one text": lambda n: b'"' + b"a" * n + b'"',
        }
        return Alteration(kind, f"{huge} bytes: {what}", altered[what](huge))
    if kind == "page":
        status = rng.choice((200, 200, 403, 502))
        return Alteration(kind, f"HTML, {status}", PAGE, status, {"Content-Type": "text/html"})
    status = rng.choice((201, 204, 206, 400, 401, 404, 413, 418, 422, 429, 500, 503, 999))
    return Alteration("status", str(status), body, status)


def _compressed(rng: random.Random, body: bytes, huge: int) -> Alteration:
    name = rng.choice(("gzip", "deflate", "br", "zstd", "unheard-of", "gzip, gzip"))
    if rng.random() < 0.5:
        return Alteration(
            "compression", f"Content-Encoding {name} of what is plain", body, 200, {"Content-Encoding": name}
        )
    bomb = _bomb(huge)
    return Alteration("compression", f"gzip of {huge} bytes in {len(bomb)}", bomb, 200, {"Content-Encoding": "gzip"})


@cache
def _bomb(size: int) -> bytes:
    return gzip.compress(b"[" * size, 9)


# -- content: (what, altered body) -------------------------------------------------------------------------------------
def _type(rng: random.Random, body: bytes) -> tuple[str, bytes]:
    tree = json.loads(body)
    path = _place(rng, tree)
    value = rng.choice([t for t in TYPES if t != json.dumps(_at(tree, path))])
    return f"{_name(path)}: {value}", _with(tree, path, value.encode())


def _range(rng: random.Random, body: bytes) -> tuple[str, bytes]:
    tree = json.loads(body)
    path = _place(rng, tree, lambda v: type(v) in (int, float) or (isinstance(v, str) and v.isdecimal()))
    value = rng.choice(RANGES)
    written = f'"{value}"' if isinstance(_at(tree, path), str) else value
    return f"{_name(path)}: {_short(written)}", _with(tree, path, written.encode())


def _length(rng: random.Random, body: bytes) -> tuple[str, bytes]:
    tree = json.loads(body)
    path = _place(rng, tree, lambda v: isinstance(v, list | str) and len(v) > 0)
    value = _at(tree, path)
    if not isinstance(value, list | str) or not value:
        return "one more item around it", b"[" + body + b"]"
    what, changed = rng.choice((("empty", value[:0]), ("one less", value[:-1]), ("the first missing", value[1:]),
                                ("twice", value * 2), (f"{MORE} more", value + value[-1:] * MORE)))  # fmt: skip
    return f"{_name(path)}: {what}", _with(tree, path, json.dumps(changed).encode())


def _nesting(rng: random.Random, body: bytes) -> tuple[str, bytes]:
    tree = json.loads(body)
    path, value = _place(rng, tree), rng.choice(NESTED)
    return f"{_name(path)}: {DEEP} times {value[:5]}", _with(tree, path, value.encode())


def _text(rng: random.Random, body: bytes) -> tuple[str, bytes]:
    tree = json.loads(body)
    path, value = _place(rng, tree, lambda v: isinstance(v, str)), rng.choice(TEXTS)
    return f"{_name(path)}: {_short(repr(value))}", _with(tree, path, json.dumps(value).encode())


def _encoding(rng: random.Random, body: bytes) -> tuple[str, bytes]:
    tree = json.loads(body)
    path = _place(rng, tree, lambda v: isinstance(v, str))
    half, raw = (
        rng.choice(("\\ud800", "\\udfff", "\\ud800\\ud800")),
        rng.choice((b"\xff\xfe", b"\xed\xa0\x80", b"\xc0\xaf")),
    )
    return rng.choice(
        (
            (f"{_name(path)}: half a surrogate pair", _with(tree, path, f'"{half}"'.encode())),
            (f"{_name(path)}: invalid UTF-8 {raw!r}", _with(tree, path, b'"' + raw + b'"')),
            ("BOM", b"\xef\xbb\xbf" + body),
            ("UTF-16", body.decode().encode("utf-16")),
            ("UTF-32", body.decode().encode("utf-32")),
            ("NUL bytes after it", body + bytes(3)),
        )
    )


def _key(rng: random.Random, body: bytes) -> tuple[str, bytes]:
    tree = json.loads(body)
    path = _place(rng, tree, lambda v: isinstance(v, dict) and len(v) > 0)
    value = _at(tree, path)
    if not isinstance(value, dict) or not value:
        return "in an object", b'{"a": ' + body + b"}"
    name, other = rng.choice(list(value)), rng.choice(TYPES)
    rest = {k: v for k, v in value.items() if k != name}
    twice = json.dumps(value)[:-1] + f", {json.dumps(name)}: {other}}}"
    return rng.choice(
        (
            (f"{_name((*path, name))}: missing", _with(tree, path, json.dumps(rest).encode())),
            (f"{_name((*path, name))}: again, with {other}", _with(tree, path, twice.encode())),
            (
                f"{_name((*path, name))}: in capitals",
                _with(tree, path, json.dumps(rest | {name.upper(): value[name]}).encode()),
            ),
            (
                f"{_name((*path, name))}: with a blank",
                _with(tree, path, json.dumps(rest | {name + " ": value[name]}).encode()),
            ),
            (f"{_name(path)}: another key", _with(tree, path, json.dumps(value | {"another": [1, None]}).encode())),
        )
    )


def _cut(rng: random.Random, body: bytes) -> tuple[str, bytes]:
    end = rng.randrange(len(body))
    return f"the first {end} of {len(body)} bytes", body[:end]


CONTENT_ALTERATIONS = {
    "type": _type,
    "range": _range,
    "length": _length,
    "nesting": _nesting,
    "text": _text,
    "encoding": _encoding,
    "key": _key,
    "cut": _cut,
}


# -- places in a tree --------------------------------------------------------------------------------------------------
def _place(rng: random.Random, tree: Any, fits=lambda value: True) -> Path:
    """Of a value that fits, or of any where none does. Items of a list from the fourth on are as likely together as one
    other value: a reply of 1,000 tokens is not altered in its tokens alone, and one of a pair or triple is told apart.
    """
    shapes: dict[Path, list[Path]] = defaultdict(list)
    for path, value in _values(tree):
        if fits(value):
            shapes[tuple("*" if isinstance(k, int) and k > 2 else k for k in path)].append(path)
    return rng.choice(shapes[rng.choice(list(shapes))]) if shapes else _place(rng, tree)


def _values(tree: Any, path: Path = ()):
    yield path, tree
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from _values(value, (*path, key))


def _at(tree: Any, path: Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _with(tree: Any, path: Path, raw: bytes) -> bytes:
    """`tree` in JSON with `raw` at `path`."""
    if not path:
        return raw
    tree = json.loads(json.dumps(tree))
    _at(tree, path[:-1])[path[-1]] = MARK
    return json.dumps(tree).encode().replace(f'"{MARK}"'.encode(), raw)


def _name(path: Path) -> str:
    return "".join(f"[{k}]" if isinstance(k, int) else f".{k}" for k in path).lstrip(".") or "all of it"


def _short(text: str) -> str:
    return text if len(text) <= 50 else f"{text[:40]}... ({len(text)} characters)"
