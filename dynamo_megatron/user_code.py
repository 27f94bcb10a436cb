"""The user's own functions, named in the configuration as `module:function`."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable

SPEC = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def load_callable(spec: str, key: str) -> Callable:
    """The function that `spec` ("module:function") names, from the installed packages or the current folder.

    The current folder is appended to `sys.path` and stays there, so that the function may import its neighbours later.
    `key` is the configuration key that error messages name. Raises ValueError (one line): not of this form, no such
    module, a module that fails while it is imported, no such function, not callable.
    """
    if not SPEC.fullmatch(spec):
        raise ValueError(f"{key}: {spec!r} is not of the form module:function")
    module_name, _, name = spec.partition(":")
    # Appended, not put first: a folder next to the user's module must not replace an installed package of that name.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        where = f"{os.getcwd()} or the installed packages"
        raise ValueError(f"{key}: cannot import {module_name!r} of {spec!r} from {where}: {error}") from error
    except Exception as error:  # the user's module may raise anything; the key that names it belongs to the message
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{key}: importing {module_name!r} of {spec!r} failed: {text}") from error
    if not hasattr(module, name):
        raise ValueError(f"{key}: {module_name!r} ({getattr(module, '__file__', None)}) has no {name!r}")
    function = getattr(module, name)
    if not callable(function):
        raise ValueError(f"{key}: {spec!r} is of type {type(function).__name__} and cannot be called")
    return function
