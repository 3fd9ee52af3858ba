"""Recorded traces and episodes as workloads; a wrong line is refused by its number."""

import json
import time

import pytest

from rollart.core.errors import ConfigError
from rollart.core.types import TrajectoryId
from rollart.sim.records import read_records
from rollart.sim.workload import Load, Record, Spread

CSV = ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
       "2023-11-16 18:17:04.0319600,3180,8\n")


def lines(*values):
    return "".join(json.dumps(value) + "\n" for value in values)


def request(time, tokens, says, blocks):
    return {"timestamp": time, "input_length": tokens, "output_length": says, "hash_ids": blocks}


@pytest.fixture
def file(tmp_path):
    def write(text):
        (tmp_path / "records").write_text(text)
        return tmp_path / "records"
    return write


def test_a_request_trace_is_one_turn_episodes(file):
    assert read_records(file(CSV)).records == (Record(4808, (10,)), Record(3180, (8,)))


def test_requests_that_go_on_from_an_earlier_one_are_one_conversation(file):
    found = read_records(file(lines(
        request(0, 1100, 50, [1, 2, 3]), request(1000, 700, 5, [9, 8]), request(4000, 1300, 60, [1, 2, 4]),
        request(9000, 1700, 7, [1, 2, 4, 5]))))
    assert found.records == (Record(1100, (50, 60, 7), (150, 340)), Record(700, (5,)))
    assert found.gaps == (4.0, 5.0)


def test_episodes_with_turns_of_characters(file):
    chat = {"turns": [["system", 400], ["user", 40], ["assistant", 80], ["tool", 200], ["user", 40], ["assistant", 8]]}
    assert read_records(file(lines(chat))).records == (Record(110, (20, 2), (60,)),)
    sql = {"query_chars": 100, "action_chars": [8, 40], "observation_chars": [400, 12]}
    assert read_records(file(lines(sql))).records == (Record(25, (2, 10), (100,)),)


@pytest.mark.parametrize(("text", "message"), [
    (CSV + "2023-11-16 18:17:05,12\n", r"line 4: needs the three fields .*; got 2"),
    (CSV + "2023-11-16 18:17:05,-5,3\n", r"line 4: ContextTokens must be a whole number of at least 1; got -5"),
    (CSV + "2023-11-16 18:17:05,5,x\n", r"line 4: GeneratedTokens must be a whole number of at least 1; got 'x'"),
    (CSV + "2023-11-16 18:17:04,5,3\n", r"line 4: time goes backwards"),
    (CSV + "yesterday,5,3\n", r"line 4: TIMESTAMP must be seconds or a time like .*; got 'yesterday'"),
    ("a,b\n1,2\n", r"line 1: a trace begins with TIMESTAMP"),
    ("", r"is empty"),
    (CSV.splitlines()[0] + "\n", r"has no request below its heading"),
    (lines({"turns": [["robot", 1]]}), r"line 1: .* a role of system, user, assistant, tool; got"),
    (lines(request(5, 9, 1, [1]), request(4, 9, 1, [1])), r"line 2: time goes backwards, from 0.005 s to 0.004 s"),
    (lines(request(5, 9, 1, [1])) + "{", r"line 2: not JSON"),
    (lines(request(5, 9, 1, [1]), {"timestamp": 6}), r"line 2: the key 'input_length' is missing"),
    (lines({"turns": [["user", 1], ["assistant", -3]]}), r"line 1: characters must be .* at least 0; got -3"),
    (lines({"query_chars": 1, "action_chars": [1], "observation_chars": []}), r"line 1: 1 actions need as many"),
    (CSV + "nan,5,3\n", r"line 4: TIMESTAMP must be seconds"),
    (CSV + "{}\n", r"line 4: needs comma-separated fields as the first one has; got '{}'"),
    (lines(request(5, 9, 1, [1])) + "1,2,3", r"line 2: needs a JSON object as the first one has; got '1,2,3'"),
    (lines({"turns": 5}), r"line 1: turns must be a list of \[role, characters\]; got 5"),
    (lines({"a": 1}), r"line 1: none of the keys hash_ids, action_chars, turns; got a"),
])
def test_a_wrong_line_is_refused_by_its_number(file, text, message):
    with pytest.raises(ConfigError, match=message):
        read_records(file(text))


@pytest.mark.skipif(not hasattr(time, "tzset"), reason="no time zones to set")
def test_a_time_without_a_zone_is_the_same_on_every_machine(file, monkeypatch):
    times = ["2023-03-26 01:50:00", "2023-03-26 02:30:00", "2023-03-26 03:05:00"]  # a clock is set forward in between
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        read_records(file("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{t},5,3\n" for t in times)))
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_records(tmp_path / "none")


def test_episodes_follow_the_records():
    load = Load(records=(Record(10, (5, 6, 7), (1, 2)), Record(20, (9,))))
    plans = [load.episode(0, number, "task") for number in range(50)]
    assert {(p.turns, p.prompt, tuple(p.observations)) for p in plans} == {(3, 10, (1, 2)), (1, 20, ())}
    said = {turn: {load.says(0, TrajectoryId(0, member), turn) for member in range(50)} for turn in range(4)}
    assert said == {0: {5, 9}, 1: {6}, 2: {7}, 3: {7}}, "a turn is as long as one of those at its place"


def test_a_spread_has_the_mean_and_deviation_that_it_names():
    for spread in (Spread(mean=10, sigma=4), Spread(mean=10, sigma=2, shape="normal")):
        values = [spread.draw(1, "x", i) for i in range(4000)]
        mean = sum(values) / len(values)
        deviation = (sum((v - mean) ** 2 for v in values) / len(values)) ** 0.5
        assert (mean, deviation) == (pytest.approx(10, rel=0.03), pytest.approx(spread.sigma, rel=0.08))
        assert values == [spread.draw(1, "x", i) for i in range(4000)]
    assert {Spread(mean=5, sigma=9, low=4, high=6).draw(0, i) for i in range(50)} >= {4, 6}
    tail = [Spread(mean=1, tail_probability=0.1, tail=50).draw(0, i) for i in range(2000)]
    assert sum(v > 1 for v in tail) == pytest.approx(200, rel=0.2)


def test_what_members_have_in_common():
    spread = Spread(mean=10, sigma=8)
    alike = [spread.draw(0, "own", i, common=("group",), alike=1.0) for i in range(5)]
    assert len(set(alike)) == 1
    assert len({spread.draw(0, "own", i, common=("group",), alike=0.5) for i in range(5)}) == 5


def test_settings_out_of_range_are_refused():
    with pytest.raises(ValueError, match="mean, sigma >= 0"):
        Spread(mean=-1)
    with pytest.raises(ValueError, match="alike and success"):
        Load(alike=2)
