"""Simulation as a product: one run summed up, swarms, the paper's tables, plans."""

import io
import itertools
import json

import pytest
from rich.console import Console

from rollart.config.simulation import simulation_from
from rollart.core.errors import ConfigError
from rollart.observe.trace import Trace
from rollart.sim.costs import parse_cluster
from rollart.studies import experiments, reproduce, swarms
from rollart.studies.experiments import TABLES, Outcome, Row, Table
from rollart.studies.parallel import key, run_key
from rollart.studies.plan import Placement, make_plan, show_plan
from rollart.studies.simulation import run_world

SMALL = {"train": {"gpu": "H800", "gpus": 8}, "pools": {"a": {"gpu": "H800", "gpus": 2}},
         "rollout": {"batch_groups": 2, "group_size": 4}, "pipeline": {"steps": 3}, "domains": {"game": {}}}


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=160)


def printed(console):
    return console.file.getvalue()


def test_a_run_is_summed_up_like_a_real_one_with_its_cost():
    trace = Trace()
    summary = run_world(simulation_from(SMALL).world(), 0, trace)
    assert summary["steps"] == 3
    assert summary["ledger"]["dispatched"] == sum(n for name, n in summary["ledger"].items() if name != "dispatched")
    assert summary["ledger"]["trained"] == 3 * 8 == summary["domains"]["game"]["trained"]
    hours = summary["wall_seconds"] / 3600
    assert summary["gpu_hours"] == {"a": pytest.approx(2 * hours), "train": pytest.approx(8 * hours)}
    assert summary["cost"] == pytest.approx(2.85 * 10 * hours)
    assert 0 < summary["utilisation"]["a"] <= 1
    assert run_world(simulation_from(SMALL).world(), 0)["digest"] == summary["digest"] != run_world(
        simulation_from(SMALL).world(), 1)["digest"]


def test_the_timeline_has_steps_weights_and_trajectories_in_lanes(tmp_path):
    trace = Trace(limit=5)
    run_world(simulation_from(SMALL).world(), 0, trace)
    trace.write(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    names = {e["name"].split()[0] for e in slices}
    assert {"step", "waits", "publish", "load", "open", "game"} <= names
    mine = sorted((e["tid"], e["ts"], e["dur"]) for e in slices if e["name"].startswith("game"))
    assert len(mine) == 5
    for (lane, start, size), (other, later, _) in itertools.pairwise(mine):
        assert lane != other or start + size <= later, "slices of one lane do not overlap"


def test_a_swarm_that_finds_something_says_how_to_replay_it(console, monkeypatch):
    assert swarms.run_swarm(range(30), 1, console)
    assert "30 seeds in" in printed(console)
    found = {7: "InvariantViolated: I1: 3 versions old", 9: "InvariantViolated: I1: 4 versions old"}
    monkeypatch.setattr(swarms, "map_all", lambda f, calls, *_: [[found.get(s, swarms.attempt(s)) for s in c[0]]
                                                                 for c in calls])
    assert not swarms.run_swarm(range(5, 10), 1, console)
    assert "FAILED 2 seeds: 7, 9; the first: InvariantViolated: I1: 3 versions old" in printed(console)
    assert "replay: rollart simulate swarm --seed 7" in printed(console)


def test_each_table_asks_for_recipes_that_can_run():
    wanted = {key for table in TABLES.values() for key in reproduce._ask([table])}
    assert len(wanted) > 80
    for text in wanted:
        simulation_from(json.loads(text)).world()


def test_a_row_is_within_the_papers_range_or_fifteen_percent_of_it():
    assert [Row("", (1.0, 2.0), ours).within for ours in (0.84, 0.86, 1.5, 2.29, 2.31)] == [False, True, True, True,
                                                                                          False]


def test_reproducing_prints_ours_beside_the_papers_and_writes_the_page(console, monkeypatch, tmp_path):
    def rows(get):
        slow, fast = ({**SMALL, "schedule": {"name": name}} for name in ("sync", "rollart"))
        return [Row("fast", (1.0, 9.0), get(slow).step / get(fast).step), Row("far", (9.0, 9.0), get(slow).step / 1e6),
                Row("known", (2.0, 2.0), 2.0, fitted=True)]

    monkeypatch.setitem(TABLES, "two", Table("two", "Two systems", rows, note="Why."))
    (tmp_path / "sensitivity.md").write_text("an earlier one")
    result = reproduce.reproduce_tables(["two"], console=console, processes=1, folder=tmp_path)
    assert result["two"]["paper"] == [[1.0, 9.0], [9.0, 9.0], [2.0, 2.0]]
    assert 1 < result["two"]["ours"][0] < 9
    assert result["two"]["within"] is False
    assert "1 of 2 predicted numbers (50%)" in printed(console)
    page = (tmp_path / "reproduction.md").read_text()
    assert "| far | 9 |" in page
    assert "differs" in page
    assert "| `push_bytes_per_s` |" in page
    assert "](sensitivity.md)" in page
    assert (tmp_path / "sensitivity.md").read_text() == "an earlier one"
    assert "<svg" in (tmp_path / "reproduction" / "two.svg").read_text()
    with pytest.raises(ConfigError, match=r"no table tow.*two"):
        reproduce.reproduce_tables(["tow"], console=console)


def test_staleness_is_charged_for_in_the_time_to_a_score():
    steps = {"sync_plus": 2.0, "one_off": 1.5, "areal": 1.0, "rollart": 1.0}

    def get(tables):
        name = tables["schedule"]["name"]
        return Outcome(step=steps[name], busy={}, staleness=10.0 if name == "areal" else 0.0)

    rows = experiments._end_to_end(get)
    assert [row.ours for row in rows] == [2.0, 1.5, pytest.approx(1.0 + 10 * experiments.STALE_COST)]


MIX = {"model": {"name": "Qwen3-8B"}, "rollout": {"batch_groups": 8, "group_size": 4, "context_tokens": 32768},
       "domains": {"frozen_lake": {"turns": 20}, "game": {}}}


def test_a_plan_places_domains_where_they_are_fast_and_says_why(console):
    plan = make_plan(MIX, parse_cluster("16xH800,8xH20"), goal="time", budget=None, processes=1, console=console)
    assert plan.preferences["frozen_lake"]["H800"] < plan.preferences["frozen_lake"]["H20"]
    assert plan.preferences["game"]["H20"] < plan.preferences["game"]["H800"]
    assert [s.effective for s in plan.best] == sorted(s.effective for s in plan.best)
    best = plan.best[0].placement
    assert best.train_gpus + sum(n for n, _ in best.pools.values()) <= 24
    assert any("frozen_lake" in reason and "H800" in reason for reason in plan.reasons)
    show_plan(plan, console)
    assert "placements by time" in printed(console)
    assert plan.to_json()["placements"][0]["seconds_per_step"] == plan.best[0].step
    again = simulation_from(best.tables(MIX)).world()
    assert sum(pool.engines for pool in again.pools.values()) > 0


def test_one_kind_of_gpu_has_no_affinity(console):
    plan = make_plan(MIX, parse_cluster("16xH800"), goal="cost", budget=None, processes=1, console=console)
    assert "affinity brings nothing: all engines run on H800" in plan.reasons
    assert not plan.best[0].placement.bound
    assert [s.cost for s in plan.best] == sorted(s.cost for s in plan.best)


def test_a_plan_keeps_to_the_budget_and_refuses_what_cannot_be(console):
    def attempt(model, cluster, budget):
        return make_plan({**MIX, "model": {"name": model}}, parse_cluster(cluster), goal="time", budget=budget,
                         processes=1, console=console)

    assert all(s.placement.price <= 30 for s in attempt("Qwen3-8B", "16xH800", 30.0).best)
    with pytest.raises(ConfigError, match=r"no placement .* within 3 H20-hours an hour.*larger --budget"):
        attempt("Qwen3-8B", "16xH800", 3.0)
    with pytest.raises(ConfigError, match=r"Qwen3-235B-A22B fits no engine of 4xL40S"):
        attempt("Qwen3-235B-A22B", "4xL40S", None)
    with pytest.raises(ConfigError, match=r"no placement of Qwen3-32B on 4xH800"):
        attempt("Qwen3-32B", "4xH800", None)


def test_a_placement_at_a_part_of_its_size_keeps_its_proportions():
    placement = Placement(train="H800", train_gpus=32, pools={"H800": (64, 1), "H20": (32, 1)}, bound={"game": "H20"})
    whole, part = placement.tables(MIX), placement.tables(MIX, 4)
    assert part["train"]["gpus"] * 4 == whole["train"]["gpus"]
    assert part["pools"]["h20"]["gpus"] * 4 == whole["pools"]["h20"]["gpus"]
    assert part["rollout"]["batch_groups"] * 4 == whole["rollout"]["batch_groups"]
    assert placement.price == pytest.approx(96 * 2.85 + 32)
    assert run_key(key(SMALL), 0).steps == 3
