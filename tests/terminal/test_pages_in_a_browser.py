"""report.html and the live page in headless Chromium: they draw, and the browser has nothing to complain about."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from helpers import command, environment, rollart, tiny_recipe

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here (apt install chromium)")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    done = rollart("train", tiny_recipe(folder, steps=2), "--run", folder / "run", "--set", "evaluation.tasks=2")
    assert done.returncode == 0, done.stderr
    return folder / "run"


def page(url, folder):
    """The page's DOM once its scripts have run, and what the browser wrote to its console."""
    shown = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
         f"--user-data-dir={folder}", "--enable-logging=stderr", "--virtual-time-budget=2000", "--dump-dom", url],
        capture_output=True, text=True, timeout=120, check=True)
    return shown.stdout, [line for line in shown.stderr.splitlines() if "CONSOLE" in line]


def check(run, dom):
    summary = json.loads((run / "summary.json").read_text())
    tiles = dict(re.findall(r'<div class="tile"><b>([^<]*)</b><span>([^<]*)</span>', dom))
    assert f"{summary['steps']:,}" in tiles
    assert f"trajectories trained, of {summary['ledger']['dispatched']:,}" in tiles.values()
    assert all(f"success of {name}" in dom for name in summary["domains"])
    assert dom.count("<svg") >= 4
    assert "NaN" not in dom


def test_the_report_of_a_run_draws(run, tmp_path):
    dom, complaints = page((run / "report.html").as_uri(), tmp_path)
    check(run, dom)
    assert complaints == []


def test_the_live_page_draws(run, tmp_path):
    server = subprocess.Popen(command("report", run, "--serve", 0), stdout=subprocess.PIPE, text=True,
                              env=environment())
    try:
        url = re.search(r"http://\S+", server.stdout.readline())[0]
        dom, complaints = page(url, tmp_path)
    finally:
        server.terminate()
        server.wait(30)
    check(run, dom)
    assert [line for line in complaints if "favicon" not in line] == []
