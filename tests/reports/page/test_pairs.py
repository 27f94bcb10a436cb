import dataclasses

from dynamo_megatron.evaluation.results import results_file, write_results
from dynamo_megatron.reports.page.pairs import PAIRS, pairs
from dynamo_megatron.types import ProblemResult

MANY = 10_000_000  # bytes


def result(i: int, response: str, prompt: str | None = "asked") -> ProblemResult:
    columns = {"rewards": [1.0, 0.0], "successes": [True, False], "lengths": [1, 1], "finish_reasons": ["stop"] * 2}
    texts = {"responses": [response, "second"], "prompt": prompt and f"{prompt} {i}"}
    return ProblemResult(f"p{i:04d}", "d", **columns, statuses=["ok"] * 2, **texts)


def evaluated(record, folder, step: int, results):
    write_results(results_file(folder, step), results)
    return dataclasses.replace(record([{"step": step}]), folder=folder, evaluations=[{"step": step}])


def test_pairs_of_the_last_evaluations(record, tmp_path):
    first = evaluated(record, tmp_path / "a", 5, [result(i, f"a{i}") for i in range(500)])
    second = evaluated(record, tmp_path / "b", 9, [result(i, f"b{i}") for i in range(500)])
    found = pairs({"a": first, "b": second}, {}, MANY)["shown"]
    assert len(found) == PAIRS and [p["prompt_id"] for p in found[:: PAIRS - 1]] == ["p0000", "p0499"]
    assert len({p["key"] for p in found}) == PAIRS and found[0] == {
        "key": found[0]["key"],
        "prompt_id": "p0000",
        "prompt": "asked 0",
        "sides": [
            {"run": name, "step": step, "response": f"{name}0", "reward": 1.0, "success": True}
            for name, step in (("a", 5), ("b", 9))
        ],
    }
    assert pairs({"a": first}, {}, MANY)["shown"] == []
    assert 0 < len(pairs({"a": first, "b": second}, {}, 1000)["shown"]) < 20


def test_a_key_is_of_the_prompt_and_both_responses(record, tmp_path):
    """Marks are kept under it: a rerun in the same folders must not get them."""

    def key(name: str, *results) -> str:
        runs = {f: evaluated(record, tmp_path / name / f, 5, [r]) for f, r in zip("ab", results, strict=True)}
        return pairs(runs, {}, MANY)["shown"][0]["key"]

    first = key("first", result(0, "a"), result(0, "b"))
    assert first == key("same", result(0, "a"), result(0, "b"))
    others = [
        key("left", result(0, "A"), result(0, "b")),
        key("right", result(0, "a"), result(0, "B")),
        key("exchanged", result(0, "b"), result(0, "a")),
        key("asked", result(0, "a", "else"), result(0, "b", "else")),
    ]
    assert len({first, *others}) == 5


def test_a_pair_has_one_prompt(record, tmp_path):
    """Prompt ids of two sets of problems may be the same numbers."""
    first = evaluated(record, tmp_path / "a", 5, [result(i, "a") for i in range(3)])
    second = evaluated(record, tmp_path / "b", 5, [result(0, "b"), result(1, "b", "else"), result(2, "b", "else")])
    found = pairs({"a": first, "b": second}, {}, MANY)
    assert [p["prompt_id"] for p in found["shown"]] == ["p0000"] and found["other_prompts"] == 2


def test_a_long_pair_is_left_out_alone(record, tmp_path):
    first = evaluated(record, tmp_path / "a", 5, [result(0, "a" * 1000), result(1, "a")])
    second = evaluated(record, tmp_path / "b", 5, [result(0, "b"), result(1, "b")])
    assert [p["prompt_id"] for p in pairs({"a": first, "b": second}, {}, 1000)["shown"]] == ["p0001"]


def test_what_is_no_preference(record, tmp_path):
    """Equal responses, a prompt without a text, a response that would be cut."""
    first = evaluated(record, tmp_path / "a", 5, [result(0, "a"), result(1, "a", None), result(2, "x" * 30_000)])
    second = evaluated(record, tmp_path / "b", 5, [result(0, "a"), result(1, "b", None), result(2, "b")])
    assert pairs({"a": first, "b": second}, {}, MANY) == {"shown": [], "other_prompts": 0}


def test_without_evaluations_rollouts_of_the_same_prompt(record):
    def view(step, prompt_id, response, status="ok"):
        return {"step": step, "prompt_id": prompt_id, "prompt": f"asked {prompt_id}", "response": response} | {
            "reward": 0.5,
            "success": False,
            "status": status,
        }

    views = {
        "a": [view(2, "p", "new"), view(1, "p", "old"), view(1, "q", "gone", "rejected")],
        "b": [view(3, "p", "other"), view(3, "q", "there"), view(3, "r", "alone")],
    }
    runs = {name: record([{"step": 3}]) for name in views}
    found = pairs(runs, views, MANY)["shown"]
    assert [[s["response"] for s in p["sides"]] for p in found] == [["new", "other"]]
