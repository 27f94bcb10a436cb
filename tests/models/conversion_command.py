"""`dynamo-megatron convert` in the tests: what it says, and the sizes of the models that it converts."""

from dynamo_megatron import cli

SIZES = {"vocab": 104, "hidden": 32, "ffn": 64}


def say(capsys, *words):
    """(exit code, the line on stderr) of `dynamo-megatron convert WORDS`."""
    code = cli.main(["convert", *map(str, words)])
    return code, capsys.readouterr().err.rstrip("\n")


def refusal(capsys, out, *words):
    """The one line of a refused conversion, which leaves nothing behind."""
    before = sorted(out.parent.iterdir())
    capsys.readouterr()
    code, line = say(capsys, *words)
    assert code == 2 and line and "\n" not in line, line
    assert sorted(out.parent.iterdir()) == before
    return line
