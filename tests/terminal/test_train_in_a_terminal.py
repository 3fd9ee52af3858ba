"""`rollart train` where a person runs it: terminals of several sizes and kinds."""

from __future__ import annotations

import re
import subprocess

import pytest
from screens import drawn_over, ended, spawn

from helpers import command, environment, tiny_recipe

SIZES = {"80x24": (24, 80), "40x10": (10, 40), "200x50": (50, 200)}
KINDS = {"dumb": {"TERM": "dumb"}, "no_color": {"NO_COLOR": "1"}, "cp1252": {"PYTHONIOENCODING": "cp1252"},
         "c_locale": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Finished runs by name, as (exit code, all that was written); they run side by side."""
    folder = tmp_path_factory.mktemp("runs")
    recipe = tiny_recipe(folder, steps=2)
    sets = ("--set", "evaluation.tasks=2")
    begun = {name: spawn("train", recipe, "--run", folder / name, *sets, rows=rows, columns=columns)
             for name, (rows, columns) in SIZES.items()}
    begun |= {name: spawn("train", recipe, "--run", folder / name, *sets, **kind) for name, kind in KINDS.items()}
    return {name: (ended(child), child.logfile_read) for name, child in begun.items()}


@pytest.mark.parametrize("name", SIZES)
def test_the_panel_is_smaller_than_the_terminal_and_the_cursor_comes_back(runs, name):
    code, log = runs[name]
    rows, columns = SIZES[name]
    assert code == 0, log.text()
    assert 2 <= drawn_over(log) < rows
    assert max(map(len, re.split("[\r\n]+", log.text()))) <= columns
    assert "training 2/2" in log.text()
    assert "frozen_lake" in log.text()
    assert "finished" in log.text()
    assert log.all.rfind(b"\x1b[?25h") > log.all.rfind(b"\x1b[?25l") > -1


def test_held_out_success_has_its_interval(runs):
    assert re.search(r"frozen_lake .* [01]\.\d\d \(0\.\d\d-[01]\.\d\d\)", runs["80x24"][1].text())


def test_a_dumb_terminal_gets_lines_and_no_control(runs):
    code, log = runs["dumb"]
    assert code == 0
    assert b"\x1b" not in log.all
    assert "step 2: " in log.text()


def test_no_color_has_no_colour(runs):
    code, log = runs["no_color"]
    assert code == 0
    assert drawn_over(log) >= 2
    assert not re.search(rb"\x1b\[(?:\d+;)*[349]\d(?:;\d+)*m", log.all)
    assert re.search(rb"\x1b\[(?:\d+;)*3\d(?:;\d+)*m", runs["80x24"][1].all)


@pytest.mark.parametrize(("name", "encoding"), [("cp1252", "cp1252"), ("c_locale", "ascii")])
def test_a_terminal_without_the_characters_gets_the_nearest(runs, name, encoding):
    code, log = runs[name]
    assert code == 0, log.text(encoding)
    assert "training 2/2 ####" in log.text(encoding)
    assert "Error" not in log.text(encoding)


def test_a_reader_that_goes_away_does_not_end_a_run(tmp_path):
    words = " ".join(command("train", tiny_recipe(tmp_path, steps=2), "--run", tmp_path / "run"))
    piped = subprocess.run(["bash", "-c", f"{words} | head -1; exit ${{PIPESTATUS[0]}}"], capture_output=True,
                           text=True, env=environment(), timeout=120, check=False)
    assert piped.returncode == 0, piped.stderr
    assert "Error" not in piped.stderr
    assert piped.stdout.startswith("tiny: ")
    assert (tmp_path / "run" / "checkpoints" / "000002" / "complete").exists()


def test_a_run_without_any_standard_stream_is_a_run(tmp_path):
    words = " ".join(command("train", tiny_recipe(tmp_path, steps=1), "--run", tmp_path / "run"))
    closed = subprocess.run(["bash", "-c", f"{words} <&- >&- 2>&-"], env=environment(), timeout=120, check=False)
    assert closed.returncode == 0
    assert (tmp_path / "run" / "checkpoints" / "000001" / "complete").exists()
