"""WebShop: find, configure and buy what an instruction asks for. Much to read, few actions of a few words.

Keeps true: pages and actions are those of WebShop's text mode (arXiv 2207.01206), by its rules; an action that the page
does not offer is answered with `? ` and the page again; the episode ends at `click[buy now]`. It depends on its task
alone. With difficulty 0 pages are brief:

    user  wool hat red <40          assistant  search[wool hat]
    user  k3 wool hat $52           assistant  click[b7]
          b7 wool hat $31
    user  blue red / buy now        assistant  click[red]
    user  blue [red] / buy now      assistant  click[buy now]
"""

from __future__ import annotations

import random
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rollart.core.clock import stream
from rollart.core.ranges import at_least
from rollart.core.types import Action, Message, Observation, Task
from rollart.envs.catalogue import Product, Shop, goal, judge, shop
from rollart.envs.domain import CountedEpisode, Domain, DomainSettings, Episode, Player

_ACTION = re.compile(r"(search|click)\[(.+)\]", re.DOTALL)
_SUB_PAGES = ("description", "features", "reviews")


@dataclass(frozen=True, kw_only=True)
class WebShopSettings(DomainSettings):
    """products: a file of WebShop's products, one JSON object a line (empty: a made-up catalogue). goals: its
    file of instructions by product (empty: made from the products' attributes). difficulty: 0 brief pages of 3 hits;
    1 whole pages of 10 hits, at most one option to choose; 2 all options, two attributes.
    """

    products: str = ""
    goals: str = ""
    difficulty: Literal[0, 1, 2] = 1
    max_turns: int = 10
    max_tokens: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 24, "max_tokens")
        if self.goals and not self.products:
            raise ValueError("goals belong to a file of products: set products")


class WebShop(Domain):
    """Payload: the goal (see `catalogue.goal`)."""

    name = "webshop"
    reward = "webshop"
    rules = ("You shop by instruction. Answer with one action: search[words] on the search page, or click[x] on what "
             "the page offers: a product's id, an option, back to search, next >, < prev, description, features, "
             "reviews. End with click[buy now].")
    Settings = WebShopSettings

    def __init__(self, settings: Any = None) -> None:
        super().__init__(settings)
        for difficulty in range(self.settings.difficulty + 1):  # of its curriculum too, before workers are forked
            self._shop(difficulty)

    def _shop(self, difficulty: int) -> Shop:
        files = self.settings.products, self.settings.goals
        return shop(*files, 0 if self.settings.products else difficulty)

    def problem(self, rng: random.Random) -> dict[str, Any]:
        return goal(self._shop(self.settings.difficulty), rng, self.settings.difficulty)

    def open(self, task: Task) -> Episode:
        return _Visit(self, task, self._shop(task.payload["difficulty"]))

    def player(self, task: Task, seed: int, error_rate: float) -> Player:
        return _Buyer(self._shop(task.payload["difficulty"]), task, stream(seed, "player", task.id), error_rate)


class _Visit(CountedEpisode):
    """`_at`: search, results, item, or the sub page of the item."""

    def __init__(self, domain: Domain, task: Task, shop: Shop) -> None:
        super().__init__(domain, task)
        self._shop, self._goal = shop, task.payload
        self._brief = task.payload["difficulty"] == 0
        self._at, self._page, self._per_page = "search", 1, 3 if self._brief else 10
        self._hits: list[Product] = []
        self._item: Product | None = None
        self._chosen: dict[str, str] = {}

    def first(self) -> Observation:
        return Observation(self._domain.start(Message("user", self._text())))

    def step(self, action: Action) -> Observation:
        found = _ACTION.fullmatch(str(action.text).strip())
        verb, argument = (found[1], found[2].strip().lower()) if found else ("", "")
        bought = self._item if self._at == "item" and (verb, argument) == ("click", "buy now") else None
        valid = bought is not None or self._go(verb, argument)
        judged = judge(self._goal, bought, list(self._chosen.values())) if bought else {"reward": 0.0}
        text = "Thank you" if bought else self._text() if valid else f"? {self._text()}"
        return self._answer(Message("user", text), valid=valid, success=judged["reward"] >= 1, ended=bought is not None,
                            **judged)

    def _go(self, verb: str, argument: str) -> bool:
        """Do an action other than buying; False where the page does not offer it."""
        at, turn = self._at, {"next >": 1, "< prev": -1}.get(argument, 0)
        options = _by_value(self._item) if self._item else {}
        if not argument or verb != ("search" if at == "search" else "click"):
            return False
        if at == "search":
            self._hits, self._at, self._page = self._shop.search(argument), "results", 1
        elif argument == "back to search":
            self._at, self._item = "search", None
        elif at == "results" and turn and 1 <= self._page + turn <= self._pages:
            self._page += turn
        elif at == "results" and argument in [product.id for product in self._shown()]:
            self._item, self._at, self._chosen = self._shop.products[argument], "item", {}
        elif at == "item" and argument in options:
            self._chosen[options[argument]] = argument
        elif at == "item" and argument in _SUB_PAGES:
            self._at = argument
        elif at != "results" and argument == "< prev":
            self._at, self._item = ("results", None) if at == "item" else ("item", self._item)
        else:
            return False
        return True

    @property
    def _pages(self) -> int:
        return max(1, -(-len(self._hits) // self._per_page))

    def _shown(self) -> list[Product]:
        return self._hits[(self._page - 1) * self._per_page:self._page * self._per_page]

    def _text(self) -> str:
        """The page: its parts joined by [SEP]; where it is brief, what matters of them."""
        wish, item, brief = str(self._goal["instruction"]), self._item, self._brief
        if self._at == "search":
            return wish if brief else " [SEP] ".join(["WebShop", "Instruction:", wish, "Search"])
        parts = ["Instruction:", wish, "Back to Search"]
        if item is None:
            if brief:
                return "\n".join(f"{p.id} {p.title} {p.price_text}" for p in self._shown()) or "nothing"
            parts.append(f"Page {self._page} (Total results: {len(self._hits)})")
            parts += ["< Prev"] * (self._page > 1) + ["Next >"] * (self._page < self._pages)
            parts += [part for p in self._shown() for part in (p.id.upper(), p.title, p.price_text)]
        elif self._at == "item":
            if brief:
                chosen = self._chosen.values()
                return " ".join(f"[{v}]" if v in chosen else v for v in _by_value(item)) + "\nbuy now"
            parts += ["< Prev", *(part for name, values in item.options.items() for part in (name, *values))]
            parts += [item.title, f"Price: {item.price_text}", "Description", "Features", "Reviews", "Buy Now"]
        else:
            text = {"description": [item.description], "features": item.bullets, "reviews": ()}[self._at]
            parts = ["< Prev", *text] if brief else [*parts, "< Prev", *text]
        return " [SEP] ".join(parts)


def _by_value(product: Product) -> Mapping[str, str]:
    """The option's name by its value."""
    return {value: name for name, values in product.options.items() for value in values}


class _Buyer:
    """Searches the goal's title and buys the first product that earns all of the reward. Errs by a random click."""

    def __init__(self, shop: Shop, task: Task, rng: random.Random, error_rate: float) -> None:
        self._shop, self._goal, self._rng, self._error_rate = shop, task.payload, rng, error_rate
        title = re.sub("[^ -~]", " ", task.payload["title"].lower())
        self._query = textwrap.shorten(title, task.max_tokens - 10, placeholder="")
        self._left: list[str] = []  # options still to be chosen

    def act(self, observation: Observation) -> str:
        text = str(observation.messages[-1].content).removeprefix("? ").lower()
        parts = [part for part in re.split(r" \[sep\] |\n" if "[sep]" in text else r"\s", text) if part]
        err = self._rng.random() < self._error_rate
        shown = [self._shop.products[part] for part in parts if part in self._shop.products]
        if "buy now" in text:
            if err:
                return f"click[{self._rng.choice([p for p in parts if len(p) < 30]).strip('[]')}]"
            return f"click[{self._left.pop(0)}]" if self._left else "click[buy now]"
        if shown:
            fitting = shown if err else [product for product in shown if
                                         judge(self._goal, product, self._choices(product))["reward"] >= 1]
            if not fitting:
                return "click[next >]" if "next >" in text or len(shown) == 3 else "click[back to search]"
            item = self._rng.choice(fitting) if err else fitting[0]
            self._left = self._choices(item)
            return f"click[{item.id}]"
        word = self._rng.choice(self._goal["instruction"].split())[:30]
        return "click[< prev]" if "< prev" in text else f"search[{word if err else self._query}]"

    def _choices(self, product: Product) -> list[str]:
        """The goal's options that the product has."""
        return [value for value in self._goal["options"] if value in _by_value(product)]
