"""The figures of docs/evidence.md, gradient-variance.md, allocation.md, asynchronous.md and replay.md, and of the first
lines of README, are those of benchmarks/results."""

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from comparison_results import rows as evaluations
from comparison_results import with_control

from dynamo_megatron.comparison.table import as_markdown, as_plain
from dynamo_megatron.config.allocation import ALLOCATORS

ROOT = Path(__file__).parents[2]
# What compare/NAME came to, and its section of docs/evidence.md.
COMPARED = {
    "class_task": "The class task",
    "sums_task": "The demo's sums",
    "default_class": "The default method",
    "modulation_class": "Modulation on the class task",
    "modulation_sums": "Modulation on the demo's sums",
}
RESULTS = [f for name in COMPARED for f in sorted((ROOT / "benchmarks" / "results").glob(f"{name}_*.json"))]
# The rows of README's table: the results, the arm, and the cells for task, method and control.
MEAN = "`methods/history` with `score_ratio: 1`"
MODULATED = f"{MEAN} and modulation of five times the default strength"
TILTED = f"{MEAN} and, in each step, all positive advantages multiplied by one number"
WIDE = "`methods/grpo`, 32 prompts of 2"
DYNAMO = "`methods/dynamo`, 32 prompts of 2"
IN_README = [
    ("class_task_grpo_32x2", "optimal_32x2", "four digits", "`methods/history`, 32 prompts of 2 rollouts", WIDE),
    ("sums_task_grpo_32x2", "optimal_32x2", "`sums`", "`methods/history`, 32 prompts of 2", WIDE),
    ("class_task_grpo_32x2", "grpo_8x8", "four digits", "`methods/grpo`, 8 prompts of 8", WIDE),
    ("default_class_rloo_8x8", "history_32x2", "four digits", DYNAMO, "its earlier version, 8 prompts of 8"),
    ("default_class_rloo_32x2", "history_32x2", "four digits", DYNAMO, "its earlier version, 32 prompts of 2"),
    ("modulation_class_history", "alpha_1", "four digits", MODULATED, MEAN),
    ("modulation_class_history", "tilted", "four digits", TILTED, MEAN),
]
NUMBERS = {5: "five", 6: "six", 7: "seven", 8: "eight", 16: "sixteen"}


def result(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def in_one_line(text: str) -> str:
    return " ".join(text.split())


def rows(text: str, first: str) -> list[list[str]]:
    """Of the one table whose header begins with `first`, without backquotes."""
    (table,) = (block for block in text.split("\n\n") if block.startswith(f"| {first} |"))
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]


def with_interval(found: dict[str, float]) -> str:
    return f"{found['value']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


def half(name: str, arm: str) -> dict[str, float]:
    """The rollouts to half of the gain of the arm that the results `name` compare with, divided by that arm's."""
    return result(name)["comparison"]["arms"][arm]["cost"]["half"]["rollouts"]["ratio"]


# -- evidence.md -------------------------------------------------------------------------------------------------------
PAGE = page("evidence")


def tables(file: Path) -> list[str]:
    text = as_markdown(json.loads(file.read_text(encoding="utf-8"))["comparison"], [])
    return [line for line in text.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_the_page_has_the_tables_of_the_results(file):
    lines, arms = tables(file), json.loads(file.read_text(encoding="utf-8"))["comparison"]["arms"]
    assert "\n".join(lines[: 2 + len(arms)]) in PAGE, "final scores"
    assert all(line in PAGE for line in lines)


def rounded(found: Any) -> Any:
    """Nested data with nine digits of each number: another CPU may add in another order."""
    if isinstance(found, dict):
        return {key: rounded(value) for key, value in found.items()}
    return f"{found:.9g}" if isinstance(found, float) else found


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_the_results_are_those_of_the_evaluations(file):
    (name,) = (name for name in COMPARED if file.stem.startswith(f"{name}_"))
    compared = json.loads(file.read_text(encoding="utf-8"))["comparison"]
    measured = with_control(name, compared["control"], evaluations(file.with_name(f"{name}_curves.jsonl")))
    assert rounded(as_plain(measured)) == rounded(compared)


def test_every_interval_of_the_page_is_in_the_results():
    known = {
        interval for file in RESULTS for line in tables(file) for interval in re.findall(r"\([^()]* to [^()]*\)", line)
    }
    assert known
    assert set(re.findall(r"\([-+\d.]+ to [-+\d.]+\)", PAGE)) <= known


@pytest.mark.parametrize("name", COMPARED)
def test_the_answers_of_the_page(name):
    (section,) = (part for part in PAGE.split("\n## ") if part.startswith(COMPARED[name]))
    answers = rows(section, "arm | compared with")
    assert len(answers) > 1
    for arm, control, half, most, points in answers:
        compared = result(f"{name}_{control}")["comparison"]
        assert f"arm was trained with {NUMBERS[len(compared['seeds'])]} seeds" in in_one_line(section)
        found = compared["arms"][arm]
        for cell, target in ((half, "half"), (most, "90 %")):
            assert cell.split(", ")[0] == with_interval(found["cost"][target]["rollouts"]["ratio"]), (arm, target)
        assert points == f"{100 * found['final']['difference']['value']:.1f}"


def test_the_scores_and_seeds_of_the_pages():
    """measured.md has the optimal baseline against the better GRPO."""
    comparison = result("class_task_grpo_32x2")["comparison"]
    seeds = NUMBERS[len(comparison["seeds"])]
    assert f"{100 * comparison['start']:.1f} %" in PAGE and f"Every arm was trained with {seeds} seeds" in PAGE
    cost, text = half("class_task_grpo_32x2", "optimal_32x2"), in_one_line(page("measured"))
    assert f"{cost['value']:.2f} times" in text and f"{seeds} seeds" in text
    assert f"95 % interval: {cost['low']:.2f} to {cost['high']:.2f}" in text
    sums = half("sums_task_grpo_32x2", "optimal_32x2")
    assert f"needed {sums['value']:.2f} times GRPO's rollouts ({sums['low']:.2f} to {sums['high']:.2f})" in text


def test_the_table_of_the_readme():
    table = rows((ROOT / "README.md").read_text(encoding="utf-8"), "task")
    for (name, arm, *labels), (*cells, seeds, ratio) in zip(IN_README, table, strict=True):
        assert cells == [label.strip("`") for label in labels], (name, arm)
        assert int(seeds) == len(result(name)["comparison"]["seeds"]), (name, arm)
        assert ratio == with_interval(half(name, arm)), (name, arm)


def test_what_the_runs_did_with_their_baseline():
    found = result("history_runs")
    counts = found["default_class history_32x2"]["rollouts per prompt"]
    shares = "{:.0f} % of the prompts of a step got 2 rollouts, {:.0f} % got 1 and {:.0f} % got 3"
    assert shares.format(*(100 * counts[n] for n in "213")) in in_one_line(PAGE)
    limited = [100 * of["share of steps at the largest score_ratio"] for of in found.values()]
    for name in ("evidence", "methods"):
        assert f"{min(limited):.0f} to {max(limited):.0f} % of the steps" in in_one_line(page(name))


def test_the_default_method_names_what_decided():
    found = half("default_class_rloo_8x8", "history_32x2")
    text = in_one_line((ROOT / "configs/methods/dynamo.yaml").read_text(encoding="utf-8").replace("\n#", "\n"))
    assert f"{found['value']:.2f} times" in text and f"({found['low']:.2f} to {found['high']:.2f}" in text


# -- gradient-variance.md ----------------------------------------------------------------------------------------------
GRADIENTS = result("gradient_variance")
SQUARES = "|g|^2 of wrong over right"


def designs(label: str) -> dict[tuple[str, str, str], str]:
    """(shape, baseline, allocator) -> the variance with its interval."""

    def cell(variance: float, low: float | None, high: float | None) -> str:
        return f"{variance:.2f} " + ("(undefined)" if low is None else f"({low:.2f} to {high:.2f})")

    found = GRADIENTS[label]["designs"]
    return {(d["shape"], d["baseline"], d["allocator"]): cell(d["variance"], *d["interval"]) for d in found}


def measured() -> dict[str, str]:
    """label -> its section of docs/gradient-variance.md."""
    sections = page("gradient-variance").split("\n## Measured: ")[1:]
    return {re.search(r'label\s+"([^"]+)"', section)[1].replace("\n", " "): section for section in sections}


def test_the_page_of_gradient_variance_has_a_section_for_each_measurement():
    assert measured().keys() == GRADIENTS.keys()


@pytest.mark.parametrize("label", GRADIENTS)
def test_the_page_of_gradient_variance_has_the_measured_variances(label):
    found, table = designs(label), rows(measured()[label], "shape")
    assert len(table) > 12
    for shape, baseline, *cells in table:
        for allocator, cell in zip(("uniform", "neyman bernoulli", "neyman energy"), cells, strict=True):
            assert cell == found.get((shape, baseline, allocator), ""), (shape, baseline, allocator)


def test_the_summary_has_the_measured_variances():
    class_task, demo = (designs(f"{task}, warm start")["32x2", "history", "uniform"] for task in ("class task", "demo"))
    assert f"it is {class_task} and {demo} times the variance of `rloo`" in page("measured")


@pytest.mark.parametrize("label", GRADIENTS)
def test_the_text_about_measured_variances_has_no_other_figures(label):
    of = GRADIENTS[label]
    text = "\n\n".join(block for block in measured()[label].split("\n\n") if not block.startswith("|"))
    counts = f"{of['prompts']} prompts with {of['rollouts of each']} rollouts each, {of['history']} of which"
    assert counts in in_one_line(text)
    values = [of["between prompts"], of["|g|^2/s^2"], of["energy"]["log-correlation"], of["parameters"] / 1e6]
    values += [of["success rate"], of["response length"], of["sketch error"] or 0.0]
    values += [x for design in of["designs"] for x in (design["variance"], *design["interval"]) if x is not None]
    values += [row[key] or 0.0 for row in of["energy"]["wrong over right"] for key in ("S0/S1", SQUARES)]
    known = {f"{value:.{digits}f}" for value in values for digits in (1, 2, 3)}
    assert set(re.findall(r"\d+\.\d+", text)) <= known
    assert f"correlation of the logarithms {of['energy']['log-correlation']:.2f}" in in_one_line(text)


@pytest.mark.parametrize("label", [label for label, section in measured().items() if "| tokens |" in section])
def test_the_page_of_gradient_variance_has_the_measured_energies(label):
    wanted = []
    for row in GRADIENTS[label]["energy"]["wrong over right"]:
        low, high = row["tokens"]
        ratios = ["" if row[key] is None else f"{row[key]:.2f}" for key in ("S0/S1", SQUARES)]
        wanted.append([f"{low} to {high}", str(row["right"]), str(row["wrong"]), *ratios])
    assert rows(measured()[label], "tokens") == wanted


def test_the_cost_and_the_noise_of_a_measurement():
    (found,) = result("gradient_noise").values()
    text, seconds, of = in_one_line(page("gradient-variance")), found["seconds of an update"], found["measured"]
    ratio = seconds["measured"]["median"] / seconds["plain"]["median"]
    assert f"{seconds['plain']['samples']} updates of each kind" in text
    assert f"a measured update was {ratio:.1f} times that of a plain one" in text
    between, within = (of[name]["of one"] / of[name]["mean"] for name in ("between", "within"))
    assert f"of `between` was {between:.1f} times its mean, and of `within` {within:.1f} times" in text
    whole, names = found["from all gradients"], ("|g|^2/s^2", "between prompts")
    assert f"they give {found[names[0]]:.2f} for" in text and f"and {found[names[1]]:.2f} for the share" in text
    assert "give {:.2f} and {:.2f} (".format(*(whole[name] for name in names)) in text


# -- allocation.md -----------------------------------------------------------------------------------------------------
def test_the_variances_of_allocators():
    found = {(*r["beta"], *r["bounds"], r["allocation"]): r for r in result("allocation")["variances"]}
    narrow = (0.3, 0.3, 8, 24)
    floor = {"16 rollouts": "neyman with floor .2, 16 seen"}
    names = {"16 rollouts": "neyman, 16 seen", "48 rollouts": "neyman, 48 seen", "its success rate": "neyman, p known"}
    table = rows(page("allocation"), "what is known of each prompt")
    assert [row[0] for row in table] == list(names)
    for known, without, default in table:
        assert without == f"{found[*narrow, names[known]]['to uniform']:.2f}"
        with_floor = f"{found[*narrow, floor[known]]['to uniform']:.2f}" if known in floor else "not measured"
        assert default == with_floor
    text = in_one_line(page("allocation"))
    for beta in ((1.0, 1.0), (0.1, 1.0)):
        shares = (100 * found[*beta, 8, 24, name]["degenerate"] for name in ("uniform", "neyman, p known"))
        assert "{:.1f} % with `uniform` and {:.1f} % with `neyman`".format(*shares) in text


def test_the_time_of_an_allocation():
    *_, largest = result("allocation")["timings"]
    whole = {name.split()[-1]: taken for name, taken in largest.items() if name.startswith("RolloutAllocator")}
    said = f"takes {min(whole.values()):.1f} to {max(whole.values()):.1f} s of CPU time. `{max(whole, key=whole.get)}`"
    assert largest["prompts"] == 10**6 and said in in_one_line(page("allocation"))


def test_the_variances_by_energy():
    pools = result("energy_variance")["pools"]
    differing = ("one token, scaled", "lengths", "lengths, hard ones long")

    def ratios(model: str, seen: str, names: Any) -> list[float]:
        of = (pools[name] for name in names)
        return [p[f"{model} ({seen} seen)"]["with floor"] / p[f"bernoulli ({seen} seen)"]["with floor"] for p in of]

    def shown(cell: str) -> list[float]:
        return [float(x) for x in cell.split(" to ")]

    text = page("allocation")
    for seen, *cells in rows(text, "earlier rollouts per prompt"):
        for cell, names in zip(cells, (differing, set(pools) - set(differing)), strict=True):
            digits = len(cell.split(" to ")[0].partition(".")[2])
            found = ratios("energy", seen, names)
            assert {round(min(found), digits), round(max(found), digits)} == set(shown(cell)), (seen, cell)
    (cell,) = re.findall(r"the ratio after 8 rollouts is (\S+ to \S+) over all", in_one_line(text))
    found = ratios("means", "8", pools)
    assert shown(cell) == [round(min(found), 2), round(max(found), 2)]


def test_the_bias_of_sequential_rules_is_that_of_the_page_of_estimators():
    bias = {row[0]: float(row[1].split()[0]) for row in rows(page("estimators"), "rounds")}
    pilot, ada = (bias[f"{rule}, prompt_mean"] for rule in ("pilot, rloo", "reinforce_ada, balanced"))
    assert f"is {pilot:.0f} % with `pilot` and {ada:.0f} % with `reinforce_ada`" in in_one_line(page("allocation"))


# -- asynchronous.md ---------------------------------------------------------------------------------------------------
def test_the_pauses_of_a_push():
    medians = result("push_pauses")["medians"]
    table = rows(page("asynchronous"), "mode")
    assert [row[0].removeprefix("SGLang's `") for row in table] == ["no weight sync", "partial", "retract", "in_place"]
    for (_, seconds, gap), of in zip(table, medians.values(), strict=True):
        assert seconds == f"{of['all']:.2f}"
        assert gap in ({f"{of['gap']:.1g}", f"{of['gap']:.2g}"} if "gap" in of else {""})


def test_the_times_at_each_bound():
    runs = result("asynchrony")["runs"]
    medians: dict[int, float] = {}
    for bound, *cells in rows(page("asynchronous"), "bound | seconds"):
        of = [run for run in runs if run["bound"] == int(bound)]
        medians[int(bound)] = median = statistics.median(run["seconds"] for run in of)
        expected = [
            ", ".join(f"{run['seconds']:.0f}" for run in of),
            f"{median:.0f}",
            f"{median / medians[0]:.2f}" if medians[0] != median else "1",
            f"{statistics.median(run['time/generate'] for run in of):.1f}",
            f"{statistics.median(100 * run['fleet/idle_share'] for run in of):.0f}" if int(bound) else "",
        ]
        assert cells == expected, bound


def test_the_cost_of_the_checks_at_each_weight_sync():
    found = result("asynchrony_checks")
    seconds = [f"{found[of]['runs'][0]['time/reshard']:.2f}" for of in ("with the checks", "without")]
    assert f"took {seconds[0]} s with them and {seconds[1]} s without" in page("asynchronous").replace("\n", " ")


def test_the_learning_at_each_bound():
    runs = result("asynchronous_learning")["runs"]
    control = [100 * score for score in runs["bound_0"]["final pass@1"]]
    for (_, staleness, scores, mean, differences, interval), of in zip(
        rows(page("asynchronous"), "bound | mean staleness, steps"), runs.values(), strict=True
    ):
        final = [100 * score for score in of["final pass@1"]]
        assert staleness == f"{of['staleness_mean']:.1f}" and mean == f"{statistics.mean(final):.1f}"
        assert scores == ", ".join(f"{score:.1f}" for score in final)
        changes = ", ".join(f"{a - b:+.1f}" for a, b in zip(final, control, strict=True))
        assert differences == (changes if final != control else "")
        paired = [a - b for a, b in zip(final, control, strict=True)]
        middle, half = statistics.mean(paired), 4.303 * statistics.stdev(paired) / 3**0.5  # 97.5 % of t with 2 degrees
        assert interval == (f"{middle:+.1f} ({middle - half:+.1f} to {middle + half:+.1f})" if any(paired) else "")


def test_the_simulated_times():
    of = {row["gpus"]: row for row in result("asynchrony_curve") if row["tail"] == 1.0}
    table = rows(page("asynchronous"), "GPUs")
    assert [int(row[0]) for row in table] == list(of)
    for gpus, *cells in table:
        row = of[int(gpus)]
        ratios = (row[f"bound {bound}"] for bound in (1, 2, 4))
        assert cells == [f"{row['colocated, bound 0']:.0f}", *(f"{ratio:.2f}" for ratio in ratios)]


# -- replay.md ---------------------------------------------------------------------------------------------------------
REPLAYS = {"replay_demo": "The demo's run", "replay_still": "The demo's weights before RL"}


@pytest.mark.parametrize("name", REPLAYS)
def test_the_replays(name):
    found = result(name)
    (section,) = (s for s in page("replay").split("\n## ") if s.startswith(REPLAYS[name]))
    assert found["reproduced"] is True
    allocators = found["allocators"]
    table = rows(section, "allocator | expected variance")
    assert [row[0] for row in table] == list(allocators)
    for allocator, variance, groups, correlation, *objectives in table:
        of = allocators[allocator]
        assert variance == f"{of['to_uniform']:.3f}" and groups == f"{100 * of['degenerate_expected']:.1f}"
        rank = of["rank_correlation"]
        assert correlation == ("-" if rank is None else f"{rank:+.2f}")
        values = of["objectives_to_uniform"].values()
        assert objectives == [f"{value:.3f}" for value in values if value is not None], allocator


def test_the_rules_on_the_demos_run():
    found = result("replay_demo")
    rules = [name for name in found["rounds"] if name not in found["allocators"]]
    table = rows(page("replay"), "rule")
    assert len(rules) == 3 and [row[0] for row in table] == ["uniform", *rules]
    for name, *cells in table:
        of = found["rounds"][name]
        trained, groups = (100 * of[key] / of["rollouts"] for key in ("trained", "groups"))
        assert cells == [f"{of['rollouts']:.0f}", f"{trained:.0f}", f"{groups:.2f}"]


@pytest.mark.parametrize("name", REPLAYS)
def test_every_kind_of_allocator_is_replayed(name):
    names = "\n".join(result(name)["allocators"])
    assert all(kind in names for kind in ALLOCATORS)
