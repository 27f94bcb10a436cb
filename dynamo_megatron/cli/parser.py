"""The command line's parser. Errors are one line; for an unknown command or option it suggests the nearest one."""

from __future__ import annotations

import argparse
import difflib
import platform
import re
from collections.abc import Iterable, Sequence
from importlib import metadata

from dynamo_megatron.config.peer_keys import whole_name

REPORTED = ("torch", "megatron-core", "sglang")


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


class Version(argparse.Action):
    """Prints the versions of this package, of Python and of the packages REPORTED, without importing them."""

    def __init__(self, option_strings: Sequence[str], dest: str):
        super().__init__(option_strings, dest, nargs=0, help="show the versions installed and stop")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        others = [f"{name} {_version(name)}" for name in REPORTED]
        print(
            f"dynamo-megatron {_version('dynamo-megatron')} (Python {platform.python_version()}, {', '.join(others)})"
        )
        parser.exit(0)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def unknown_command(words: Sequence[str], commands: Iterable[str]) -> str | None:
    """Returns an error message if the first words name none of `commands` (such as "train" or "launch slurm"), None
    if they do or if the parser's own message is as good."""
    names = [command.split() for command in commands]
    for depth, word in enumerate(words[:2]):
        known = list(dict.fromkeys(n[depth] for n in names if n[:depth] == list(words[:depth]) and len(n) > depth))
        if not known or word.startswith("-"):
            return None
        if word not in known:
            near = difflib.get_close_matches(word, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(known)}"
            return f"unknown command {' '.join(words[: depth + 1])}; {hint}"
    return None


def unknown_options(words: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """Returns one line for each of `words`, which are options or arguments that `parser` does not have."""
    known = sorted(set(re.findall(r"--[a-z][a-z0-9-]*", parser.format_help())))
    lines = []
    for word in words:
        option = word.partition("=")[0]
        near = difflib.get_close_matches(option, known, 1)
        found = whole_name(option) if option.startswith("--") else None
        if found:
            hint = found[1]
        elif "." in option:
            hint = f"; a key of the config has no dashes: {option.lstrip('-')}=VALUE"
        else:
            hint = f"; did you mean {near[0]}?" if near else f"; see {parser.prog} --help"
        lines.append(f"unknown {'option' if option.startswith('-') else 'argument'} {option}{hint}")
    return "\n".join(lines)
