from pathlib import Path

from publish_comparison import publish

README = (Path(__file__).parents[2] / "README.md").read_text()
TABLES = "# Comparison\n\n## Final scores\n\nMean.\n\n| arm |\n\n## Cost of half\n\n| cost |\n"


def test_the_scores_replace_those_in_readme_and_nothing_else(tmp_path):
    made, results = tmp_path / "runs" / "compare", tmp_path / "benchmarks" / "results"
    made.mkdir(parents=True)
    results.mkdir(parents=True)
    (made / "comparison.md").write_text(TABLES)
    (made / "curves.jsonl").write_text("{}\n")
    (tmp_path / "README.md").write_text(README)
    for _ in range(2):
        publish(tmp_path)
        before, after = (tmp_path / "README.md").read_text().split("<!-- compare -->\nMean.\n\n| arm |\n<!-- end -->")
        assert README.startswith(f"{before}<!-- compare -->\n") and README.endswith(f"<!-- end -->{after}")
    assert (results / "demo_comparison.md").read_text() == TABLES
    assert (results / "demo_curves.jsonl").read_text() == "{}\n"
