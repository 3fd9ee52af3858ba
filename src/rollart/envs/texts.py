"""Files of texts, and search in texts by BM25 as Lucene counts it (by bm25s).

Keeps true: the same documents and query give the same ranking in every process (equal scores: the earlier document
first); a document without one of the query's words is no hit.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import bm25s
import numpy
import Stemmer
from bm25s.stopwords import STOPWORDS_EN

from rollart.core.errors import ConfigError

_STEMMER = Stemmer.Stemmer("english")


class Index:
    """Over documents, numbered in their order, with Pyserini's k1 and b."""

    def __init__(self, documents: Sequence[str]) -> None:
        self._bm25 = bm25s.BM25(k1=0.9, b=0.4, method="lucene")
        self._bm25.index([terms(document) or [""] for document in documents], show_progress=False)

    def search(self, query: str, count: int) -> list[int]:
        """The numbers of the best `count` documents, best first."""
        known = [term for term in terms(query) if term in self._bm25.vocab_dict]
        scores = self._bm25.get_scores(known) if known else numpy.zeros(0)
        hits = numpy.flatnonzero(scores > 0)
        return [int(i) for i in hits[numpy.lexsort((hits, -scores[hits]))][:count]]


def terms(text: str) -> list[str]:
    """Lower-cased words of two letters or more without Lucene's stop words, stemmed."""
    return list(_STEMMER.stemWords([w for w in re.findall(r"\w\w+", text.lower()) if w not in STOPWORDS_EN]))


def read_text(path: str) -> str:
    """Raises ConfigError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
