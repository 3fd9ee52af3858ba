"""Keys and signals of a terminal: each leaves a folder that a run goes on in."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time

import pytest
from screens import ended, shell, spawn

from helpers import command, environment, rollart, tiny_recipe

LATENCY = "\n[domains.calculator.latency]\nmean_seconds = {0}\n[domains.frozen_lake.latency]\nmean_seconds = {0}\n"


def step(run):
    """The version that a live run last wrote down."""
    try:
        return json.loads((run / "status.json").read_text())["versions"]["trainer"]
    except FileNotFoundError:
        return 0


def until_step(run, wanted, seconds=240.0):
    deadline = time.monotonic() + seconds
    while step(run) < wanted:
        assert time.monotonic() < deadline, f"{run} did not come to step {wanted}"
        time.sleep(0.1)


def newest(run):
    return max((int(path.parent.name) for path in (run / "checkpoints").glob("*/complete")), default=0)


def test_stop_and_go_on_watch_interrupt_once_and_twice_in_a_path_with_spaces(tmp_path):
    """What a person does with a run of their own, in one go: Ctrl-Z, fg, status --watch beside it, Ctrl-C, --resume,
    Ctrl-C twice."""
    run = tmp_path / "my run"
    recipe = tiny_recipe(tmp_path, steps=500, extra=LATENCY.format(0.3))
    person = shell(tmp_path)
    person.sendline(f"rollart train {recipe} --run 'my run' --set pipeline.checkpoint_every=0; echo code $?")
    person.expect_exact("training ")
    until_step(run, 1)
    person.sendcontrol("z")
    person.expect_exact("READY> ")
    before = step(run)
    time.sleep(1.5)
    assert step(run) == before, "it stands still"
    written = person.logfile_read.all
    assert written.rfind(b"\x1b[?25h") > written.rfind(b"\x1b[?25l"), "the shell has a cursor"
    person.sendline("fg")
    until_step(run, before + 1)

    watcher = spawn("status", run, "--watch", "--every", "0.5")
    watcher.expect("waits: |nothing waits")
    watcher.expect("running")
    plain = subprocess.Popen(command("status", run, "--watch", "--every", "0.5"), stdout=subprocess.PIPE, text=True,
                             env=environment())
    line = plain.stdout.readline()
    assert "running (process" in line
    assert " of 500; " in line
    plain.stdout.close()  # nobody reads: it ends by itself
    assert plain.wait(60) == 0

    person.sendcontrol("c")
    person.expect_exact("ending after the step")
    person.expect_exact("interrupted; continue with: rollart train --resume 'my run'")
    assert ended(watcher) == 0
    assert "interrupted" in watcher.logfile_read.text()
    done = newest(run)
    assert done == step(run) > 0

    person.sendline("rollart train --resume 'my run'; echo code $?")
    person.expect_exact("training ")
    until_step(run, done + 1)
    person.sendcontrol("c")
    person.expect_exact("ending after the step")
    person.sendcontrol("c")
    person.expect_exact("interrupted; continue with")
    person.expect_exact("READY> ")
    assert "Traceback" not in person.logfile_read.text()
    assert "interrupted" in rollart("status", run).stdout
    person.close(force=True)


def test_a_closed_terminal_loses_no_step(tmp_path):
    run = tmp_path / "run"
    child = spawn("train", tiny_recipe(tmp_path, steps=500, extra=LATENCY.format(0.2)), "--run", run,
                  "--set", "pipeline.checkpoint_every=0")
    child.expect_exact("training ")
    until_step(run, 2)
    os.close(child.child_fd)
    _, status = os.waitpid(child.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 130
    assert newest(run) == step(run) >= 2
    assert "interrupted" in rollart("status", run).stdout


@pytest.mark.parametrize("moment", ["starting", "demonstrations"])
def test_ctrl_c_before_the_first_step_is_one_line(tmp_path, moment):
    run = tmp_path / "run"
    extra = "\n[warm_start]\ndemonstrations = 100000\n"
    child = spawn("train", tiny_recipe(tmp_path, extra=extra), "--run", run)
    child.expect_exact(moment)
    child.sendcontrol("c")
    assert ended(child) == 130
    assert "interrupted; continue with: rollart train --resume" in child.logfile_read.text()
    assert "Traceback" not in child.logfile_read.text()
    assert (run / "config.json").exists()


def test_ctrl_c_while_the_program_is_being_read_is_one_line(tmp_path):
    """The first thing that is read is typer; one that waits for the key stands in for it."""
    (tmp_path / "typer.py").write_text("import time\nprint('reading', flush=True)\ntime.sleep(60)\n")
    import rollart

    paths = os.pathsep.join([str(tmp_path), os.path.dirname(os.path.dirname(rollart.__file__))])
    child = spawn("doctor", PYTHONPATH=paths)
    child.expect_exact("reading")
    child.sendcontrol("c")
    assert ended(child) == 130
    assert re.fullmatch(r"reading\s*(\^C)?interrupted\s*", child.logfile_read.text())


def test_a_copy_in_a_path_with_spaces_trains(tmp_path):
    import shutil

    import rollart as package

    copy = tmp_path / "a b" / "src"
    shutil.copytree(os.path.dirname(package.__file__), copy / "rollart", ignore=shutil.ignore_patterns("__pycache__"))
    result = subprocess.run(command("train", tiny_recipe(copy, steps=1), "--run", "my run"), cwd=copy, text=True,
                            env={**environment(), "PYTHONPATH": str(copy)}, capture_output=True, timeout=120,
                            check=False)
    assert result.returncode == 0, result.stderr
    assert (copy / "my run" / "report.html").exists()
