import io
import re
from html.parser import HTMLParser

import pytest
from fake_run import write_run
from histories import make_task, make_trajectory
from rich.console import Console

from rollart.core import events as ev
from rollart.core.types import Fate, TrajectoryId
from rollart.observe.charts import Frame, histogram, learning_chart, lines_chart, nice_top, smooth, split_bar
from rollart.observe.ledger import Ledger
from rollart.observe.ledger_view import LedgerView
from rollart.observe.report import render_report, write_report
from rollart.observe.run_folder import RunFolder
from rollart.observe.summary import summarise


class Balanced(HTMLParser):
    """Fails on a tag that is not closed in order."""

    def __init__(self):
        super().__init__()
        self.open, self.links = [], []

    def handle_starttag(self, tag, attrs):
        self.links += [value for key, value in attrs if key in ("src", "href")]
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def checked(path) -> str:
    page = write_report(path).read_text()
    parser = Balanced()
    parser.feed(page.replace("<!doctype html>", ""))
    assert parser.open == []
    assert parser.links == []
    assert "<script" not in page
    assert "http" not in page
    return page


def printed(path, width=140) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(render_report(path))
    return console.file.getvalue()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "a<b>&c", steps=12)


def test_the_page_needs_no_network_and_escapes_everything(run):
    page = checked(run.path)
    assert "a&lt;b&gt;&amp;c" in page
    assert "&lt;tool&gt;17*23&lt;/tool&gt;" in page
    assert "scorer &lt;sandbox&gt; is out of memory" in page
    assert "<tool>" not in page
    assert "<sandbox>" not in page


def test_the_page_and_the_terminal_tell_before_and_after_of_each_domain(run):
    with LedgerView(run.database) as ledger:
        results = [r for r in ledger.evaluations() if r["domain"] == "calculator"]
    before, after = (f"{results[i]['success']:.0%}" for i in (0, -1))
    assert f"<i>{before} →</i> {after}" in checked(run.path)
    row = next(line for line in printed(run.path).splitlines() if "calculator" in line)
    assert re.findall(r"\d+%", row) == [before, after]
    domain = summarise(run.path)["domains"]["calculator"]
    low, high = (round(100 * end) for end in domain["eval_after_interval"])
    assert low < round(100 * domain["eval_after"]) < high
    assert f"{after} ({low}-{high})" in row
    low, high = (f"{100 * end:+.0f}" for end in domain["eval_change_interval"])
    assert f"{100 * domain['eval_change']:+.0f} ({low} to {high})" in row
    assert f"change {100 * domain['eval_change']:+.0f} ({low} to {high}) points" in checked(run.path)
    assert max(len(line) for line in printed(run.path, 80).splitlines()) <= 80


def test_samples_are_the_same_task_before_and_after_and_begin_with_what_was_learned(run):
    with LedgerView(run.database) as ledger:
        pairs = ledger.samples("calculator", 12)
    assert len(pairs) == 12
    assert all(before.task == after.task and v < w for before, v, after, w in pairs)
    gains = [after.score.success - before.score.success for before, _, after, _ in pairs]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] == 1


def test_a_run_that_has_just_begun_and_one_that_was_killed_have_a_report(tmp_path):
    folder = RunFolder(tmp_path / "begun").create({"seed": 1})
    assert printed(folder.path).splitlines()[1:] == ["no step has ended yet"]
    assert "No step has ended yet" in checked(folder.path)
    ledger = Ledger(folder.database)
    assert "No step has ended yet" in checked(folder.path)
    ledger.on(0.0, ev.RunStarted(0, 5, False))
    ledger.on(0.0, ev.TrajectoryStarted(TrajectoryId(0, 0), "guess"))
    ledger.flush()
    folder.close()
    assert "killed" in checked(folder.path)
    assert "guess" in printed(folder.path)
    assert checked(write_run(tmp_path / "killed", steps=3, ended=False).path).count("<svg") >= 5


def test_without_an_evaluation_training_trajectories_are_shown(tmp_path):
    folder = RunFolder(tmp_path / "run").create({})
    ledger = Ledger(folder.database)
    t = make_trajectory(TrajectoryId(0, 0), make_task(2), say=lambda turn: ("I say 50", "Higher"))
    for event in (ev.TrajectoryStarted(t.id, "guess"), ev.TrajectoryEnded(t, Fate.IN_FLIGHT),
                  ev.Settled((t.id,), Fate.TRAINED, "", 0)):
        ledger.on(0.0, event)
    assert "I say 50" in checked(folder.path)


def test_charts_draw_nothing_and_one_point_and_far_too_much():
    for points in ([], [(0, 0.5)], [(i, i / 999) for i in range(1000)]):
        assert learning_chart("<t>", points, points, [(0.2, 0.9)] * len(points), 0, 999).startswith("<svg")
        assert lines_chart("t", {"a": points}, 999).count("<svg") == 1
    assert "&lt;t&gt;" in learning_chart("<t>", [], [], [], 0, 0)
    assert histogram("t", {}, None).startswith("<svg")
    assert 'class="bar bad"' in histogram("t", {0: 5, 3: 1}, 1)
    assert 'class="bar bad"' not in histogram("t", {0: 5, 1: 1}, 1)


def test_chart_arithmetic():
    assert [nice_top(v) for v in (0, 0.3, 1, 1.1, 2.2, 99)] == [1.0, 0.5, 1.0, 2.0, 2.5, 100.0]
    assert smooth([(0, 1.0), (1, 3.0), (2, 5.0)], 2) == [(0, 1.0), (1, 2.0), (2, 4.0)]
    frame = Frame(340, 190, 0, 10, 1.0)
    assert (frame.x(0), frame.x(10), frame.y(0), frame.y(1.0)) == (38, 326, 164, 12)
    assert 'width:25.00%' in split_bar([("a", 1.0, "c0")], 4.0)


def test_environments_are_shown_with_their_latencies_and_quarantined_tasks(tmp_path):
    write_run(tmp_path)
    ledger, id = Ledger(RunFolder(tmp_path).database), TrajectoryId(900_000, 0)
    for event in (ev.GroupOpened(id.group, make_task(2), 0, {}), ev.TrajectoryStarted(id, "guess"),
                  ev.EnvironmentOpened(id, 2.0, 3), ev.EnvironmentClosed(id, (0.5, 0.5)),
                  ev.GroupEnded(id.group, False, "quarantined after 2 failed groups: <b>", {}),
                  ev.RunEnded(0, "interrupted")):
        ledger.on(0.0, event)
    ledger.close()
    page = checked(tmp_path)
    row = re.search(r"<tr><td>guess</td><td>1</td><td>2</td>(.*?)</tr>", page)[1]
    seen = re.findall(r"<td>(.*?)</td>", row)
    assert [float(value) for value in seen[:5]] == pytest.approx([2.0, 2.0, 2, 0.5, 0.5], rel=0.03)
    assert seen[-1] == make_task(2).id
