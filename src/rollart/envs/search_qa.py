"""Search QA: answer a question by searching a small library, as in Search-R1 (arXiv 2503.09516).

Keeps true: a search is answered with the best passages by BM25, and `<answer>` ends the episode; it is right where it
equals an expected answer after SQuAD's normalisation. It depends on its task alone. With difficulty 0:

    user  city of bolan?                                           assistant  <search>bolan</search>
    tool  <information>bolan: city tirek firm moka</information>   assistant  <answer>tirek</answer>
"""

from __future__ import annotations

import collections
import functools
import json
import random
import re
import string
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollart.core.clock import stream
from rollart.core.errors import ConfigError
from rollart.core.types import Action, Message, Observation, Task
from rollart.envs.domain import Domain, DomainSettings, Episode, Player
from rollart.envs.texts import Index, read_text

_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
_ASKED = {"city": "In which city does {} live?", "firm": "For which firm does {} work?",
          "country": "In which country does {} lie?", "river": "Which river flows through {}?",
          "trade": "In what does {} trade?", "head": "Who leads {}?"}
_TOLD = {"city": "{} lives in {}.", "firm": "{} works for {}.", "country": "{} is a town in {}.",
         "river": "The river that flows through {} is the {}.", "trade": "{} trades in {}.", "head": "{} is led by {}."}
_THING = {"city": "the city where {} lives", "firm": "the firm that {} works for"}
_OF = {"person": ("city", "firm"), "city": ("country", "river"), "firm": ("trade", "head")}
"""What is known of each kind of thing; `city` and `firm` lead on to a second question."""


@dataclass(frozen=True, kw_only=True)
class SearchQASettings(DomainSettings):
    """questions: a JSON file in HotpotQA's format (empty: a made-up library). passages: of an answer (count).
    difficulty, of the made-up library: 0 one question of few words; 1 whole sentences; 2 two questions in one.
    """

    questions: str = ""
    passages: int = 1
    difficulty: int = 1
    max_turns: int = 4
    max_tokens: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.difficulty not in (0, 1, 2):
            raise ValueError(f"difficulty must be 0, 1 or 2; got {self.difficulty}")
        if not 1 <= self.passages <= 20:
            raise ValueError(f"passages must lie between 1 and 20; got {self.passages}")


class SearchQA(Domain):
    """Payload: `question`, `answer`, `titles` (passages that lead to it, in order), `difficulty`."""

    name = "search_qa"
    reward = "search_qa"
    rules = ("Answer the question. To look something up: <search>words</search> . "
             "To end, with the answer and nothing else: <answer>Paris</answer>")
    Settings = SearchQASettings

    def __init__(self, settings: Any = None) -> None:
        super().__init__(settings)
        self._library(self.settings.difficulty)  # before workers are forked, and so that a bad file is said at once

    def problem(self, rng: random.Random) -> dict[str, Any]:
        return {**rng.choice(self._library(self.settings.difficulty).problems), "difficulty": self.settings.difficulty}

    def open(self, task: Task) -> Episode:
        return _Reading(self, task, self._library(task.payload["difficulty"]))

    def player(self, task: Task, seed: int, error_rate: float) -> Player:
        return _Reader(task, stream(seed, "player", task.id), error_rate)

    def random_player(self, task: Task, seed: int) -> Player:
        return _Reader(task, stream(seed, "random", task.id), 1.0)

    def _library(self, difficulty: int) -> Library:
        return library(self.settings.questions, difficulty)


class Library:
    """Passages by title, what can be asked, and the search, in which a title counts twice."""

    def __init__(self, passages: Mapping[str, str], problems: list[dict[str, Any]]) -> None:
        self.problems, self._passages = problems, list(passages.items())
        self._index = Index([f"{title} {title} {text}" for title, text in self._passages])

    def search(self, words: str, count: int) -> str:
        return "\n".join(": ".join(self._passages[i]) for i in self._index.search(words, count))


@functools.lru_cache(maxsize=4)
def library(questions: str, difficulty: int) -> Library:
    """The library of that file, or a made-up one. Raises ConfigError."""
    return _hotpot(questions) if questions else _made_up(difficulty)


def _hotpot(path: str) -> Library:
    """HotpotQA: `context` is [[title, [sentence, ...]], ...], or the same as two lists `title` and `sentences`."""
    number, passages, problems = 0, {}, []
    try:
        for number, entry in enumerate(json.loads(read_text(path)), 1):
            context, facts = entry["context"], entry["supporting_facts"]
            pairs = zip(context["title"], context["sentences"], strict=True) if isinstance(context, dict) else context
            titles = facts["title"] if isinstance(facts, dict) else [fact[0] for fact in facts]
            passages.update({str(title): "".join(sentences) for title, sentences in pairs})
            problems.append({"question": str(entry["question"]), "answer": str(entry["answer"]),
                             "titles": list(dict.fromkeys(titles))})
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno} is not JSON: {error.msg}") from None
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path}: question {number} is not in HotpotQA's format: {error!r}") from None
    if not problems:
        raise ConfigError(f"{path} has no questions")
    return Library(passages, problems)


def _made_up(difficulty: int) -> Library:
    """40 towns, 40 firms and 240 people (difficulty 2: 2,000), with a passage each."""
    rng = stream(0, "library", difficulty)
    syllables = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
    fresh = iter(dict.fromkeys("".join(rng.sample(syllables, 2)) + rng.choice("nrslk") for _ in range(20_000)))
    sizes = {"city": 40, "firm": 40, "country": 12, "river": 30, "trade": 20, "head": 40,
             "person": 2000 if difficulty > 1 else 240}
    kinds = {kind: [next(fresh) for _ in range(count)] for kind, count in sizes.items()}
    facts = {name: {of: rng.choice(kinds[of]) for of in _OF[kind]} for kind in _OF for name in kinds[kind]}
    say = str.lower if difficulty == 0 else str.capitalize
    passages, problems = {}, []
    for name, known in facts.items():
        passages[say(name)] = " ".join(f"{of} {value}" if difficulty == 0 else _TOLD[of].format(say(name), say(value))
                                       for of, value in known.items())
        for of, value in known.items():
            if difficulty < 2:
                asked = f"{of} of {name}?" if difficulty == 0 else _ASKED[of].format(say(name))
                problems.append({"question": asked, "answer": say(value), "titles": [say(name)]})
            for second in _OF.get(of, ()) if difficulty > 0 else ():
                asked = _ASKED[second].format(_THING[of].format(say(name)))
                problems.append({"question": asked, "answer": say(facts[value][second]),
                                 "titles": [say(name), say(value)]})
    return Library(passages, problems)


def normal(text: str) -> str:
    """SQuAD's: small letters, without punctuation, articles and surplus spaces."""
    plain = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def f1(said: str, wanted: str) -> float:
    """Of the words of two normalised answers; yes, no and noanswer count only where they are the whole answer."""
    if said != wanted and {said, wanted} & {"yes", "no", "noanswer"}:
        return 0.0
    one, other = said.split(), wanted.split()
    common = (collections.Counter(one) & collections.Counter(other)).total()
    return 2 * common / (len(one) + len(other)) if common else 0.0


class _Reading(Episode):
    def __init__(self, domain: Domain, task: Task, library: Library) -> None:
        self._domain, self._task, self._library = domain, task, library
        self._actions = self._valid = 0

    def first(self) -> Observation:
        return Observation(self._domain.start(Message("user", str(self._task.payload["question"]))))

    def step(self, action: Action) -> Observation:
        found = _ACTION.search(str(action.text))
        verb, words = (found[1], found[2].strip()) if found else ("", "")
        self._actions += 1
        self._valid += bool(words)
        said, wanted = normal(words) if verb == "answer" else "", normal(self._task.payload["answer"])
        success = bool(words) and verb == "answer" and said == wanted
        facts = {"success": success, "f1": f1(said, wanted), "valid": self._valid, "actions": self._actions}
        text = "?"
        if verb == "search" and words:
            text = f"<information>{self._library.search(words, self._domain.settings.passages)}</information>"
        ended = verb == "answer" and bool(words)
        out_of_turns = not ended and self._actions >= self._task.max_turns
        return Observation(() if ended else (Message("tool", text),), done=ended or out_of_turns,
                           truncated=out_of_turns, reward=float(success), facts=facts)


class _Reader:
    """Searches the titles that lead to the answer, then gives it. Errs by a word of what it read last."""

    def __init__(self, task: Task, rng: random.Random, error_rate: float) -> None:
        self._titles, self._answer = list(task.payload["titles"]), task.payload["answer"]
        self._room, self._rng, self._error_rate = task.max_tokens - 20, rng, error_rate

    def act(self, observation: Observation) -> str:
        if self._rng.random() < self._error_rate:
            words = re.findall(r"\w+", str(observation.messages[-1].content).replace("information", "")) or ["x"]
            verb = self._rng.choice(("search", "answer"))
            return f"<{verb}>{self._rng.choice(words)}</{verb}>"
        if not self._titles:
            return f"<answer>{self._answer}</answer>"
        return f"<search>{textwrap.shorten(self._titles.pop(0), self._room, placeholder='')}</search>"
