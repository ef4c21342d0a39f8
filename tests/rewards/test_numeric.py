from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymtune.rewards import NumericChecker, check
from gymtune.rewards.numeric import parse_number


@given(st.integers())
def test_whole_numbers_are_read_back(n: int) -> None:
    signed = "-" if n < 0 else ""
    for text in (f"{n}", f"{n:,}", f" {n}. ", f"${n}", f"{signed}${abs(n)}", f"{n}".replace("-", "\u2212"), f"{n}.000"):
        assert parse_number(text) == n


@given(st.decimals(allow_nan=False, allow_infinity=False, places=6))
def test_decimals_are_read_back(x: Decimal) -> None:
    assert parse_number(f"{x:f}") == x
    assert parse_number(f"{x:,f}") == x


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_are_read_back(x: float) -> None:
    number = parse_number(repr(x))
    assert number is not None
    assert float(number) == x


@given(st.integers(), st.integers())
def test_a_number_is_right_for_itself_alone(stated: int, wanted: int) -> None:
    for text in (f"{stated}", f"The answer is {stated}.", f"#### {stated:,}", rf"\boxed{{{stated}}}"):
        assert check(NumericChecker(), text, wanted).success is (stated == wanted)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-",
        "$",
        "1,23",
        "1,2345",
        "12,345,6",
        "1 2",
        "5.",
        "1.2.3",
        "5e",
        "5e1234",
        "0x10",
        "1_000",
        "٣",
        "nan",
        "inf",
    ],
)
def test_what_is_no_number(text: str) -> None:
    assert parse_number(text) == (5 if text == "5." else None)


@pytest.mark.parametrize(
    ("answer", "gt", "right"),
    [
        ("7.0", 7, True),
        ("7.0000001", 7, False),  # whole numbers exactly
        ("123456789012345678901234567890", "123456789012345678901234567891", False),  # beyond 28 digits too
        ("2.0000019", "2.0000001", True),  # 0.9e-6 off, relative
        ("2.0000031", "2.0000001", False),  # 1.5e-6 off
        ("-0.5000001", -0.5, True),
        ("0.5", -0.5, False),
        ("0.0000000001", "0.0000000002", False),  # relative, not absolute
        ("1e3", 1000, True),
        ("-0", 0, True),
    ],
)
def test_equality(answer: str, gt: Any, right: bool) -> None:
    assert check(NumericChecker(), answer, gt).success is right


def test_long_reasoning_is_no_fault() -> None:
    assert check(NumericChecker(), "We add 3 and 4. " * 2000 + "\n#### 7", 7).success is True


def test_the_doubt_must_be_in_the_clause_of_the_statement() -> None:
    for text in ("There are no pears, so the answer is 5.", "Not 6. The answer is 5", "It does not matter.\n#### 5"):
        assert check(NumericChecker(), text, 5).success is True
    assert check(NumericChecker(), "There are no pears so the answer is 5.", 5).kind == "unparsed"


@pytest.mark.parametrize("gt", [None, "", "five", True, "5 apples", [5], float("nan"), float("inf"), {"a": 1}])
def test_a_gt_that_is_no_number_breaks_the_checker(gt: Any) -> None:
    verdict = check(NumericChecker(), "5", gt)
    assert (verdict.kind, verdict.score) == ("broken", None)
    assert "gt must be a number" in verdict.detail


HOSTILE = [
    "1",
    "1,",
    "1,111",
    ",111",
    "answer: 5 ",
    "The answer is ",
    "answer ",
    "answer: 5, not ",
    "\\boxed{",
    "####\n",
    "-$",
    " ",
    "1e1",
]


@pytest.mark.parametrize("piece", HOSTILE)
@pytest.mark.parametrize("end", ["", "x", "%"])
def test_a_megabyte_of_answer_is_refused(piece: str, end: str) -> None:
    """In linear time: a quadratic search would take minutes."""
    text = "The answer is " + piece * (1_000_000 // len(piece)) + end
    assert check(NumericChecker(), text, 4).success is False


def test_the_detail_of_a_huge_number_is_short() -> None:
    assert len(check(NumericChecker(), "1" * 10_000, 5).detail) < 60
