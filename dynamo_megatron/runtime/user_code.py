"""The user's own functions, named in the configuration as `module:function`."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dynamo_megatron.errors import InputError
from dynamo_megatron.runtime.plain_text import error_line

OURS = str(Path(__file__).parents[1])
NOT_THE_USERS = ("<frozen ", *(folder + os.sep for folder in (OURS, *sysconfig.get_paths().values())))
LONGEST = 500  # characters of an error in a message, its place included
SPEC = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class UserCodeError(InputError):
    """A function of the user's failed; the message is one line that names it. `frames`: the user's frames, as in a
    traceback."""

    def __init__(self, line: str, frames: str = ""):
        super().__init__(line)
        self.frames = frames


@dataclass(frozen=True)
class UserFunction:
    """A function of the user's, and its name in messages ("key: module:function")."""

    function: Callable
    name: str

    @classmethod
    def load(cls, spec: str, key: str, *arguments: str) -> UserFunction:
        """As `load_callable`. Raises ValueError also for a function that cannot be called with `arguments`."""
        function = load_callable(spec, key)
        try:
            signature = inspect.signature(function)
        except ValueError:  # some functions written in C have none
            signature = None
        if signature is not None:
            try:
                signature.bind(*arguments)
            except TypeError:
                called = f"({', '.join(arguments)})"
                raise UserCodeError(f"{key}: {spec!r} takes {signature}, and is called with {called}") from None
        return cls(function, f"{key}: {spec}")

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Raises UserCodeError for whatever the user's code raises inside."""
        try:
            yield
        except (Exception, SystemExit) as error:
            line, frames = failure(error)
            raise UserCodeError(f"{self.name} failed: {line}", frames) from error

    def hold(self, kept: bool, broken: str) -> None:
        """Raises UserCodeError, "key: module:function `broken`", unless `kept`."""
        if not kept:
            raise UserCodeError(f"{self.name} {broken}")


def spec_fault(spec: str) -> str | None:
    """Says in one line why `spec` is not of the form module:function; None where it is."""
    file, _, name = spec.rpartition(":")
    folder, module_name = os.path.split(file.removesuffix(".py"))
    if not SPEC.fullmatch(spec):
        hint = f"; start in the folder {folder}, or put it on PYTHONPATH, and give {module_name}:{name}"
        return f"{spec!r} is not of the form module:function{hint if file.endswith('.py') else ''}"
    return f"{spec!r} names a file; name its module: {module_name}:{name}" if file.endswith(".py") else None


def load_callable(spec: str, key: str) -> Callable:
    """Returns the function that `spec` ("module:function") names, from the installed packages or the current folder.

    The current folder is appended to `sys.path` and stays there, so that the function may import its neighbours later.
    `key` is the configuration key that error messages name. Raises ValueError (one line) where `spec` is not of this
    form, there is no such module, it fails while it is imported, or it has no such function or one that cannot be
    called.
    """
    if fault := spec_fault(spec):
        raise InputError(f"{key}: {fault}")
    module_name, _, name = spec.partition(":")
    # Appended, not put first: a folder next to the user's module must not replace an installed package of that name.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # it may raise anything; the message needs the key that names it
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            where = f"{os.getcwd()} or the installed packages"
            raise InputError(f"{key}: cannot import {module_name!r} of {spec!r} from {where}: {error}") from error
        line, _ = failure(error)
        raise InputError(f"{key}: importing {module_name!r} of {spec!r} failed: {line}") from error
    if not hasattr(module, name):
        raise InputError(f"{key}: {module_name!r} ({getattr(module, '__file__', None)}) has no {name!r}")
    if not callable(function := getattr(module, name)):
        raise InputError(f"{key}: {spec!r} is of type {type(function).__name__} and cannot be called")
    return function


def failure(error: BaseException) -> tuple[str, str]:
    """Returns ("Type: text (file, line N)", the frames as in a traceback) for an error that a function of the user's
    raised. The text is cut so that the line has LONGEST characters at most.

    The frames are those of the user's files; the line names the innermost one. Where all are of installed packages,
    they are those outside of this package.
    """
    frames = traceback.extract_tb(error.__traceback__)
    users = [f for f in frames if not f.filename.startswith(NOT_THE_USERS)]
    users = users or [f for f in frames if not f.filename.startswith(NOT_THE_USERS[:2])]
    where = f" ({users[-1].filename}, line {users[-1].lineno})" if users else ""
    shown = [f'  File "{f.filename}", line {f.lineno}, in {f.name}\n    {f.line}' for f in users]
    return error_line(error, max(0, LONGEST - len(where) - len("..."))) + where, "\n".join(shown)
