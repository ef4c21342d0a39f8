import json
import math
import random
import re

import pytest

from gymtune.tools import ConfigError, Outcome, ParsedCall, Toolbox, ToolResult
from gymtune.tools.library import SearchIndex

THREE = {"a": "cat sat mat", "b": "Cat, cat: dog!", "c": "bird"}


def call(index: SearchIndex, name: str, **arguments: object) -> ToolResult:
    return Toolbox(index.tools()).call(ParsedCall("call_0_0", name, arguments, None, ""))


def search(index: SearchIndex, **arguments: object) -> list[dict[str, object]]:
    result = call(index, "search", **arguments)
    assert result.outcome is Outcome.ok, result.content
    return json.loads(result.content)


def test_scores_by_hand() -> None:
    # "cat": in 2 of 3 documents, ln(1 + 1.5 / 2.5) = 0.470004; mean length 7/3, so 3 words weigh
    # 1.5 * (0.25 + 0.75 * 9 / 7) = 1.821429. b: 0.470004 * 2 * 2.5 / 3.821429, a: 0.470004 * 2.5 / 2.821429.
    found = search(SearchIndex(THREE), query="CAT")
    assert [(hit["id"], hit["score"]) for hit in found] == [("b", 0.615), ("a", 0.4165)]
    # "bird": in 1 of 3, ln(1 + 2.5 / 1.5) = 0.980829; 1 word weighs 1.5 * (0.25 + 0.75 * 3 / 7) = 0.857143.
    assert search(SearchIndex(THREE), query="bird bird unheard")[0]["score"] == round(0.980829 * 2.5 / 1.857143, 4)


def slow_scores(documents: dict[str, str], query: str) -> dict[str, float]:
    """BM25 as it is written in books: no index, every document for every word."""
    split = {name: re.findall(r"\w+", text.lower()) for name, text in documents.items()}
    mean = sum(map(len, split.values())) / len(split)
    scores = {}
    for name, words in split.items():
        total = 0.0
        for word in set(re.findall(r"\w+", query.lower())):
            n = sum(word in other for other in split.values())
            f = words.count(word)
            idf = math.log((len(split) - n + 0.5) / (n + 0.5) + 1)
            total += idf * (f * 2.5) / (f + 1.5 * (1 - 0.75 + 0.75 * len(words) / mean))
        scores[name] = total
    return scores


def test_scores_agree_with_the_slow_formula() -> None:
    rng = random.Random(0)
    vocabulary = [f"w{n}" for n in range(30)]
    for _ in range(50):
        documents = {f"d{n}": " ".join(rng.choices(vocabulary, k=rng.randint(0, 40))) for n in range(12)}
        query = " ".join(rng.choices(vocabulary, k=4))
        expected = {name: score for name, score in slow_scores(documents, query).items() if score > 0}
        found = search(SearchIndex(documents), query=query, limit=20)
        assert {hit["id"]: hit["score"] for hit in found} == pytest.approx(expected, abs=5.1e-5)
        assert [hit["score"] for hit in found] == sorted((hit["score"] for hit in found), reverse=True)


def test_chinese_is_found_by_its_characters() -> None:
    index = SearchIndex({"x": "北京的天气很好", "y": "上海is big", "z": "ひらがな"})
    assert [hit["id"] for hit in search(index, query="天气")] == ["x"]
    assert [hit["id"] for hit in search(index, query="海")] == ["y"]
    assert [hit["id"] for hit in search(index, query="BIG")] == ["y"]
    assert [hit["id"] for hit in search(index, query="が")] == ["z"]


def test_equal_scores_come_by_id_and_limit_holds() -> None:
    index = SearchIndex(dict.fromkeys("dbca", "same text"))
    assert [hit["id"] for hit in search(index, query="text")] == ["a", "b", "c"]
    assert len(search(index, query="text", limit=1)) == 1
    assert search(index, query="unheard") == []


def test_snippet_stands_around_the_word_on_one_line() -> None:
    text = "filler " * 100 + "\n\nneedle  here " + "filler " * 100
    snippet = search(SearchIndex({"a": text}), query="needle")[0]["snippet"]
    assert "needle here" in snippet
    assert snippet.startswith("...")
    assert snippet.endswith("...")
    assert len(snippet) <= 206
    assert search(SearchIndex({"a": "short needle"}), query="needle")[0]["snippet"] == "short needle"


def test_read_document() -> None:
    index = SearchIndex(THREE)
    assert call(index, "read_document", id="b").content == THREE["b"]
    missing = call(index, "read_document", id="x" * 1_000_000)
    assert missing.outcome is Outcome.exception
    assert "Take the id from search" in missing.content
    assert len(missing.content) < 300


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"query": 1},
        {"query": "a", "limit": 0},
        {"query": "a", "limit": 21},
        {"query": "a", "limit": "3"},
        {"q": "a"},
    ],
)
def test_wrong_arguments_are_schema_violations(arguments: dict[str, object]) -> None:
    assert call(SearchIndex(THREE), "search", **arguments).outcome is Outcome.schema_violation


def test_a_query_without_words_is_told() -> None:
    for query in ("", " ?! ", "\x00"):
        assert "no words" in call(SearchIndex(THREE), "search", query=query).content


def test_a_megabyte_of_query_is_answered() -> None:
    """In linear time: a quadratic search would take minutes."""
    index = SearchIndex({"a": "word " * 200_000, "b": "天" * 200_000})
    for query, found in [("word " * 200_000, ["a"]), ("x" * 1_000_000, []), ("天" * 300_000, ["b"])]:
        assert [hit["id"] for hit in search(index, query=query)] == found
    assert "no words" in call(index, "search", query="!" * 1_000_000).content


def test_bad_documents_are_config_errors() -> None:
    with pytest.raises(ConfigError, match="at least one document"):
        SearchIndex({})
    with pytest.raises(ConfigError, match="'a': int"):
        SearchIndex({"a": 1})  # type: ignore[dict-item]
    assert search(SearchIndex({"a": "", "b": ""}), query="x") == []
