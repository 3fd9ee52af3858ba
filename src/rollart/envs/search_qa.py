"""Search QA: answer a question by searching a small library, as in Search-R1 (arXiv 2503.09516).

Keeps true: a search is answered with the best passages by BM25, and `<answer>` ends the episode; it is right where it
equals the expected answer after SQuAD's normalisation. It depends on its task alone. With difficulty 0:

    user  city of bol?                                       assistant  <search>bol</search>
    tool  <information>bol: city tir firm mak</information>  assistant  <answer>tir</answer>
"""

from __future__ import annotations

import collections
import functools
import json
import random
import re
import string
import textwrap
from dataclasses import dataclass
from typing import Any, Literal

from rollart.core.clock import stream
from rollart.core.errors import ConfigError
from rollart.core.ranges import at_least, between
from rollart.core.types import Action, Message, Observation, Task
from rollart.envs.domain import CountedEpisode, Domain, DomainSettings, Episode, Player
from rollart.envs.texts import Index, read_text

_ACTION = re.compile(r"<(search|answer)>\s*(\S.*?)\s*</\1>", re.DOTALL)
_FACTS = {  # kind: (of whom, the question, how it is told, what it is called in a longer question)
    "city": ("person", "In which city does {} live?", "{} lives in {}.", "the city where {} lives"),
    "firm": ("person", "For which firm does {} work?", "{} works for {}.", "the firm that {} works for"),
    "country": ("city", "In which country does {} lie?", "{} is a town in {}.", ""),
    "river": ("city", "Which river flows through {}?", "The river that flows through {} is the {}.", ""),
    "trade": ("firm", "In what does {} trade?", "{} trades in {}.", ""),
    "head": ("firm", "Who leads {}?", "{} is led by {}.", "")}


@dataclass(frozen=True, kw_only=True)
class SearchQASettings(DomainSettings):
    """questions: a JSON file in HotpotQA's format (empty: a made-up library). passages: of an answer (count).
    difficulty, of the made-up library: 0 one question of few words; 1 also two questions in one; 2 only these."""

    questions: str = ""
    passages: int = 1
    difficulty: Literal[0, 1, 2] = 1
    max_turns: int = 4
    max_tokens: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        between(self, 1, 20, "passages")
        at_least(self, 24, "max_tokens")  # a word of a title between its tags


class SearchQA(Domain):
    """Payload: `question`, `answer`, `titles` (passages that lead to it, in order), `difficulty`."""

    name = "search_qa"
    reward = "search_qa"
    rules = ("Answer the question. To look something up: <search>words</search> . "
             "To end, with the answer and nothing else: <answer>Paris</answer>")
    Settings = SearchQASettings

    def __init__(self, settings: Any = None) -> None:
        super().__init__(settings)
        for difficulty in range(self.settings.difficulty + 1):  # of its curriculum too, before workers are forked
            self._library(difficulty)

    def _library(self, difficulty: int) -> Library:
        return library(self.settings.questions, 0 if self.settings.questions else difficulty)

    def problem(self, rng: random.Random) -> dict[str, Any]:
        return {**rng.choice(self._library(self.settings.difficulty).problems), "difficulty": self.settings.difficulty}

    def open(self, task: Task) -> Episode:
        return _Reading(self, task, self._library(task.payload["difficulty"]))

    def player(self, task: Task, seed: int, error_rate: float) -> Player:
        return _Reader(task, stream(seed, "player", task.id), error_rate)


class Library:
    """Passages by title, what can be asked (problems), and the search, in which a title counts twice."""

    def __init__(self, passages: dict[str, str], problems: list[dict[str, Any]]) -> None:
        self.problems, self._passages = problems, list(passages.items())
        self._index = Index([f"{title} {title} {text}" for title, text in self._passages])

    def search(self, words: str, count: int) -> str:
        return "\n".join(": ".join(self._passages[i]) for i in self._index.search(words, count))


@functools.lru_cache(maxsize=4)
def library(questions: str, difficulty: int) -> Library:
    """The library of that file, or a made-up one. Raises ConfigError."""
    passages, problems = _hotpot(questions) if questions else _made_up(difficulty)
    if not problems:
        raise ConfigError(f"{questions} has no questions")
    return Library(passages, problems)


def _problem(question: str, answer: str, *titles: str) -> dict[str, Any]:
    return {"question": question, "answer": answer, "titles": list(dict.fromkeys(titles))}


def _hotpot(path: str) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """HotpotQA: `context` is [[title, [sentence, ...]], ...], or the same as two lists `title` and `sentences`."""
    passages, problems = {}, []
    try:
        for entry in json.loads(read_text(path)):
            context, facts = entry["context"], entry["supporting_facts"]
            pairs = zip(context["title"], context["sentences"], strict=True) if isinstance(context, dict) else context
            passages.update({str(title): "".join(sentences) for title, sentences in pairs})
            titles = facts["title"] if isinstance(facts, dict) else [fact[0] for fact in facts]
            problems.append(_problem(str(entry["question"]), str(entry["answer"]), *titles))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno} is not JSON: {error.msg}") from None
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path}: question {len(problems) + 1} is not in HotpotQA's format: {error!r}") from None
    return passages, problems


def _made_up(difficulty: int) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """40 towns, 40 firms and 120, 240 or 2,000 people by difficulty, with a passage each. Names have 3 letters or 5."""
    rng, passages, problems = stream(0, "library", difficulty), {}, []
    syllables = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
    made = ("".join(rng.sample(syllables, 2 if difficulty else 1)) + rng.choice("nrlkmp") for _ in range(20_000))
    fresh = iter(dict.fromkeys(made))
    cased = str.lower if difficulty == 0 else str.capitalize
    sizes = {"city": 40, "firm": 40, "country": 12, "river": 30, "trade": 20, "head": 40,
             "person": (120, 240, 2000)[difficulty]}
    names = {kind: [cased(next(fresh)) for _ in range(count)] for kind, count in sizes.items()}
    known = {name: {of: rng.choice(names[of]) for of, about in _FACTS.items() if about[0] == kind}
             for kind in ("person", "city", "firm") for name in names[kind]}
    for name, facts in known.items():
        passages[name] = " ".join(f"{of} {value}" if difficulty == 0 else _FACTS[of][2].format(name, value)
                                  for of, value in facts.items())
        for of, value in facts.items():
            if difficulty < 2:
                asked = _FACTS[of][1].format(name) if difficulty else f"{of} of {name}?"
                problems.append(_problem(asked, value, name))
            for second, answer in known[value].items() if difficulty and value in known else ():
                asked = _FACTS[second][1].format(_FACTS[of][3].format(name))
                problems.append(_problem(asked, answer, name, value))
    return passages, problems


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


class _Reading(CountedEpisode):
    def __init__(self, domain: Domain, task: Task, library: Library) -> None:
        super().__init__(domain, task)
        self._library = library

    def first(self) -> Observation:
        return Observation(self._domain.start(Message("user", str(self._task.payload["question"]))))

    def step(self, action: Action) -> Observation:
        found = _ACTION.search(str(action.text))
        answer = found[2] if found and found[1] == "answer" else None
        said, wanted = normal(answer or ""), normal(self._task.payload["answer"])
        found_text = self._library.search(found[2], self._domain.settings.passages) if found else ""
        messages = () if answer else (Message("tool", f"<information>{found_text}</information>" if found else "?"),)
        return self._answer(*messages, valid=found is not None, success=bool(answer) and said == wanted,
                            ended=bool(answer), f1=f1(said, wanted))


class _Reader:
    """Searches the titles that lead to the answer, then gives it. Errs by a word of what it read last."""

    def __init__(self, task: Task, rng: random.Random, error_rate: float) -> None:
        self._titles, self._answer = list(task.payload["titles"]), task.payload["answer"]
        self._room, self._rng, self._error_rate = task.max_tokens - 20, rng, error_rate

    def act(self, observation: Observation) -> str:
        if self._rng.random() < self._error_rate:
            words = re.findall(r"\w+", str(observation.messages[-1].content).replace("information", "")) or ["x"]
            verb = self._rng.choice(("search", "search", "search", "answer") if self._titles else ("search", "answer"))
            return f"<{verb}>{self._rng.choice(words)}</{verb}>"
        if not self._titles:
            return f"<answer>{self._answer}</answer>"
        return f"<search>{textwrap.shorten(self._titles.pop(0), self._room, placeholder='')}</search>"
