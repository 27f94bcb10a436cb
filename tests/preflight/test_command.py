"""The whole command: every check runs whatever the others find."""

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
    assert any(line.startswith("skipped reward") for line in lines), output  # it needs the data, too
    assert lines[-1] == "3 of 14 checks failed: layout, vocabulary, data"
    assert not (base / "run").exists()


@pytest.mark.full
def test_all_of_it_with_a_server(base, command_line):
    code, output = command_line(base, "preflight", base / "config.yaml", "parallel.tp=2", "--ranks=2")
    assert code == 0, output
    assert "ok      server: SGLang started with" in output
    assert output.splitlines()[-1] == "all 15 checks passed"
    assert not (base / "run").exists()
