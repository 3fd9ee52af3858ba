import asyncio
import io
import json

import pytest
from histories import World, evaluation
from rich.console import Console

from rollart.algo.intervals import wilson
from rollart.core import events as ev
from rollart.core.errors import ConfigError
from rollart.observe.journal import Journal
from rollart.observe.ledger import Ledger
from rollart.observe.metrics import Metrics
from rollart.observe.run_folder import RunFolder
from rollart.observe.status import StatusWriter, render_status, run_state


def shown(path) -> str:
    console = Console(file=io.StringIO(), width=150)
    console.print(render_status(path))
    return console.file.getvalue()


def begin(path, acts=400):
    folder = RunFolder(path).create({"seed": 1})
    ledger = Ledger(folder.database)
    metrics = Metrics(folder.metrics, ledger.accounts, staleness_bound=1)
    emit = Journal([ledger, metrics], clock=lambda: 0.0).emit
    emit(ev.RunStarted(0, 20, False))
    world = World(1, emit)
    for _ in range(acts):
        world.act()
    ledger.flush()
    return folder, ledger, emit


def test_it_tells_running_ended_and_killed_apart(tmp_path):
    assert run_state(tmp_path / "none") == "no run here"
    folder, ledger, emit = begin(tmp_path / "run")
    assert run_state(folder.path).startswith("running (process")
    folder.close()
    assert run_state(folder.path).startswith("killed")
    emit(ev.RunEnded(20, "finished"))
    ledger.close()
    assert run_state(folder.path) == "finished"


def test_a_live_run_shows_ledger_success_waits_and_oldest_in_flight(tmp_path):
    folder, ledger, emit = begin(tmp_path / "run")
    StatusWriter(folder.path, lambda: {
        "versions": {"trainer": 3, "live": 2}, "waits": [{"who": "train", "what": "a full batch", "seconds": 2.5}],
        "in_flight": [{"id": "g1.2", "stage": "open [slow]", "age_seconds": 31.0}], "rates": {}}).write()
    for event in evaluation(7, 3, {"guess": [True] * 3 + [False] * 5}):
        emit(event)
    text = shown(folder.path)
    low, high = wilson(3 / 8, 8)
    assert f"{3 / 8:.2f} ({low:.2f}-{high:.2f})" in text
    dispatched = str(ledger.accounts.counts()["dispatched"])
    for piece in ("running", "of 20", dispatched, "guess", "a full batch", "open [slow]"):
        assert piece in text
    folder.close()
    assert "when it was last seen" in shown(folder.path)
    assert "killed" in shown(folder.path)


def test_it_shows_a_run_without_any_step(tmp_path):
    folder = RunFolder(tmp_path / "run").create({})
    assert "being prepared" in shown(folder.path)
    folder.close()
    assert "being prepared" not in shown(folder.path)
    assert "no step has ended yet" in shown(tmp_path / "run")
    assert "no run here" in shown(tmp_path / "none")


def test_the_writer_writes_whole_files_until_it_is_cancelled(tmp_path):
    numbers = iter(range(1000))

    async def run():
        writing = asyncio.create_task(StatusWriter(tmp_path, lambda: {"n": next(numbers)}, seconds=0.01).run())
        await asyncio.sleep(0.1)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)

    asyncio.run(run())
    assert 2 < json.loads((tmp_path / "status.json").read_text())["n"] == next(numbers) - 1


@pytest.mark.parametrize("content", [{"at": "now"}, {"at": 0, "in_flight": 5}, {"versions": [1]}, {"waits": {"a": 1}}])
def test_a_status_that_no_run_wrote_is_one_line(content, tmp_path):
    (tmp_path / "status.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"status.json is damaged .* remove it") as raised:
        render_status(tmp_path)
    assert "\n" not in str(raised.value)
