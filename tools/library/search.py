"""Search over a small corpus held in memory, ranked by BM25."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field

from ..errors import ConfigError, ToolError
from ..tool import Tool, tool

_K1, _B = 1.5, 0.75
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # written without spaces: each character is a token
_TOKEN = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+")
_SNIPPET_CHARS, _SNIPPET_BEFORE = 200, 40


class SearchIndex:
    """Documents by id, found by words.

    The score of a document is BM25 (Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond",
    2009) with k1 = 1.5, b = 0.75, over the distinct words of the query::

        sum of log(1 + (N - n + 0.5) / (n + 0.5)) * f * (k1 + 1) / (f + k1 * (1 - b + b * length / mean length))

    f: occurrences in the document, n: documents with the word, N: documents; lengths in words. The 1 in the logarithm,
    as in Lucene, keeps words of more than half of the documents from counting against one.

    Args:
        documents: Text by id.

    Raises:
        ConfigError: No documents, or one that is not text.
    """

    def __init__(self, documents: Mapping[str, str]) -> None:
        if not documents:
            raise ConfigError("a search index needs at least one document, got none")
        for name, text in documents.items():
            if not isinstance(name, str) or not isinstance(text, str):
                raise ConfigError(f"documents must map ids to texts, got {name!r}: {type(text).__name__}")
        self._documents = dict(documents)
        self._lengths: dict[str, int] = {}
        self._found: defaultdict[str, dict[str, int]] = defaultdict(dict)  # word -> id -> occurrences
        for name, text in documents.items():
            counts = Counter(word for word, _ in _words(text))
            self._lengths[name] = counts.total()
            for word, count in counts.items():
                self._found[word][name] = count
        self._mean_length = sum(self._lengths.values()) / len(documents)

    def tools(self) -> list[Tool]:
        """Return `search` and `read_document`, bound to this index."""
        make = tool(in_memory=True)
        return [make(self.search), make(self.read_document)]

    def search(self, query: str, limit: Annotated[int, Field(ge=1, le=20)] = 3) -> list[dict[str, Any]]:
        """Search the documents. Answers with id, score and snippet of the best.

        Args:
            query: Words to look for.
            limit: Documents at most.

        Raises:
            ToolError: The query has no words.
        """
        words = dict.fromkeys(word for word, _ in _words(query))
        if not words:
            raise ToolError("the query has no words")
        scores: defaultdict[str, float] = defaultdict(float)
        for word in words:
            found = self._found.get(word, {})
            rarity = math.log(1 + (len(self._documents) - len(found) + 0.5) / (len(found) + 0.5))
            for name, count in found.items():
                length = 1 - _B + _B * self._lengths[name] / self._mean_length
                scores[name] += rarity * count * (_K1 + 1) / (count + _K1 * length)
        rounded = sorted((-round(score, 4), name) for name, score in scores.items())
        return [
            {"id": name, "score": -score, "snippet": _snippet(self._documents[name], words)}
            for score, name in rounded[:limit]
        ]

    def read_document(self, id: str) -> str:
        """Read a whole document.

        Args:
            id: As search gives it.

        Raises:
            ToolError: There is no such document.
        """
        if id not in self._documents:
            raise ToolError(f"there is no document {id[:80]!r}. Take the id from search.")
        return self._documents[id]


def _words(text: str) -> Iterator[tuple[str, int]]:
    """Yield each word, without case, and where it begins."""
    for match in _TOKEN.finditer(text):
        yield match[0].casefold(), match.start()


def _snippet(text: str, words: Mapping[str, None]) -> str:
    """Return what stands around the first of the words, on one line."""
    first = next((at for word, at in _words(text) if word in words), 0)
    start = max(0, first - _SNIPPET_BEFORE)
    end = start + _SNIPPET_CHARS
    return "..." * (start > 0) + " ".join(text[start:end].split()) + "..." * (end < len(text))
