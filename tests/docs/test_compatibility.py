"""The table of trainers: its rows can be read back, and name what can be run."""

import datetime
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import compatibility  # noqa: E402
from trainers import environments  # noqa: E402


def test_each_row_names_an_environment_and_a_day() -> None:
    rows = compatibility.rows_of(compatibility.PAGE.read_text())
    lines = [line for line in compatibility.PAGE.read_text().splitlines() if line.startswith("| ")][2:]
    assert list(rows.values()) == lines
    for (name, _), line in rows.items():
        assert name in environments.ENVIRONMENTS
        datetime.date.fromisoformat(compatibility.date(line))


def test_the_workflow_runs_every_environment() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/trainers.yml").read_text())["jobs"]
    assert jobs["run"]["strategy"]["matrix"]["name"] == list(environments.ENVIRONMENTS)


def test_a_row_that_ran_again_takes_the_place_of_the_older() -> None:
    made = compatibility.row("slime", "abc", [("test_slime[a]", True), ("test_slime[b]", False), ("test_a_b", True)])
    assert compatibility.rows_of("\n".join(made.values())) == made
    assert f"| slime | abc | 2 of 3 | slime; a b | {datetime.date.today()} |" in made.values()
