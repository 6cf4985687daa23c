"""What the README claims is what saved runs measured, and what benchmarks say that they measure."""
import importlib
import json

import pytest

from benchmarks import report
from benchmarks.__main__ import NAMES


def test_the_readme_holds_the_table_of_the_saved_runs():
    text = (report.ROOT / "README.md").read_text()
    shown = text.partition(report.OPEN)[2].partition(report.CLOSE)[0].strip()
    assert shown == report.table(report.saved()).strip(), "README.md is not what was saved: run python -m benchmarks report"


@pytest.mark.parametrize("run", report.saved(), ids=lambda run: run["bench"])
def test_a_saved_run_is_of_a_benchmark_and_measures_what_it_claims(run):
    assert run["bench"] in NAMES
    claims = importlib.import_module(f"benchmarks.{run['bench']}").CLAIMS
    assert set(claims) <= set(run["ratios"]), "a claim that was not measured"
    assert all(value > 0 for value in run["ratios"].values())


def test_what_is_saved_comes_back_and_the_table_and_plot_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    (tmp_path / "docs").mkdir()
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.OPEN}\nwhat was there\n{report.CLOSE}\nafter\n")
    report.save("depth", {"layer48_vs_layer6": 0.8512, "other": 77.7}, quick=True)
    assert report.saved()[0]["ratios"]["layer48_vs_layer6"] == 0.851
    assert "1 claims of 1" in report.write()
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "what was there" not in text
    assert "| 0.85 | `python -m benchmarks depth --quick` |" in text and "77.7" not in text
    assert (tmp_path / "docs" / "benchmarks.png").stat().st_size > 5000


def test_a_readme_without_a_place_for_it_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "ROOT", tmp_path)
    (tmp_path / "README.md").write_text("no place")
    with pytest.raises(SystemExit, match="no place for the table"):
        report.write()
    assert (tmp_path / "README.md").read_text() == "no place"


def test_results_are_json_with_machine_and_day():
    for path in report.RESULTS.glob("*.json"):
        found = json.loads(path.read_text())
        assert {"bench", "quick", "date", "torch", "machine", "ratios"} == set(found), path
