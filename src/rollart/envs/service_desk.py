"""Service desk: do what a customer asks for with tools on a database, as far as the written policy allows.

Keeps true: the tools do what they are told, also what the policy forbids; solved means that in the end the database is
as the policy wants it, every order of the request was looked up before anything was done to it, and the reply says the
required verdicts and amounts and no others. The request stands in the first message. With difficulty 0:

    user  c2: refund w7                   assistant  <order>w7</order>
    tool  w7 c2 delivered 12d p3 hat $40  assistant  <refund>w7</refund>
    tool  ok                              assistant  <reply>done 40</reply>
"""

from __future__ import annotations

import copy
import random
import re
from dataclasses import dataclass
from typing import Any, Literal

from rollart.core.clock import stream
from rollart.core.types import Action, Message, Observation, Task
from rollart.envs.domain import CountedEpisode, Domain, DomainSettings, Episode, Player
from rollart.envs.tool_calls import parse

_TOOLS = {"order": 1, "customer": 1, "product": 1, "cancel": 1, "refund": 1, "exchange": 2, "address": 2, "reply": 1}
"""Tools by the number of their arguments; the last one takes the rest of the text."""
_GOODS = ["hat", "mug", "lamp", "tent", "boot", "pan", "scarf", "clock"]
_LAST_DAY = 30  # for a refund or an exchange, after delivery
_SENTENCES = {"status": "What is the status of {order}?", "cancel": "Please cancel {order}.",
              "refund": "I want my money back for {order}.", "exchange": "I want {product} in exchange for {order}.",
              "address": "Send {order} to {address} instead."}
_VERDICTS = re.compile(r"\b(?:done|no|pending|shipped|delivered)\b|(?<!\w)-?\d+\b")
"""The words of a reply that count."""

Data = dict[str, dict[str, dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class ServiceDeskSettings(DomainSettings):
    """difficulty: 0 one request of few words, to cancel or refund; 1 one request of any kind in a sentence;
    2 two requests, and the customer names no order but what was bought."""

    difficulty: Literal[0, 1, 2] = 1
    max_turns: int = 8
    max_tokens: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_turns < (needed := (3, 3, 6)[self.difficulty]):
            raise ValueError(f"difficulty {self.difficulty} takes {needed} turns; got max_turns {self.max_turns}")


class ServiceDesk(Domain):
    """Payload: `data` (customers, orders, products), `customer`, `requests` and the customer's `message`."""

    name = "service_desk"
    reward = "service_desk"
    rules = (
        "You serve one customer of a shop. Call one tool a turn, as <tool>arguments</tool>: order W1, customer C1, "
        "product P1 (look up); cancel W1, refund W1, exchange W1 P2, address W1 NEW ADDRESS (act); reply TEXT (ends). "
        "Policy: Look an order up before you answer or act. Serve orders of this customer only. Cancel and re-address "
        f"only what is pending. Refund and exchange only what was delivered at most {_LAST_DAY} days ago; exchange "
        "only for a product that is in stock. Refuse all else and change nothing for it. Reply with done or no for "
        "each request, with the amount that you refund, the difference in price (new less old) of an exchange, or the "
        "status that was asked for; no other numbers.")
    Settings = ServiceDeskSettings

    def problem(self, rng: random.Random) -> dict[str, Any]:
        difficulty = self.settings.difficulty
        data = _database(rng, (1, 3, 6)[difficulty])
        customer, requests, said = rng.choice(sorted(data["customers"])), [], []
        for id in rng.sample(sorted(data["orders"]), 2 if difficulty > 1 else 1):
            kind, order = rng.choice(("cancel", "refund") if difficulty == 0 else list(_SENTENCES)), data["orders"][id]
            if difficulty > 1 or rng.random() < 0.85:
                order["customer"] = customer
            if rng.random() < 0.6:
                pending = kind in ("cancel", "address")
                order.update(status="pending" if pending else "delivered", days=0 if pending else rng.randint(1, 30))
            product = rng.choice(sorted(data["products"]))
            request = {"kind": kind, "order": id, "product": product, "address": _place(rng)}
            named = f"the {data['products'][order['product']]['name']}" if difficulty > 1 else f"my order {id}"
            said.append(_SENTENCES[kind].format(**{**request, "order": named}))
            requests.append(request)
        message = f"{customer}: {kind} {id}" if difficulty == 0 else f"I am {customer}. {' '.join(said)}"
        return {"data": data, "customer": customer, "requests": requests, "message": message}

    def open(self, task: Task) -> Episode:
        return _Call(self, task)

    def player(self, task: Task, seed: int, error_rate: float) -> Player:
        return _Clerk(task, stream(seed, "player", task.id), error_rate)


def _place(rng: random.Random) -> str:
    return f"{rng.randint(1, 99)} {rng.choice(['Elm', 'Oak', 'Mill', 'Lake', 'Hill', 'Park'])} St"


def _database(rng: random.Random, count: int) -> Data:
    """So many orders, one product more, and two or three customers."""
    ids = {letter: [f"{letter}{n}" for n in rng.sample(range(1, 100), count + 1)] for letter in "cwp"}
    products = {id: {"name": name, "price": rng.randint(5, 99), "stock": rng.choice((0, 1, 4))}
                for id, name in zip(ids["p"], rng.sample(_GOODS, count + 1), strict=True)}
    orders = {}
    for id, product in zip(ids["w"][:count], ids["p"], strict=False):
        status = rng.choice(("pending", "shipped", "delivered", "delivered"))
        orders[id] = {"customer": rng.choice(ids["c"][:3]), "status": status, "product": product,
                      "days": rng.randint(1, 60) if status == "delivered" else 0, "paid": products[product]["price"]}
    return {"customers": {id: {"address": _place(rng)} for id in ids["c"][:3]}, "orders": orders, "products": products}


def settle(data: Data, customer: str, requests: list[dict[str, Any]]) -> tuple[list[str], set[str]]:
    """What the policy wants done for the requests, as tool calls, and what must be said. Changes `data` so."""
    calls, said = [], set()
    for request in requests:
        order, product, kind = data["orders"][request["order"]], data["products"][request["product"]], request["kind"]
        fresh = order["status"] == "delivered" and order["days"] <= _LAST_DAY
        allowed = order["customer"] == customer and {
            "status": True, "cancel": order["status"] == "pending", "address": order["status"] == "pending",
            "refund": fresh, "exchange": fresh and product["stock"] > 0}[kind]
        said.add("done" if allowed else "no")
        amounts = {"status": order["status"], "refund": order["paid"], "exchange": product["price"] - order["paid"]}
        if allowed and kind in amounts:
            said.add(str(amounts[kind]))
        if allowed and kind != "status":
            names = {"exchange": ["order", "product"], "address": ["order", "address"]}.get(kind, ["order"])
            arguments = [request[name] for name in names]
            calls.append(f"<{kind}>{' '.join(arguments)}</{kind}>")
            use(data, kind, arguments)
    return calls, said


def use(data: Data, tool: str, arguments: list[str]) -> str:
    """Use a tool on the data; the answer, `?` where there is no such thing."""
    id, extra = arguments[0], arguments[-1]
    found = data[{"customer": "customers", "product": "products"}.get(tool, "orders")].get(id)
    if found is None or (tool == "exchange" and extra not in data["products"]):
        return "?"
    if tool == "customer":
        own = [f"{order} {data['products'][entry['product']]['name']}" for order, entry in data["orders"].items()
               if entry["customer"] == id]
        return f"{id} {found['address']} orders {', '.join(own) or 'none'}"
    if tool == "product":
        return f"{id} {found['name']} ${found['price']} stock {found['stock']}"
    if tool == "order":
        days = f" {found['days']}d" if found["days"] else ""
        name = data["products"][found["product"]]["name"]
        return f"{id} {found['customer']} {found['status']}{days} {found['product']} {name} ${found['paid']}"
    if tool == "exchange":
        data["products"][extra]["stock"] -= 1
        found.update(product=extra, paid=data["products"][extra]["price"])
    found.update({"address": extra} if tool == "address" else {
        "status": {"cancel": "cancelled", "refund": "refunded", "exchange": "exchanged"}[tool]})
    return "ok"


class _Call(CountedEpisode):
    def __init__(self, domain: Domain, task: Task) -> None:
        super().__init__(domain, task)
        plain = copy.deepcopy(dict(task.payload))
        self._data: Data = plain["data"]
        self._wanted: Data = copy.deepcopy(self._data)
        self._say = settle(self._wanted, plain["customer"], plain["requests"])[1]
        self._unread = {request["order"] for request in plain["requests"]}
        self._broken = False

    def first(self) -> Observation:
        return Observation(self._domain.start(Message("user", str(self._task.payload["message"]))))

    def step(self, action: Action) -> Observation:
        tool, arguments = _read(str(action.text))
        ended, answer = tool == "reply", "?"
        if tool == "order":
            self._unread.discard(arguments[0])
        elif tool not in ("customer", "product", "reply", ""):
            self._broken |= arguments[0] in self._unread
        if tool and not ended:
            answer = use(self._data, tool, arguments)
        success = (ended and not self._broken and not self._unread and self._data == self._wanted
                   and set(_VERDICTS.findall(arguments[0].lower())) == self._say)
        return self._answer(*([] if ended else [Message("tool", answer)]), valid=ended or answer != "?",
                            success=success, ended=ended)


def _read(text: str) -> tuple[str, list[str]]:
    """Tool and arguments of an action: `<cancel>w7</cancel>`, or as JSON in order; ("", []) where it is no call."""
    calls = parse(text, "tags")
    count = _TOOLS.get(calls[0].name, 0) if len(calls) == 1 else 0
    given = [str(value).strip() for value in calls[0].arguments.values()] if count else []
    given = given[0].split(None, count - 1) if len(given) == 1 else given
    return (calls[0].name, given) if count and len(given) == count else ("", [])


class _Clerk:
    """Looks up, acts, replies. Errs by another tool or a short reply."""

    def __init__(self, task: Task, rng: random.Random, error_rate: float) -> None:
        self._rng, self._error_rate, plain = rng, error_rate, copy.deepcopy(dict(task.payload))
        orders = [request["order"] for request in plain["requests"]]
        calls, said = settle(plain["data"], plain["customer"], plain["requests"])
        looks = [f"<order>{order}</order>" for order in orders]
        if not all(order in plain["message"] for order in orders):
            looks.insert(0, f"<customer>{plain['customer']}</customer>")
        self._plan = [*looks, *calls, f"<reply>{' '.join(sorted(said, reverse=True))}</reply>"]
        self._orders = orders

    def act(self, observation: Observation) -> str:
        if self._rng.random() >= self._error_rate:
            return self._plan.pop(0)
        order, last = self._rng.choice(self._orders), len(self._plan) == 1
        tool = self._rng.choice(("reply",) if last else ("order", "cancel", "refund", "refund", "cancel", "reply"))
        return f"<{tool}>{self._rng.choice(('done', 'no')) if tool == 'reply' else order}</{tool}>"
