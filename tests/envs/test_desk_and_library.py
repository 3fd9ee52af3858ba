"""Service desk: the policy and what must be said. Search QA: passages, exact match and F1."""

import copy
from dataclasses import replace

import pytest
from recorded import recorded

from rollart.core.types import Action, Task
from rollart.envs.demonstrations import play_episode
from rollart.envs.domain import make_domain
from rollart.envs.search_qa import f1, normal
from rollart.envs.service_desk import settle

DATA = {
    "customers": {"c1": {"address": "1 Elm St"}, "c2": {"address": "2 Oak St"}},
    "products": {"p1": {"name": "hat", "price": 30, "stock": 1}, "p2": {"name": "mug", "price": 25, "stock": 4},
                 "p3": {"name": "tent", "price": 99, "stock": 0}},
    "orders": {"w1": {"customer": "c1", "status": "pending", "product": "p1", "days": 0, "paid": 30},
               "w2": {"customer": "c1", "status": "delivered", "product": "p1", "days": 30, "paid": 28},
               "w3": {"customer": "c1", "status": "delivered", "product": "p2", "days": 31, "paid": 25},
               "w4": {"customer": "c1", "status": "shipped", "product": "p2", "days": 0, "paid": 25},
               "w5": {"customer": "c2", "status": "pending", "product": "p2", "days": 0, "paid": 25}}}


def request(kind, order, product="p2", address="9 Lake St"):
    return {"kind": kind, "order": order, "product": product, "address": address}


@pytest.mark.parametrize(("requests", "calls", "said"), [
    ([request("cancel", "w1")], ["<cancel>w1</cancel>"], {"done"}),
    ([request("cancel", "w4")], [], {"no"}),
    ([request("cancel", "w5")], [], {"no"}),  # another customer's
    ([request("status", "w4")], [], {"done", "shipped"}),
    ([request("status", "w5")], [], {"no"}),
    ([request("address", "w1")], ["<address>w1 9 Lake St</address>"], {"done"}),
    ([request("address", "w2")], [], {"no"}),
    ([request("refund", "w2")], ["<refund>w2</refund>"], {"done", "28"}),  # 30 days
    ([request("refund", "w3")], [], {"no"}),  # 31 days
    ([request("exchange", "w2")], ["<exchange>w2 p2</exchange>"], {"done", "-3"}),
    ([request("exchange", "w2", "p3")], [], {"no"}),  # not in stock
    ([request("cancel", "w1"), request("refund", "w3")], ["<cancel>w1</cancel>"], {"done", "no"}),
])
def test_the_policy(requests, calls, said):
    assert settle(copy.deepcopy(DATA), "c1", requests) == (calls, said)


def desk(requests, actions):
    domain = make_domain("service_desk", {"max_turns": 9})
    payload = {"data": DATA, "customer": "c1", "requests": requests, "message": "please"}
    episode = domain.open(replace(domain.task(0, "train"), payload=payload))
    seen = [episode.step(Action(action)) for action in actions]
    assert payload["data"]["orders"]["w1"]["status"] == "pending"  # a task is not changed by its episode
    return seen


LOOK, DONE = "<order>w1</order>", "<reply>done</reply>"


@pytest.mark.parametrize(("actions", "success"), [
    ([LOOK, "<cancel>w1</cancel>", DONE], True),
    ([LOOK, '<cancel>{"order": "w1"}</cancel>', "<reply>It is done, dear c1.</reply>"], True),
    ([LOOK, "<customer>c1</customer>", "<cancel>w1</cancel>", DONE], True),
    (["<cancel>w1</cancel>", LOOK, DONE], False),  # it acted before it looked
    ([LOOK, DONE], False),  # it did nothing
    ([LOOK, "<cancel>w1</cancel>", "<reply>no</reply>"], False),
    ([LOOK, "<cancel>w1</cancel>", "<reply>done or no</reply>"], False),
    ([LOOK, "<cancel>w1</cancel>", "<reply>done 30</reply>"], False),  # a number that nobody asked for
    ([LOOK, "<cancel>w1</cancel>", "<cancel>w5</cancel>", DONE], False),  # and another's order
    ([LOOK, "<cancel>w1</cancel>", "<refund>w1</refund>", DONE], False),
    ([LOOK, "<cancel>w1</cancel>"], False),
])
def test_success_needs_the_state_the_words_and_the_policy(actions, success):
    assert desk([request("cancel", "w1")], actions)[-1].facts["success"] is success


def test_tools_answer_with_what_is_there_and_garbage_is_told():
    seen = desk([request("exchange", "w2")], [
        "<order>w2</order>", "<customer>c1</customer>", "<product>p3</product>", "<order>w9</order>",
        "<exchange>w2</exchange>", "<exchange>w2 p9</exchange>", "<order>w1</order><order>w2</order>",
        "<exchange>w2 p2</exchange>", "<order>w2</order>"])
    assert [o.messages[0].content for o in seen] == [
        "w2 c1 delivered 30d p1 hat $28", "c1 1 Elm St orders w1 hat, w2 hat, w3 mug, w4 mug",
        "p3 tent $99 stock 0", "?", "?", "?", "?", "ok",
        "w2 c1 exchanged 30d p2 mug $25"]
    assert seen[-1].facts["valid"] == 5


@pytest.mark.parametrize("difficulty", [0, 1, 2])
def test_most_requests_are_granted_and_refusing_all_is_no_way(difficulty):
    domain = make_domain("service_desk", {"difficulty": difficulty})
    refused = [settle(copy.deepcopy(p["data"]), p["customer"], p["requests"])[1] == {"no"}
               for p in (domain.task(i, "train").payload for i in range(400))]
    assert 0.05 < sum(refused) / 400 < 0.5


@pytest.mark.parametrize(("said", "wanted", "exact", "overlap"), [
    ("The  Eiffel-Tower!", "eiffel tower", False, 0.0), ("a Tower.", "the tower", True, 1.0),
    ("red blue", "blue green", False, 0.5), ("yes it is", "yes", False, 0.0), ("", "x", False, 0.0),
    ("to be to be", "to be", False, 2 / 3)])
def test_exact_match_and_f1_after_normalisation(said, wanted, exact, overlap):
    assert (normal(said) == normal(wanted)) is exact
    assert f1(normal(said), normal(wanted)) == pytest.approx(overlap)


def test_a_search_shows_the_best_passages_and_an_answer_ends():
    domain = make_domain("search_qa", {"passages": 2, "max_turns": 3})
    task = domain.task(0, "train")
    title = task.payload["titles"][0]
    episode = domain.open(task)
    found = episode.step(Action(f"I look it up. <search> {title} </search>")).messages[0].content
    assert found.startswith(f"<information>{title}: {title} ")
    assert found.endswith(".</information>")
    assert len(found.split("\n")) == 2
    assert episode.step(Action("<search> </search>")).messages[0].content == "?"
    last = episode.step(Action(f"<answer>the {task.payload['answer']}.</answer>"))
    assert last.done
    assert last.facts == {"success": True, "f1": 1.0, "valid": 2, "actions": 3}


def test_hotpotqa_loads_and_its_titles_lead_to_the_answers():
    domain = make_domain("search_qa", {"questions": recorded("qa/hotpot_100.json"), "passages": 3, "max_tokens": 128})
    tasks = [domain.task(i, "train") for i in range(40)]
    assert all(play_episode(domain, task, domain.player(task, 0, 0.0)).success for task in tasks)
    for task in tasks[:20]:
        episode = domain.open(task)
        title = task.payload["titles"][0]
        assert f"{title}: " in episode.step(Action(f"<search>{title}</search>")).messages[0].content


def test_hotpotqa_in_its_own_form_reads_the_same(tmp_path):
    (tmp_path / "own.json").write_text('[{"question": "Who?", "answer": "Ann", "supporting_facts": [["Bob", 0]],'
                                       ' "context": [["Bob", ["Bob knows ", "Ann."]]]}]')
    domain = make_domain("search_qa", {"questions": str(tmp_path / "own.json")})
    task = Task("search_qa/train/0", "search_qa", {**domain._library(1).problems[0], "difficulty": 1})
    assert domain.open(task).step(Action("<search>bob</search>")).messages[0].content == (
        "<information>Bob: Bob knows Ann.</information>")
    assert play_episode(domain, task, domain.player(task, 0, 0.0)).success
