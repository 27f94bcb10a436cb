import subprocess
import sys

import psutil
import small_step

LOG = """[2026-11-22 13:37:17] INFO:     127.0.0.1:54568 - "POST /generate HTTP/1.1" 200 OK
[2026-11-22 13:37:18] INFO:     127.0.0.1:54568 - "POST /generate HTTP/1.1" 200 OK
[2026-11-22 13:37:18] INFO:     127.0.0.1:54570 - "POST /flush_cache?timeout=30 HTTP/1.1" 200 OK
[2026-11-22 13:37:19] Cache flushed successfully!
"""


def test_requests_are_counted_by_path(tmp_path):
    (tmp_path / "server.log").write_text(LOG)
    assert small_step.calls(tmp_path / "server.log") == {"/generate": 2, "/flush_cache": 1}


def test_rows_are_those_of_steps_that_are_written_out(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    assert small_step.rows(metrics) == []
    metrics.write_text('{"step": 1, "time/step": 2.0}\n{"step": 1, "eval/pass@1": 0.5}\n{"step": 2, "time/st')
    assert small_step.rows(metrics) == [{"step": 1, "time/step": 2.0}]


def test_a_process_and_its_children_are_watched_by_what_they_do():
    child = "import time; held = bytes(range(256)) * 200_000; print('up', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", child, "dynamo_megatron.reward.worker"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.read(2) == b"up"
            watch = small_step.Watch(psutil.Process(process.pid))
            watch.sample()
            assert watch.at_peak.keys() == watch.by_role().keys() == {"reward workers"}
            assert watch.peak == watch.at_peak["reward workers"] > 51_200_000
            assert watch.by_role()["reward workers"] > 0
        finally:
            process.kill()
