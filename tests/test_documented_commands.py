"""The command lines of the pages and of `--help`: the program has these commands, options and keys, make these targets.

Only the parsing is tested here. Placeholders stay placeholders, and `my.yaml` is a file of the user's.
"""

import re
import shlex
from fnmatch import fnmatch
from pathlib import Path

import pytest

from dynamo_megatron.cli.options import EXAMPLES, parser
from dynamo_megatron.cli.parser import unknown_command, unknown_options
from dynamo_megatron.config import shipped
from dynamo_megatron.config.files import ConfigError, compose

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAM = re.compile(r"(?:^|[\s/])dynamo-megatron (?=[a-z-])(.*)")
MAKE = re.compile(r"^make ([\w./-].*)")
SCRIPT = re.compile(r"(?:^|[\s/])python -P ([\w/]+\.py)")
PLACEHOLDERS = {"N": "1", "I": "0", "KEY=VALUE": "seed=1"}
OF_A_SHELL = {"|", ">", "&", "&&"}
NEEDED = {"model": {"path": "model"}, "data": {"source": "data.jsonl"}, "output_dir": "run"}


def shell_lines(text: str) -> list[str]:
    """Of fenced blocks in no language or a shell's, of indented blocks, and inline code, also over two lines."""
    fenced = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    blocks = [found[2] for found in fenced.finditer(text) if found[1] in ("", "sh", "bash")]
    rest = fenced.sub("", text)
    blocks += [m[0] for m in re.finditer(r"(?:^ {4,}\S.*\n)+", rest, re.MULTILINE)]
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return lines + [" ".join(found.split()) for found in re.findall(r"`([^`]+)`", rest)]


def all_lines() -> list[tuple[str, str]]:
    """(where, line)."""
    lines = [(page.name, line) for page in PAGES for line in shell_lines(page.read_text(encoding="utf-8"))]
    return [*lines, *(("--help", example) for example in EXAMPLES.values())]


def words_of(command: str) -> list[str]:
    """The arguments, without what may be left out ([--ranks N]) and what a shell reads."""
    command = re.sub(r"(?<=\s)\[[^]]*\](?=\s|$)", "", command)
    words = shlex.split(command, comments=True)
    end = next((i for i, word in enumerate(words) if word in OF_A_SHELL), len(words))
    return [PLACEHOLDERS.get(word, word) for word in words[:end]]


COMMANDS = sorted({(page, found[1]) for page, line in all_lines() if (found := PROGRAM.search(line))})


def test_commands_are_found():
    named = {words_of(command)[0] for _, command in COMMANDS}
    assert len(COMMANDS) > 80 and named - {"--version"} == {name.split()[0] for name in EXAMPLES}


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_a_command_is_one_of_the_program(page, command, capsys):
    words = words_of(command)
    partial = "..." in words or len(words) < 3  # of a sentence: not all of its arguments
    words = [word for word in words if word != "..."]
    assert unknown_command(words, EXAMPLES) is None
    try:
        options, rest = parser().parse_known_args(words)
    except SystemExit:
        why = capsys.readouterr().err
        assert partial and "required" in why, why
        return
    left = [word for word in rest if word.startswith("-") or not hasattr(options, "config")]
    assert not left, unknown_options(left, options.subparser)
    given = [*getattr(options, "config", []), *rest]
    keys = [word for word in given if "=" in word]
    files = [word for word in given if shipped.path(word) is not None or (ROOT / word).is_file()]
    try:
        compose(files, keys, NEEDED)
    except ConfigError as error:  # only what a file of the user's may set is missing
        assert "unknown" not in str(error) and "my.yaml" in given, error


def test_make_has_the_targets():
    named = {found[1] for _, line in all_lines() if (found := MAKE.search(line))}
    targets = {word for line in named for word in shlex.split(line, comments=True) if "=" not in word}
    rules = re.findall(r"^([\w./% -]+):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    names = [name.replace("%", "*") for rule in rules for name in rule.split()]
    assert len(targets) > 8 and [target for target in targets if not any(fnmatch(target, name) for name in names)] == []


def test_the_scripts_exist():
    named = {found[1] for _, line in all_lines() if (found := SCRIPT.search(line))}
    assert len(named) > 15 and [name for name in sorted(named) if not (ROOT / name).is_file()] == []
