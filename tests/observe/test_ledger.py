import shutil
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from histories import World, evaluation, make_task, make_trajectory
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.core import events as ev
from rollart.core.errors import ConfigError, InvariantViolated, RunError
from rollart.core.types import Fate, Group, Outcome, Restored, TrajectoryId
from rollart.observe.journal import Journal
from rollart.observe.ledger import Ledger
from rollart.observe.ledger_view import LedgerView


def killed(ledger: Ledger, to: Path) -> None:
    """What kill -9 leaves: the files as they are, without a commit of what is pending."""
    to.mkdir()
    for name in ("run.db", "run.db-wal"):
        if (source := ledger.path.with_name(name)).exists():
            shutil.copy(source, to / name)


def rows(path: Path, query: str) -> list[tuple]:
    with sqlite3.connect(path / "run.db") as db:
        return db.execute(query).fetchall()


def assert_whole(path: Path, ledger: Ledger, restored: Restored, checkpoint: int) -> None:
    """The identity holds; every task drawn is in exactly one place; nothing in flight but what was handed back."""
    fates = Counter(dict(rows(path, "SELECT fate, count(*) FROM trajectories GROUP BY 1")))
    counts = ledger.accounts.counts()
    assert counts["dispatched"] == sum(fates.values()) == sum(n for name, n in counts.items() if name != "dispatched")
    assert {name: n for name, n in counts.items() if n and name != "dispatched"} == fates
    handed = {m.id for g in restored.groups for m in g.finished}
    flying = {TrajectoryId(*row) for row in rows(path, "SELECT grp, member FROM trajectories WHERE fate='in_flight'")}
    assert handed == flying == set(ledger.accounts.in_flight)
    assert all(m.id.member < g.started for g in restored.groups for m in g.finished)
    assert all(g.id < restored.next_group for g in restored.groups)
    done = rows(path, "SELECT id, task FROM groups WHERE id IN (SELECT grp FROM trajectories WHERE "
                      f"fate IN ('trained', 'filtered') AND step < {checkpoint})")
    failed = rows(path, "SELECT id, task FROM groups WHERE state = 'ended' AND reason = 'failed'")
    source = restored.source or {"drawn": 0, "returned": []}
    places = [*source["returned"], *(int(g.task.id.split(":")[1]) for g in restored.groups)]
    places += [int(task.split('"')[3].split(":")[1]) for _, task in [*done, *failed]]
    assert sorted(places) == list(range(source["drawn"]))
    assert rows(path, f"SELECT 1 FROM trajectories WHERE step >= {checkpoint}") == []


class Killed(Exception):
    pass


@given(seed=st.integers(0, 10**9), lives=st.lists(st.integers(1, 300), min_size=1, max_size=4),
       commit_seconds=st.sampled_from([0.0, 1e9]))
@settings(max_examples=40, deadline=None)
def test_after_a_kill_at_any_event_every_task_and_trajectory_is_in_exactly_one_place(
        tmp_path_factory, seed, lives, commit_seconds):
    """commit_seconds 0: every event is on disk; 1e9: those up to the last barrier are."""
    path, checkpoint, restored = tmp_path_factory.mktemp("run"), 0, None
    consumed: dict[TrajectoryId, int] = {}
    for number, events in enumerate(lives):
        ledger = Ledger(path / "run.db", commit_seconds=commit_seconds)
        journal = Journal([ledger], clock=lambda: 0.0)

        def emit(event, journal=journal, last=events):
            if journal.sequence == last:
                raise Killed
            journal.emit(event)

        world = World(seed + number, emit, checkpoint)
        with pytest.raises(Killed):
            live(world, restored)
        checkpoint, path = world.checkpoint, path / "crash"
        consumed = {id: step for id, step in (consumed | world.consumed).items() if step < checkpoint}
        killed(ledger, path)
        ledger._db.close()
        ledger = Ledger(path / "run.db", commit_seconds=commit_seconds)
        restored = ledger.recover(checkpoint)
        assert_whole(path, ledger, restored, checkpoint)
        assert {TrajectoryId(*row[:2]): row[2] for row in rows(
            path, "SELECT grp, member, step FROM trajectories WHERE fate IN ('trained', 'filtered')")} == consumed
        assert ledger.recover(checkpoint) == restored
        ledger.close()


def live(world: World, restored: Restored | None) -> None:
    if restored:
        world.restore(restored)
    while True:
        world.act()


def test_real_processes_killed_at_any_time_leave_a_ledger_that_goes_on(tmp_path):
    code = """
import sys
from histories import World
from rollart.observe.journal import Journal
from rollart.observe.ledger import Ledger
from rollart.observe.ledger_view import LedgerView
ledger, version = Ledger(sys.argv[1]), int(sys.argv[2])
world = World(version, Journal([ledger], clock=lambda: 0.0).emit, version)
world.restore(ledger.recover(version))
print("ready", flush=True)
while True:
    world.act()
"""
    checkpoint, trained = 0, 0
    for life in range(3):
        process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run.db"), str(checkpoint)],
                                   cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.25 + 0.111 * life)
        finally:
            process.kill()
            process.communicate()
        ledger = Ledger(tmp_path / "run.db")
        checkpoint = int(rows(tmp_path, "SELECT value FROM meta WHERE key = 'checkpoint'")[0][0])
        assert_whole(tmp_path, ledger, ledger.recover(checkpoint), checkpoint)
        assert ledger.accounts.counts()["trained"] > trained
        trained = ledger.accounts.counts()["trained"]
        ledger.close()


def ready_group(world_emit, group: int, members: int = 2, version: int = 0) -> tuple[TrajectoryId, ...]:
    task = make_task(group)
    world_emit(ev.GroupOpened(group, task, version, {"drawn": group + 1, "returned": []}))
    done = [make_trajectory(TrajectoryId(group, m), task, version=version) for m in range(members)]
    for t in done:
        world_emit(ev.TrajectoryStarted(t.id, task.domain))
        world_emit(ev.TrajectoryEnded(t, Fate.IN_FLIGHT))
    world_emit(ev.GroupReady(Group(group, task, version, tuple(done))))
    world_emit(ev.GroupEnded(group, True, "", {"drawn": group + 1, "returned": []}))
    return tuple(t.id for t in done)


@pytest.fixture
def ledger(tmp_path):
    ledger = Ledger(tmp_path / "run.db")
    yield ledger
    ledger.close()


def emit_to(ledger):
    return Journal([ledger], clock=lambda: 0.0).emit


def test_a_step_after_the_checkpoint_is_undone_with_all_its_tokens(ledger):
    emit = emit_to(ledger)
    first, second = ready_group(emit, 0), ready_group(emit, 1, 4)
    emit(ev.Settled(first, Fate.TRAINED, "", 0))
    emit(ev.Settled(second, Fate.TRAINED, "", 1))
    emit(ev.CheckpointSaved(1, "checkpoints/000001", 0.1))  # told late
    ledger.flush()
    assert ledger.accounts.counts()["trained"] == 6
    restored = ledger.recover(1)
    assert [group.id for group in restored.groups] == [1]
    assert restored.groups[0].finished == tuple(make_trajectory(id, make_task(1)) for id in second)
    assert ledger.accounts.counts() | {"dispatched": 6, "trained": 2, "in_flight": 4} == ledger.accounts.counts()


def test_a_group_that_was_given_up_just_before_the_kill_does_not_come_back(ledger):
    emit = emit_to(ledger)
    task, id = make_task(0), TrajectoryId(0, 0)
    emit(ev.GroupOpened(0, task, 0, {"drawn": 1, "returned": []}))
    emit(ev.TrajectoryStarted(id, task.domain))
    emit(ev.TrajectoryEnded(make_trajectory(id, task), Fate.IN_FLIGHT))
    emit(ev.GroupEnded(0, False, "stale", {"drawn": 1, "returned": [0]}))
    restored = ledger.recover(0)  # before its member was settled
    assert (restored.groups, restored.source) == ((), {"drawn": 1, "returned": [0]})
    assert ledger.accounts.counts() | {"in_flight": 0, "cancelled": 1} == ledger.accounts.counts()


def test_a_checkpoint_that_is_gone_costs_trajectories_but_no_task(ledger):
    emit = emit_to(ledger)
    ids = [ready_group(emit, group) for group in range(6)]
    for step, group in enumerate(ids):
        emit(ev.Settled(group, Fate.TRAINED, "", step))
    emit(ev.CheckpointSaved(6, "checkpoints/000006", 0.1))
    restored = ledger.recover(0)
    assert [group.id for group in restored.groups] == [0, 1, 2, 3, 4, 5]
    assert ledger.accounts.counts()["trained"] == 0
    assert ledger.accounts.counts()["cancelled"] + ledger.accounts.counts()["in_flight"] == 12


def test_tokens_are_dropped_once_a_checkpoint_holds_their_step_but_for_a_sample(ledger, tmp_path):
    emit = emit_to(ledger)
    for step in range(20):
        emit(ev.Settled(ready_group(emit, step), Fate.TRAINED, "", step))
    assert rows(tmp_path, "SELECT count(*) FROM payloads") == [(40,)]
    emit(ev.CheckpointSaved(20, "checkpoints/000020", 0.1))
    ledger.flush()
    assert 4 <= rows(tmp_path, "SELECT count(*) FROM payloads")[0][0] <= 7
    emit(ev.Settled(ready_group(emit, 20), Fate.STALE, "too old"))
    ledger.flush()
    assert rows(tmp_path, "SELECT count(*) FROM payloads WHERE grp = 20") == [(0,)]


def test_running_episodes_are_cancelled_by_a_crash_and_their_group_goes_on_with_new_ids(ledger):
    emit = emit_to(ledger)
    emit(ev.GroupOpened(5, make_task(5), 3, {"drawn": 6}))
    for member in range(3):
        emit(ev.TrajectoryStarted(TrajectoryId(5, member), "guess"))
    emit(ev.TrajectoryEnded(make_trajectory(TrajectoryId(5, 1), make_task(5)), Fate.IN_FLIGHT))
    restored = ledger.recover(0)
    (left,) = restored.groups
    assert (left.started, [str(m.id) for m in left.finished], restored.next_group) == (3, ["g5.1"], 6)
    assert ledger.accounts.counts()["cancelled"] == 2
    assert restored.source == {"drawn": 6}


def test_check_tells_a_lost_and_a_doubled_trajectory(ledger):
    emit = emit_to(ledger)
    ids = ready_group(emit, 0)
    ledger.accounts.check(in_flight=2, dispatched=2)
    with pytest.raises(InvariantViolated, match=r"dispatched 3 .* the accounts say dispatched 2"):
        ledger.accounts.check(in_flight=3, dispatched=3)
    emit(ev.Settled(ids, Fate.TRAINED, "", 0))
    with pytest.raises(InvariantViolated, match=r"g0.0 was settled as stale"):
        emit(ev.Settled(ids, Fate.STALE))
    with pytest.raises(InvariantViolated, match="UNIQUE"):
        emit(ev.TrajectoryStarted(ids[0], "guess"))


def test_counts_of_a_reopened_ledger_are_those_before(tmp_path):
    ledger = Ledger(tmp_path / "run.db")
    world = World(4, emit_to(ledger))
    for _ in range(600):
        world.act()
    own = ledger.accounts
    before = (own.counts(), own.by_domain(), own.token_totals(), own.reasons)
    assert before[0]["trained"] > 10
    ledger.close()
    again = Ledger(tmp_path / "run.db").accounts
    assert (again.counts(), again.by_domain(), again.token_totals(), again.reasons) == before


def test_latencies_and_failures_by_domain_survive_a_reopening(tmp_path):
    ledger, ids = Ledger(tmp_path / "run.db"), [TrajectoryId(0, member) for member in range(100)]
    emit = emit_to(ledger)
    emit(ev.GroupOpened(0, make_task(2), 0, {}))
    for n, id in enumerate(ids):
        emit(ev.TrajectoryStarted(id, "guess"))
        emit(ev.EnvironmentOpened(id, 9.0 if n >= 97 else 0.5, 3 if n == 0 else 1))
        emit(ev.EnvironmentClosed(id, (0.01, 0.01)))
    emit(ev.EnvironmentOpened(TrajectoryId(0, 1, "e"), 77.0, 1))  # of an evaluation
    emit(ev.TrajectoryEnded(make_trajectory(ids[0], make_task(2), outcome=Outcome.FAILED,
                                            error="EnvironmentFailed: x"), Fate.FAILED))
    emit(ev.GroupEnded(0, False, "quarantined after 2 failed groups: x", {}))
    emit(ev.RunEnded(0, "interrupted"))
    ledger.close()
    Ledger(tmp_path / "run.db").close()
    with LedgerView(tmp_path / "run.db") as view:
        guess = view.environments()["guess"]
    assert (guess["opened"], guess["retries"], guess["calls"], guess["failed"]) == (100, 2, 200, 1)
    assert guess["quarantined"] == ["guess:2"]
    assert guess["open_p50_seconds"] == pytest.approx(0.5, rel=0.03)
    assert guess["open_p99_seconds"] == pytest.approx(9.0, rel=0.03)
    assert guess["step_p99_seconds"] == pytest.approx(0.01, rel=0.03)


def test_evaluations_keep_the_same_tasks_of_the_first_and_the_last(ledger, tmp_path):
    emit = emit_to(ledger)
    for number, wins in enumerate([3, 8, 18]):
        for event in evaluation(number, number * 10, {"guess": [i < wins for i in range(20)]}):
            emit(event)
    kept = rows(tmp_path, "SELECT version, count(*), min(task), max(task) FROM eval_trajectories "
                          "WHERE body IS NOT NULL GROUP BY 1")
    assert kept == [(0, 12, "guess:1000000", "guess:1000011"), (20, 12, "guess:1000000", "guess:1000011")]
    assert rows(tmp_path, "SELECT success FROM evaluations ORDER BY version") == [(0.15,), (0.4,), (0.9,)]
    for step in range(10):
        emit(ev.Settled(ready_group(emit, step), Fate.TRAINED, "", step))
    ledger.recover(10)
    assert rows(tmp_path, "SELECT max(version) FROM evaluations") == [(10,)]


def test_another_schema_and_a_foreign_file_are_refused(tmp_path):
    Ledger(tmp_path / "run.db").close()
    with sqlite3.connect(tmp_path / "run.db") as db:
        db.execute("UPDATE meta SET value = '99'")
    with pytest.raises(ConfigError, match="schema 99, this version of rollart needs 1"):
        Ledger(tmp_path / "run.db")
    (tmp_path / "no.db").write_text("this is not a database, " * 100)
    with pytest.raises(RunError, match="file is not a database"):
        Ledger(tmp_path / "no.db")


def test_a_ledger_behind_its_checkpoint_is_refused_and_left_as_it_is(ledger, tmp_path):
    emit = emit_to(ledger)
    for step in (0, 1, 3):
        emit(ev.Settled(ready_group(emit, step), Fate.FILTERED if step else Fate.TRAINED, "", step))
    before = rows(tmp_path, "SELECT * FROM trajectories")
    for version, there in ((3, 2), (4, 3), (9, 3)):
        with pytest.raises(ConfigError, match=f"run.db has {there} of the {version} steps"):
            ledger.recover(version)
    assert rows(tmp_path, "SELECT * FROM trajectories") == before
    assert [g.id for g in ledger.recover(2).groups] == [3]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_database_that_is_removed_or_replaced_under_the_run_is_told_at_the_next_commit(tmp_path, replaced):
    ledger = Ledger(tmp_path / "run.db")
    emit = emit_to(ledger)
    ready_group(emit, 0)
    for file in tmp_path.iterdir():
        file.unlink()
    if replaced:
        (tmp_path / "run.db").write_bytes(b"")
    with pytest.raises(RunError, match="was removed or replaced under the run"):
        ledger.flush()
    with pytest.raises(RunError, match="was removed or replaced under the run"):
        emit(ev.RunEnded(0, "finished"))
    ledger.close()
    assert [f.name for f in tmp_path.iterdir()] == (["run.db"] if replaced else [])


def test_what_sqlite_says_of_a_database_that_is_gone_does_not_hide_that_it_is_gone(tmp_path):
    ledger = Ledger(tmp_path / "run.db")
    (tmp_path / "run.db").unlink()
    ledger._db.execute("PRAGMA query_only = 1")  # SQLite's own refusal, of whatever kind
    with pytest.raises(RunError, match="was removed or replaced under the run"):
        emit_to(ledger)(ev.RunEnded(0, "finished"))
    ledger.close()


def test_a_closed_ledger_is_one_file_and_a_reader_adds_none(tmp_path):
    ledger = Ledger(tmp_path / "run.db")
    ready_group(emit_to(ledger), 0)
    ledger.close()
    with LedgerView(tmp_path / "run.db") as view:
        assert view.counts()["in_flight"] == 2
        assert [f.name for f in tmp_path.iterdir()] == ["run.db"]
    again = Ledger(tmp_path / "run.db")
    assert again.accounts.counts()["in_flight"] == 2
    again.close()


def test_a_full_disk_is_one_clear_line(ledger):
    pages = ledger._db.execute("PRAGMA page_count").fetchone()[0]
    ledger._db.execute(f"PRAGMA max_page_count = {pages}")
    emit = emit_to(ledger)
    with pytest.raises(RunError, match=r"run.db cannot be used \(database or disk is full\).*--resume"):
        [ready_group(emit, group) for group in range(100)]
    ledger._db.execute("PRAGMA max_page_count = 1000000")


def test_two_thousand_trajectories_a_second_and_no_event_blocks_for_long(ledger):
    emit = emit_to(ledger)
    took, worst = time.perf_counter(), 0.0
    for group in range(250):
        before = time.perf_counter()
        emit(ev.Settled(ready_group(emit, group, 8), Fate.TRAINED, "", group))
        worst = max(worst, time.perf_counter() - before)
    took = time.perf_counter() - took
    print(f"{2000 / took:.0f} trajectories/s, slowest group of 8: {worst * 1000:.1f} ms")
    assert 2000 / took > 600  # more than 3,000 on an idle core
