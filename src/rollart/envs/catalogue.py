"""WebShop's products, goals and reward: loaded from files, or a made-up catalogue.

Keeps true: the same settings give the same shop in every process, and it is built once in each; the reward is
WebShop's (Yao et al. 2022, arXiv 2207.01206):

    type x (attributes matched + options matched + [price <= bound]) / (attributes + options + 1)
"""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bm25s.stopwords import STOPWORDS_EN
from rapidfuzz import fuzz, utils

from rollart.core.clock import stream
from rollart.core.errors import ConfigError
from rollart.envs.texts import Index, read_text

HITS = 50  # of a search
NO_BOUND = 1e6

_COLORS = re.compile(
    "amber|apricot|aqua|beige|black|blue|blush|bronze|brown|burgundy|camo|champagne|charcoal|chocolate|copper|coral|cream|"
    "dark|gold|gr[ae]y|green|indigo|ivory|khaki|lavender|light|lilac|lime|magenta|maroon|mint|multicolor|mustard|navy|nude|"
    "olive|orange|peach|pink|plum|purple|rainbow|red|rose|rust|sand|silver|slate|tan|taupe|teal|violet|white|wine|yellow")
_GOODS = {"Clothing": "hat scarf shirt sock glove jacket", "Kitchen": "mug bowl pan knife tray kettle",
          "Office": "lamp desk chair shelf pen clock", "Outdoor": "tent rope stove flask boot torch"}
_FEATURES = ("easy clean", "non slip", "eco friendly", "machine washable", "long lasting", "light weight", "gift ready")
_MADE_OF = ("wool", "cotton", "steel", "bamboo", "glass", "linen", "cedar", "copper", "felt", "cork", "oak", "leather")
Wish = tuple["Product", str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Product:
    """price: dollars; of a range its middle. category: its levels, joined by ` › `. options: values by name."""

    id: str
    title: str
    query: str
    category: str
    price: float
    price_text: str
    description: str
    bullets: tuple[str, ...]
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]

    @property
    def document(self) -> str:  # what is searched
        options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in self.options.items())
        return " ".join([self.title, self.description, *self.bullets[:1], options]).lower()


class Shop:
    """Products by id, the search, and wishes: a product that fits, an instruction, its attributes (none: any)."""

    def __init__(self, products: Sequence[Product], wishes: Sequence[Wish]) -> None:
        self.products, self.wishes = {product.id: product for product in products}, wishes
        self._order = list(self.products.values())
        self._index = Index([product.document for product in self._order])

    def search(self, words: str) -> list[Product]:
        return [self._order[i] for i in self._index.search(words, HITS)]


@functools.lru_cache(maxsize=4)
def shop(products: str, goals: str, difficulty: int) -> Shop:
    """The shop of these files (see WebShopSettings), or without any a made-up one. Raises ConfigError."""
    found = [_product(line, f"{products}:{number}") for number, line in enumerate(read_text(products).split("\n"), 1)
             if line.strip()] if products else list(_made_up(difficulty))
    wishes: list[Wish] = [(p, f"Find me {p.query}", ()) for p in found if p.attributes]
    if goals:
        wishes = list(_wishes({product.id: product for product in found}, goals))
    if not wishes:
        raise ConfigError(f"{goals or products} has no product with attributes to wish for")
    return Shop(found, wishes)


def goal(shop: Shop, rng: random.Random, difficulty: int) -> dict[str, Any]:
    """A wish as JSON: its instruction, attributes, options and price bound, and what its type is judged by."""
    product, text, attributes = rng.choice(shop.wishes)
    if not attributes:
        attributes = tuple(rng.sample(product.attributes, min(len(product.attributes), max(1, difficulty))))
        text += f" with {' and '.join(attributes)}"
    names = sorted(name for name, values in product.options.items() if values)
    options = {name: rng.choice(product.options[name]) for name in (names if difficulty > 1 else names[:1])}
    bounds = [10.0 * i for i in range(1, 100) if 10.0 * i > product.price][:4]
    bound = max(rng.sample(bounds, 2)) if len(bounds) > 1 else NO_BOUND
    price = "" if bound == NO_BOUND else f"and price lower than {bound:.2f} dollars"
    text = ", ".join(filter(None, [text, *(f"{name}: {value}" for name, value in options.items()), price]))
    if difficulty == 0:
        text = " ".join([product.title, *options.values(), f"<{bound:g}"])
    return {"id": product.id, "instruction": text, "attributes": list(attributes), "options": list(options.values()),
            "bound": bound, "title": product.title, "query": product.query, "category": product.category,
            "difficulty": difficulty}


def judge(wish: Mapping[str, Any], bought: Product, chosen: Sequence[str]) -> dict[str, float]:
    """The reward of a purchase with these options chosen, with its parts: `type`, and counts that matched."""
    texts = [bought.title.lower(), " ".join(bought.bullets).lower(), bought.description.lower()]
    attributes = sum(any(_alike(own, wanted) for own in bought.attributes) or any(wanted in t for t in texts)
                     for wanted in wish["attributes"])
    options = sum(any(_alike(_color(value), _color(wanted)) for value in chosen) for wanted in wish["options"])
    price, kind = bought.price <= wish["bound"], _type(wish, bought)
    total = len(wish["attributes"]) + len(wish["options"]) + 1
    return {"reward": kind * (attributes + options + price) / total, "type": kind, "attributes": float(attributes),
            "options": float(options), "price": float(price)}


def _type(wish: Mapping[str, Any], bought: Product) -> float:
    """1, less where query, category and title say that it is another kind of thing. For nouns, which WebShop has
    tagged by a model, stand all words of three letters or more that are no stop words."""
    nouns, found = ([word for word in re.findall(r"[a-z]{3,}", title.lower()) if word not in STOPWORDS_EN]
                    for title in (wish["title"], bought.title))
    overlap = len(set(nouns) & set(found)) / len(nouns) if nouns else 0.2
    one, other = ({level.strip() for level in category.split("›")} for category in (wish["category"], bought.category))
    alike = wish["query"] == bought.query or len(one & other) >= 2 or overlap > 0.2
    return 0.0 if overlap == 0 else 0.1 if overlap < 0.1 else 1.0 if alike else 0.5


def _alike(one: str, other: str) -> bool:
    return round(fuzz.token_set_ratio(one, other, processor=utils.default_process)) > 85


def _color(value: str) -> str:
    """The first of the colours in it by the alphabet, else the value itself."""
    return min(_COLORS.findall(value), default=value)


def _made_up(difficulty: int) -> Iterator[Product]:
    """Difficulty 0: 180 products of two words, each three times at other prices. 1: 300. 2: 1,000, in longer words."""
    rng, brief = stream(0, "catalogue", difficulty), difficulty == 0
    kinds = [(kind, noun, place) for place, nouns in _GOODS.items() for noun in nouns.split() for kind in _MADE_OF]
    ids = [letter + digit for letter in "abcdefghijklmnopqrstuvwxyz" for digit in "0123456789"]
    rng.shuffle(kinds)
    rng.shuffle(ids)
    for number in range((180, 300, 1000)[difficulty]):
        made_of, noun, place = kinds[(number // 3 if brief else number) % len(kinds)]
        features = [] if brief else rng.sample(_FEATURES, 3)
        title = f"{made_of} {noun}" if brief else f"Norda {made_of} {noun} for all days, {features[0]}"
        price = float(rng.randint(5, 89)) if brief else rng.randint(500, 9900) / 100
        options = {"color": tuple(rng.sample(["red", "blue", "green", "black", "white", "pink"], 2 if brief else 3))}
        if not brief and rng.random() < 0.6:
            options["size"] = ("small", "medium", "large")
        yield Product(ids[number] if brief else f"b{number:04d}{rng.randrange(10**5):05d}", title, f"{noun}s",
                      f"{place} › {place} basics › {noun}s", price, f"${price:g}", "",
                      tuple(f"{feature}: for years of use" for feature in features), (made_of, *features), options)


def _product(line: str, where: str) -> Product:
    try:
        plain = json.loads(line)
        plain = plain.get("product", plain)
        prices = [float(price) for price in plain["pricing"]][:2]
        return Product(
            str(plain["asin"]).lower(), str(plain["Title"]), str(plain["query"]), str(plain["product_category"]),
            sum(prices) / len(prices), str(plain["Price"]), str(plain["Description"]),
            tuple(map(str, plain["BulletPoints"])), tuple(map(str, plain["Attributes"])),
            {str(name).lower(): tuple(str(value).lower() for value in values)
             for name, values in plain["options"].items()})
    except (ValueError, TypeError, AttributeError, KeyError, ZeroDivisionError) as error:
        what = f"no key {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{where} is no product of WebShop: {what}") from None


def _wishes(products: Mapping[str, Product], path: str) -> Iterator[Wish]:
    """Of WebShop's instructions by product id, those of products that are there."""
    try:
        for id, entry in json.loads(read_text(path)).items():
            if id.lower() in products and "instruction" in entry and entry["instruction_attributes"]:
                wanted = tuple(str(attribute).lower() for attribute in entry["instruction_attributes"])
                yield products[id.lower()], str(entry["instruction"]).rstrip("."), wanted
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno} is not JSON: {error.msg}") from None
    except (TypeError, AttributeError, KeyError) as error:
        raise ConfigError(f"{path} is no file of WebShop's instructions by product: {error!r}") from None
