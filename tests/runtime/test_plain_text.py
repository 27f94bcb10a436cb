"""What others wrote reaches a terminal, or a log that is read in one, as text."""

import io
import subprocess
import sys
import textwrap

from dynamo_megatron.runtime.plain_text import PrintableStream, on_one_line, printable, show

HOSTILE = (
    "red\x1b[31m clear\x1b[2J clip\x1b]52;c;cm0=\x07 \x9b1m over\rwritten \u202ebidi\u2066 \u2028\ud800\x00\x7f end"
)


def tame(text: str) -> bool:
    return all(c.isprintable() or c in "\n\t" for c in text) and text.isascii()


def test_texts_keep_their_words_and_lose_what_drives_a_terminal():
    assert printable("a\tb\n\u00e9\u4e2d") == "a\tb\n\u00e9\u4e2d"
    for made in (printable(HOSTILE), on_one_line(HOSTILE)):
        assert made.isprintable() and all(word in made for word in ("clear", "clip", "written", "bidi", "end"))
    assert printable(printable(HOSTILE)) == printable(HOSTILE)
    assert on_one_line("two\nlines") == "two lines"


def test_a_stream_shows_whatever_a_process_prints():
    written = io.BytesIO()
    with PrintableStream(written, encoding="utf-8", errors="backslashreplace", line_buffering=True) as stream:
        print(HOSTILE, file=stream)
        show(HOSTILE, stream)
        assert tame(written.getvalue().decode()) and written.getvalue().count(b"\n") == 2
    with open("/dev/full", "wb", buffering=0) as full:
        print("lost", file=PrintableStream(full, "utf-8", line_buffering=True), flush=True)


def test_a_traceback_of_a_command_is_text():
    script = """
        import sys
        from dynamo_megatron import cli
        from dynamo_megatron.cli import commands
        def fails(*_): raise RuntimeError(sys.argv[1] + chr(27) + "[2J")
        commands._COMMANDS["configs"] = fails
        cli.main(["configs"])
    """
    command = [sys.executable, "-P", "-c", textwrap.dedent(script), HOSTILE.replace("\x00", "").replace("\ud800", "")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "clip" in done.stderr and "Traceback" in done.stderr and tame(done.stderr)
