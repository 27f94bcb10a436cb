"""Runs inside the sandbox, as a script without this package (any Python from 3.8 on): `harness.py MODE CPU MEMORY
FILES`, with CPU in seconds, MEMORY and FILES (the size of a file) in bytes.

MODE `run`: runs the program in /program.py as a script.
`call`: calls the program's function that stdin names, {"name": text, "args": [...]}, and writes its result to stdout as
JSON.
`serve`: reads requests about the program's names from stdin and answers on stdout, one JSON line each.
`check`: runs the tests in /test.py, and writes "passed" to stderr if they raise nothing. Their free names belong to the
program, which another sandbox serves at the other end of stdin and stdout. This process runs no code of the program,
and only plain data comes back from it. So the program cannot read the tests, change what they call, or write the
verdict.
"""

import ast
import builtins
import collections
import itertools
import os
import resource
import sys
import types

PROGRAM, TESTS, VERDICT = "/program.py", "/test.py", "passed\n"
OPEN_FILES, THREADS, MOST_ITEMS = 64, 64, 100_000
# Solutions to LeetCode's problems use these names without importing them.
USUAL_IMPORTS = """
from typing import *
from collections import *
from itertools import *
from functools import *
from heapq import *
from bisect import *
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string
"""
# And these, which tests by assertion may define: there a name must be the program's own.
SOLUTION_IMPORTS = f"""
from math import *
from builtins import *
{USUAL_IMPORTS}
from copy import deepcopy
import copy, json, sys
"""
RECURSION = 50_000  # LiveCodeBench's
PROGRAM_MODULE = "solution"  # in KodCode's tests
IMPORT = "__import_from_program__"
# type -> (what of a value is sent, what makes it again)
OTHERS = {
    collections.deque: (lambda value: [value.maxlen, *value], lambda items: collections.deque(items[1:], items[0])),
    range: (lambda value: [value.start, value.stop, value.step], lambda items: range(*items)),
    type({}.keys()): (list, lambda items: dict.fromkeys(items).keys()),
    type({}.values()): (list, lambda items: dict(enumerate(items)).values()),
    type({}.items()): (list, lambda items: dict(items).items()),
}
BY_NAME = {kind.__name__: make for kind, (_, make) in OTHERS.items()}
SEQUENCES = {kind.__name__: kind for kind in (list, tuple, set, frozenset)}


def main(mode, cpu_seconds, memory, file_size):
    del sys.path[0]
    for name in ("exit", "quit"):  # normally the module site adds them, and it is not imported
        setattr(builtins, name, sys.exit)
    limits = {"CPU": cpu_seconds, "AS": memory, "FSIZE": file_size, "NOFILE": OPEN_FILES, "CORE": 0}
    if tuple(map(int, os.uname().release.split("-")[0].split(".")[:2])) >= (5, 14):
        limits["NPROC"] = THREADS  # from this version on a user namespace counts its processes separately
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
    {"run": load, "call": call, "serve": serve, "check": check}[mode]()


def call():
    import json  # not at the top: mode `run` does not need it, and starting up is most of a test's time

    request, result = private(0, "r"), private(1, "w")
    wanted = json.loads(request.read())
    namespace, usual = imported(SOLUTION_IMPORTS), {}
    exec(SOLUTION_IMPORTS, usual)
    function = namespace.get(wanted["name"])
    if function is usual.get(wanted["name"]):  # none of the program's own; heapq has a merge, too
        function = getattr(namespace["Solution"](), wanted["name"])
    listed = lambda value: value.tolist() if hasattr(value, "tolist") else list(value)  # noqa: E731
    json.dump(function(*wanted["args"]), result, default=listed)
    result.flush()


def serve():
    import json
    import symtable

    requests, replies = private(0, "r"), private(1, "w")
    namespace, kept, usual = imported(USUAL_IMPORTS), Kept(), {}
    exec(USUAL_IMPORTS, usual)
    with open(PROGRAM, "rb") as file:
        symbols = symtable.symtable(file.read(), PROGRAM, "exec").get_symbols()
    for symbol in symbols:
        if symbol.is_assigned() or symbol.is_imported():
            usual.pop(symbol.get_name(), None)  # the program's own, even if it is the same
    for line in requests:
        try:
            subject, kind, *given = json.loads(line)
            if kind in ("name", "import"):
                if subject not in namespace or (kind == "import" and subject in usual):
                    raise NameError(subject)
                value = namespace[subject]
            elif kind == "attribute":
                value = getattr(kept[subject], *given)
            elif kind == "assign":
                value = setattr(kept[subject], given[0], decoded(given[1], kept.__getitem__))
            else:
                args, named = (decoded(part, kept.__getitem__) for part in given)
                value = kept[subject](*args, **named)
                sent = [*given[0]["tuple"], *(item for _, item in given[1]["dict"])]
                changed = [left_in(*each, kept) for each in zip((*args, *named.values()), sent, strict=True)]
            reply = {"value": encoded(value, kept), "changed": changed if kind == "call" else []}
        except Exception as error:  # the program may raise anything; the tests get the error
            reply = {"error": type(error).__name__, "text": str(error)[:1000]}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def check():
    import contextlib
    import importlib
    import json

    replies, requests, verdict = private(0, "r"), private(1, "w"), private(2, "w")

    def ask(*request, given=()):
        """`given`: the arguments of a call. Lists and dicts among them get what it has left there."""
        requests.write(json.dumps(request) + "\n")
        requests.flush()
        reply = json.loads(replies.readline())
        if "error" not in reply:
            for mine, now in zip(given, reply["changed"], strict=True):
                if now is not None:
                    mine.clear()
                    now = decoded(now, lambda index: Remote(ask, index))
                    (mine.update if isinstance(mine, dict) else mine.extend)(now)
            return decoded(reply["value"], lambda index: Remote(ask, index))
        kind = getattr(builtins, str(reply["error"]), RuntimeError)
        if not (isinstance(kind, type) and issubclass(kind, Exception)) or issubclass(kind, StopIteration):
            kind = RuntimeError  # StopIteration would end a loop of the tests unnoticed
        raise kind(str(reply.get("text")))

    def import_from_program(name):
        try:
            return ask(name, "import")
        except NameError as error:
            raise ImportError(name) from error

    with open(TESTS, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    namespace = {"__name__": "test", IMPORT: import_from_program}
    exec(USUAL_IMPORTS, namespace)
    for name in of_program(tree, namespace):
        with contextlib.suppress(NameError):  # a name of the tests themselves
            namespace[name] = ask(name, "name")
    dotted = (node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    for name in {node.id for node in dotted if isinstance(node, ast.Name)}:
        with contextlib.suppress(ImportError):
            namespace[name] = importlib.import_module(name)  # the program may have changed its own copy
    import_by_call(tree)
    exec(compile(tree, TESTS, "exec"), namespace)
    verdict.write(VERDICT)
    verdict.flush()


def import_by_call(tree):
    """Turns imports from the program into calls of IMPORT, but for `*`: tests have the program's names anyway."""
    for node in ast.walk(tree):  # a NodeTransformer would end at Python's limit of recursion in a long sum
        for part in ("body", "orelse", "finalbody"):
            if isinstance(block := getattr(node, part, None), list):
                setattr(node, part, [statement for each in block for statement in called_for(each)])


def called_for(statement):
    if not isinstance(statement, ast.ImportFrom) or statement.module != PROGRAM_MODULE or statement.level > 1:
        return [statement]
    names = [(name.asname or name.name, name.name) for name in statement.names if name.name != "*"]
    return ast.parse("\n".join(f"{mine} = {IMPORT}({name!r})" for mine, name in names) or "pass").body


def of_program(tree, known):
    """The names in the tests that belong to the program: all that are neither Python's nor in `known`. If the tests
    call none of these, the function under test has a known name: it is the innermost function that they call."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    own = names - set(dir(builtins)) - set(known)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]  # the outer ones first
    called = [node.func.id for node in calls if isinstance(node.func, ast.Name)]
    given = [each.value.args for each in tree.body if isinstance(each, ast.Expr) and isinstance(each.value, ast.Call)]
    own |= {argument.id for arguments in given for argument in arguments if isinstance(argument, ast.Name)}
    if called and not own & set(called):
        own.add(([name for name in called if not hasattr(builtins, name)] or called)[-1])
    return own


def load(module=None):
    """Runs the program as `module`, by default as a script, and returns the module's names."""
    module = module or types.ModuleType("__main__")
    sys.modules[module.__name__] = module
    sys.argv = [PROGRAM]
    with open(PROGRAM, "rb") as file:
        source = file.read()
    module.__file__ = PROGRAM
    sys.setrecursionlimit(RECURSION)
    exec(compile(source, PROGRAM, "exec"), module.__dict__)
    return module.__dict__


def imported(usual):
    """The program's names, as after an import of the program after the imports `usual`."""
    module = types.ModuleType("program")
    exec(usual, module.__dict__)
    return load(module)


def private(descriptor, mode):
    """Returns a file on what `descriptor` refers to now, and points `descriptor` to /dev/null for the program: it reads
    nothing there, and what it prints is dropped."""
    file = os.fdopen(os.dup(descriptor), mode, encoding="utf-8")
    empty = os.open(os.devnull, os.O_RDWR)
    os.dup2(empty, descriptor)
    os.close(empty)
    return file


def left_in(argument, sent, kept):
    """What a call has left in a list or dict, encoded; None where that is what was `sent`, or cannot be sent back."""
    if not isinstance(argument, (list, dict)):
        return None
    try:
        now = encoded(argument, kept)
    except RecursionError:
        return None
    return None if now == sent else now


class Kept(list):
    """Objects of the program, each once."""

    def __init__(self):
        super().__init__()
        self._places = {}

    def place(self, value):
        place = self._places.setdefault(id(value), len(self))
        if place == len(self):
            self.append(value)
        return place


def encoded(value, kept=None):
    """`value` as JSON that preserves the types of Python's plain data. Any other object is appended to `kept`, and its
    index there is sent."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if type(value) in OTHERS:
        return {type(value).__name__: [encoded(item, kept) for item in OTHERS[type(value)][0](value)]}
    for name, kind in SEQUENCES.items():
        if isinstance(value, kind):
            return {name: [encoded(item, kept) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encoded(key, kept), encoded(item, kept)] for key, item in value.items()]}
    if type(value) in (bytes, complex):
        return {"literal": repr(value)}
    if isinstance(value, Remote):
        return {"kept": value._index}
    if kept is None:
        raise TypeError("a test can give the program plain data and what came from it, not a " + type(value).__name__)
    if type(value).__module__ == "numpy" and not hasattr(value, "__len__") and type(value.item()) is not type(value):
        return encoded(value.item(), kept)  # a number, but not a longdouble
    if hasattr(value, "__next__"):
        return {"iterator": [encoded(item, kept) for item in itertools.islice(value, MOST_ITEMS)]}  # it may never end
    return {"kept": kept.place(value)}


def decoded(value, look_up):
    if not isinstance(value, dict):
        return value
    ((name, inside),) = value.items()
    if name in SEQUENCES:
        return SEQUENCES[name](decoded(item, look_up) for item in inside)
    if name == "dict":
        return {decoded(key, look_up): decoded(item, look_up) for key, item in inside}
    if name in BY_NAME:
        return BY_NAME[name]([decoded(item, look_up) for item in inside])
    if name == "iterator":
        return iter([decoded(item, look_up) for item in inside])
    return ast.literal_eval(inside) if name == "literal" else look_up(inside)


class Remote:
    """A function, class or object of the program. It can be called and has attributes, and equals only itself."""

    def __init__(self, ask, index):
        self.__dict__.update(_ask=ask, _index=index)

    def __call__(self, *args, **named):
        return self._ask(self._index, "call", encoded(args), encoded(named), given=(*args, *named.values()))

    def __eq__(self, other):
        return isinstance(other, Remote) and self._index == other._index

    def __hash__(self):
        return hash(self._index)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask(self._index, "attribute", name)

    def __setattr__(self, name, value):
        self._ask(self._index, "assign", name, encoded(value))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
