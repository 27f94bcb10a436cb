"""The whole command: every check runs whatever the others find, and in a minute."""

import time

import pytest


def test_a_failing_check_hides_no_other(base, command_line):
    (base / "model" / "tokenizer.json").unlink()
    (base / "problems.jsonl").write_text("no JSON\n")
    keys = ("parallel.ep=2", "--ranks=2", "--no-server")
    code, output = command_line(base, "preflight", base / "config.yaml", *keys)
    assert code == 1
    lines = output.splitlines()
    failed = [line.split()[1].rstrip(":") for line in lines if line.startswith("FAILED")]
    assert failed == ["layout", "vocabulary", "data"], output
    assert any(line.startswith("skipped template") for line in lines), output  # it needs the tokenizer too
    assert any(line.startswith("ok      devices: CPU x 2 here: all-reduce over 2 ranks (gloo)") for line in lines)
    assert lines[-1] == "3 of 15 checks failed: layout, vocabulary, data"
    assert not (base / "run").exists()


def test_a_config_that_is_refused(base, command_line):
    code, output = command_line(base, "preflight", base / "config.yaml", "rollout.max_tokens=1")
    assert code == 2 and output.count("\n") == 1 and "did you mean rollout.max_new_tokens" in output


@pytest.mark.full
def test_all_of_it_with_a_server(base, command_line):
    start = time.monotonic()
    code, output = command_line(base, "preflight", base / "config.yaml", "parallel.tp=2", "--ranks=2")
    assert code == 0, output
    assert "ok      server: SGLang started with" in output
    assert output.splitlines()[-1] == "all 16 checks passed"
    print(f"{time.monotonic() - start:.1f} s")  # 60 s is the promise on an idle machine
    assert not (base / "run").exists()
