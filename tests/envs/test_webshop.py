"""WebShop: pages, actions and the reward by its rules, on made-up and on real products."""

import json
import math
import random
import re
from collections import Counter
from dataclasses import replace

import pytest
from recorded import recorded

from rollart.core.types import Action
from rollart.envs.catalogue import NO_BOUND, Product, judge, shop
from rollart.envs.demonstrations import play_episode
from rollart.envs.domain import make_domain
from rollart.envs.texts import Index, read_text, terms

LAMP = Product("l1", "Norda Desk Lamp, Bright", "desk lamps", "Home › Lighting › Lamps", 24.5, "$24.5",
               "Fits any desk.", ("Energy saving bulb inside",), ("easy install",),
               {"color": ("navy blue", "red"), "size": ("10 inch",)})
WISH = {"title": LAMP.title, "query": "desk lamps", "category": LAMP.category, "attributes": ["easy install"],
        "options": ["red"], "bound": 30.0}


@pytest.mark.parametrize(("wish", "product", "chosen", "reward"), [
    ({}, {}, ["red"], 1.0),
    ({}, {}, [], 2 / 3),  # an attribute and the price of three wishes
    ({}, {"price": 30.0}, ["red"], 1.0),
    ({}, {"price": 30.01}, ["red"], 2 / 3),
    ({"attributes": ["easy install", "energy saving", "fits any"]}, {}, ["red"], 1.0),  # a bullet, the description
    ({"attributes": ["install easy"]}, {}, ["red"], 1.0),  # the same set of words
    ({"attributes": ["easy to clean"]}, {}, ["red"], 2 / 3),
    ({"options": ["blue"]}, {}, ["navy blue"], 1.0),  # both are "blue" as colours
    ({"options": ["blue"]}, {}, ["red"], 2 / 3),
    ({"options": ["red", "10 inch"]}, {}, ["10 inch", "red"], 1.0),
    ({"options": ["red", "10 inch"]}, {}, ["red"], 3 / 4),
    ({"options": []}, {}, ["red"], 1.0),
    # the type: norda desk lamp bright, so one word of four is an overlap of 1/4, more than 0.2
    ({"query": "lights", "category": "Office › Desks"}, {"title": "Lamp"}, ["red"], 1.0),
    ({"query": "lights", "category": "Home › Desks"}, {"title": "Floor Lamp with Norda Shade"}, ["red"], 1.0),
    ({"title": "one two three lamp five six", "query": "lights", "category": "Home"}, {}, ["red"], 0.5),  # 1/6
    ({"title": "one two three lamp five six", "query": "lights", "category": "Home › Lamps"}, {}, ["red"], 1.0),
    ({"title": "one two three lamp five six"}, {}, ["red"], 1.0),  # the same query
    ({"title": "lamp " + " ".join(f"{c}abc" for c in "bcdefghijk")}, {}, ["red"], 0.1),  # 1/11, whatever the query
    ({"title": "steel pan"}, {}, ["red"], 0.0),  # nothing in common
    ({"title": "12 x 3", "query": "lights", "category": "Home"}, {}, ["red"], 0.5),  # no words: 0.2 is not above 0.2
])
def test_the_reward_is_that_of_the_rules(wish, product, chosen, reward):
    assert judge({**WISH, **wish}, replace(LAMP, **product), chosen)["reward"] == pytest.approx(reward)


def pages(domain, actions, task=None):
    episode = domain.open(task or domain.task(0, "train"))
    return [episode.first().messages[-1].content, *(episode.step(Action(a)).messages[-1].content for a in actions)]


def test_pages_and_actions_are_those_of_the_text_mode():
    domain = make_domain("webshop", {"max_turns": 30})
    task = domain.task(0, "train")
    wish = task.payload
    product = shop("", "", 1).products[wish["id"]]
    head = f"Instruction: [SEP] {wish['instruction']} [SEP] "
    results = ["search[norda " + product.query + "]"]
    start, found, second, first = pages(domain, [*results, "click[Next >]", "click[< prev]"], task)
    assert start == f"WebShop [SEP] {head}Search"
    assert found.startswith(f"{head}Back to Search [SEP] Page 1 (Total results: 50) [SEP] Next > [SEP] B")
    assert found.count("$") == 10
    assert "Page 2 (Total results: 50) [SEP] < Prev [SEP] Next >" in second
    assert first == found
    by_title = [f"search[{product.title}]", f"click[{product.id}]"]
    item, features, back = pages(domain, [*by_title, "click[features]", "click[< prev]"], task)[2:]
    assert item.startswith(f"{head}Back to Search [SEP] < Prev [SEP] color [SEP] ")
    assert item.endswith(f"{product.title} [SEP] Price: {product.price_text} [SEP] Description [SEP] Features [SEP] "
                         "Reviews [SEP] Buy Now")
    assert features == f"{head}Back to Search [SEP] < Prev [SEP] " + " [SEP] ".join(product.bullets)
    assert back == item


@pytest.mark.parametrize("action", ["click[buy now]", "click[b7]", "search[]", "click[< prev]", "buy now",
                                    "search[lamp"])
def test_what_the_page_does_not_offer_changes_nothing(action):
    domain = make_domain("webshop")
    start, again = pages(domain, [action])
    assert again == f"? {start}"
    _, found, same = pages(domain, ["search[lamp]", "search[desk]"])
    assert same == f"? {found}"
    assert pages(domain, ["search[zzz]"])[1].endswith("Page 1 (Total results: 0)")


def test_options_are_chosen_one_a_name_and_forgotten_with_the_product():
    domain = make_domain("webshop", {"difficulty": 0, "max_turns": 20})
    task = domain.task(0, "train")
    id = task.payload["id"]
    one, other = shop("", "", 0).products[id].options["color"]
    seen = pages(domain, [f"search[{task.payload['title']}]", f"click[{id}]", f"click[{one}]", f"click[{other}]",
                          "click[< prev]", f"click[{id}]"], task)
    assert seen[3:5] == [f"[{one}] {other}\nbuy now", f"{one} [{other}]\nbuy now"]
    assert seen[5:] == [seen[1], f"{one} {other}\nbuy now"]


@pytest.mark.parametrize("difficulty", [0, 1, 2])
def test_the_bound_is_the_larger_of_two_of_the_next_four_tens(difficulty):
    domain = make_domain("webshop", {"difficulty": difficulty})
    above = Counter()
    for i in range(300):
        wish = domain.task(i, "train").payload
        price = shop("", "", difficulty).products[wish["id"]].price
        tens = [10.0 * n for n in range(1, 100) if 10.0 * n > price][:4]
        above[tens.index(wish["bound"]) if wish["bound"] != NO_BOUND else None] += 1
    assert set(above) == {1, 2, 3}  # never the first: it is the larger of two
    assert above[3] > above[2] > above[1]


def bm25(documents, query, k1=0.9, b=0.4):
    """Lucene's formula, written out."""
    counts = [Counter(terms(document)) for document in documents]
    mean = sum(c.total() for c in counts) / len(counts)
    scores = [0.0] * len(documents)
    for term in terms(query):
        having = sum(term in c for c in counts)
        idf = math.log(1 + (len(documents) - having + 0.5) / (having + 0.5))
        for i, c in enumerate(counts):
            scores[i] += idf * c[term] / (c[term] + k1 * (1 - b + b * c.total() / mean)) if c[term] else 0.0
    return scores


def test_a_query_of_unknown_or_no_words_has_no_hits_and_equal_documents_keep_their_order():
    index = Index(["red lamp", "blue hats", "the red lamp", ""])
    assert index.search("zebra", 5) == index.search("the", 5) == index.search("", 5) == []
    assert index.search("a red lamps", 5) == [0, 2]
    assert index.search("hat", 5) == [1]


def test_on_real_products_the_ten_best_are_those_of_the_formula():
    lines = [json.loads(line) for line in read_text(recorded("webshop/products_1000.jsonl")).splitlines()]
    made = shop(recorded("webshop/products_1000.jsonl"), "", 2)
    assert [p.document for p in made.products.values()] == [line["contents"] for line in lines]  # as the data has it
    for line in lines[::60]:
        scores = bm25([entry["contents"] for entry in lines], query := " ".join(line["product"]["Title"].split()[:5]))
        best = sorted((s for s in scores if s > 0), reverse=True)[:10]
        order = {line["id"].lower(): score for line, score in zip(lines, scores, strict=True)}
        assert [order[p.id] for p in made.search(query)[:10]] == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize(("id", "chosen", "reward"), [
    ("b09r4rjsfp", ["120ml"], 1.0), ("b09r4rjsfp", ["60ml"], 2 / 3), ("b09r4rjsfp", [], 2 / 3),
    ("b08g14b779", ["pink"], 0.1 / 3),  # one noun of 22 in common: 0.1; only the price fits
    ("b07fypsnh8", [], 0.0)])  # a drink
def test_rewards_on_real_products_worked_out_by_hand(id, chosen, reward):
    products = shop(recorded("webshop/products_1000.jsonl"), "", 2).products
    mask = products["b09r4rjsfp"]
    wish = {"title": mask.title, "query": mask.query, "category": mask.category, "attributes": ["hair treatment"],
            "options": ["120ml"], "bound": 120.0}
    assert judge(wish, products[id], chosen)["reward"] == pytest.approx(reward)


@pytest.mark.slow
def test_1000_random_sessions_on_real_products_end_without_an_exception():
    domain = make_domain("webshop", {"difficulty": 2, "products": recorded("webshop/products_1000.jsonl"),
                                     "goals": recorded("webshop/instructions_1000.json")})
    ends, rng = Counter(), random.Random(0)

    class Stroller:
        def act(self, observation):
            parts = re.split(r" \[SEP\] ", observation.messages[-1].content)
            word = rng.choice(" ".join(parts).split())
            return rng.choice([f"click[{rng.choice(parts)}]", f"search[{word}]", "click[buy now]", word, "click[[]]"])

    for i in range(1000):
        task = domain.task(i, "eval" if i % 5 == 0 else "train")
        played = play_episode(domain, task, Stroller() if i % 2 else domain.random_player(task, i))
        ends["bought" if not played.observations[-1].truncated else "out of turns"] += 1
        assert 0 <= played.observations[-1].reward <= 1
    assert ends["bought"] > 100
    assert ends["out of turns"] > 100
