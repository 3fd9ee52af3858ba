"""Whatever a command prints: harmless, in characters that the terminal has, and never the end of the command."""

from __future__ import annotations

import io
import subprocess
from pathlib import Path

import pytest
from rich.table import Table

from helpers import command, environment, rollart
from rollart.cli_base import how_to_resume
from rollart.config.recipe import load_recipe
from rollart.core.errors import ConfigError
from rollart.terminal import Outlet, Terminal, harmless

HOSTILE = "\x1b]0;title\x07 \x1b[2J \x1b]52;c;Zm9v\x07 [red]x[/] \r \x9b1m \u202e \ud800"


def printed(*values: object, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    console = Terminal(file=Outlet(raw, encoding=encoding, errors="nearest", write_through=True), width=80)
    console.print(*values, soft_wrap=True)
    return raw.getvalue().decode(encoding)


def table(text: str) -> Table:
    out = Table(text, title=text, caption=text)
    out.add_row(text)
    return out


@pytest.mark.parametrize("shown", [HOSTILE, table(HOSTILE)], ids=["text", "table"])
def test_foreign_text_is_shown_and_not_obeyed(shown):
    out = printed(shown)
    assert not set(out) & set("\x1b\x07\r\x9b\u202e")
    assert "\u241b]0;title" in out
    assert "[red]x[/]" in out


def test_own_colours_and_lines_stay():
    raw = io.StringIO()
    Terminal(file=raw, force_terminal=True, color_system="standard").print("a\n\tb", style="red")
    assert raw.getvalue() == "\x1b[31ma\x1b[0m\n\x1b[31m        b\x1b[0m\n"
    assert harmless("a\n\tb") == "a\n\tb"


@pytest.mark.parametrize(("encoding", "said"), [("ascii", "##.. 1-2 > ?"), ("cp1252", "##·· 1–2 > ?")])
def test_a_character_without_a_code_becomes_the_nearest_of_the_same_width(encoding, said):
    assert printed("██·· 1–2 → ☃", encoding=encoding) == f"{said}\n"


@pytest.mark.parametrize("arguments", [("--help",), ("doctor",), ("envs", "list"), ("algorithms",),
                                       ("reproduce", "--list"), ("envs", "play", "calculator", "--who", "script")])
def test_every_table_and_help_comes_out_in_ascii(arguments):
    shown = subprocess.run(command(*arguments), env={**environment(), "PYTHONIOENCODING": "ascii"}, timeout=120,
                           capture_output=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert shown.stderr == b""
    shown.stdout.decode("ascii")


def test_a_full_disk_under_the_output_is_one_line():
    with open("/dev/full", "wb") as full:
        failed = subprocess.run(command("algorithms"), stdout=full, stderr=subprocess.PIPE, env=environment(),
                                timeout=60, check=False)
    assert failed.returncode == 1
    assert failed.stderr == b"error: the output could not be written: No space left on device\n"


@pytest.mark.parametrize(("arguments", "said"), [
    (("trian",), "No such command 'trian'. Did you mean 'train'?"),
    (("envs", "lits"), "No such command 'lits'. Did you mean 'list'?"),
    (("train", "--rseume", "x"), "--resume"),
    (("status",), "Missing argument 'RUN'"),
    (("eval", "x", "--tasks", "none"), "'--tasks'")])
def test_a_typo_is_one_line_that_says_where_help_is(arguments, said):
    result = rollart(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    line, = result.stderr.splitlines()
    assert said in line
    assert line.startswith("error: ")
    assert line.endswith("--help)")


def test_a_typo_in_a_files_name_is_told_with_the_nearest(tmp_path):
    (tmp_path / "short.toml").touch()
    result = rollart("train", tmp_path / "shrot.toml")
    assert result.returncode == 2
    assert result.stderr == (f"error: recipe {tmp_path}/shrot.toml does not exist: did you mean "
                             f"'{tmp_path}/short.toml'?\n")


def test_a_recipes_name_without_its_folder_and_ending_is_enough_for_the_nearest(tmp_path, monkeypatch):
    (tmp_path / "recipes").mkdir()
    for name in ("recipes/quickstart.toml", "recipes/cluster.toml", "pyproject.toml"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"did you mean 'recipes/quickstart.toml'"):
        load_recipe(Path("quickstart"))
    with pytest.raises(ConfigError, match=r"there are recipes/cluster.toml, recipes/quickstart.toml$"):
        load_recipe(Path("pyprojects.toml"))


def test_an_error_line_is_harmless():
    result = rollart("train", "\x1b]0;x\x07.toml")
    assert result.returncode == 2
    assert "\u241b]0;x.toml does not exist" in result.stderr
    assert "\x1b" not in result.stderr


def test_the_command_that_goes_on_runs_in_the_shell_where_this_one_was_typed(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", [".venv/bin/rollart", "train"])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert how_to_resume(Path("runs/a b")) == ".venv/bin/rollart train --resume 'runs/a b'"
    (tmp_path / "rollart").touch(0o755)
    assert how_to_resume(Path("runs/a")) == "rollart train --resume runs/a"
