"""The built-in mathematics against hand-made cases, and against sympy on generated ones."""

from fractions import Fraction
from math import gcd
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymtune.rewards import Episode, check, check_episode
from gymtune.rewards.expression import ExpressionChecker
from gymtune.rewards.latex import finished, normalise, value
from gymtune.rewards.stated import stated_answer
from gymtune.rewards.surds import NotExactError, Surd
from gymtune.tools.messages import user

EQUAL = [
    (r"\frac{1}{2}", "1/2", "0.5", r"\dfrac12", r"50\%", r"\frac{1}2", ".5"),
    ("3/2", r"1\frac{1}{2}", "1.5", r"\tfrac{3}{2}"),
    ("-1/3", r"-\frac{1}{3}", r"\frac{-1}{3}"),
    ("1,234,567", "1234567", r"1{,}234{,}567", r"\$1234567", "1234567.0"),
    (r"2\sqrt{3}", r"\sqrt{12}", "2sqrt(3)", "√12", r"\sqrt{3}\cdot 2", r"\frac{6}{\sqrt{3}}"),
    (r"\frac{1+\sqrt{5}}{2}", r"\frac{\sqrt5 + 1}{2}", r"\frac{2}{\sqrt{5}-1}", "(1+5^{1/2})/2"),
    ("x^2+2x+1", "(x+1)^2", "(x + 1)(x + 1)", "x**2 + 2*x + 1"),
    (r"\frac{x}{2}", "x/2", "0.5x"),
    ("2i+1", "1 + 2i", r"\frac{5}{1-2i}"),
    (r"(3, \frac{\pi}{2})", r"\left( 3, \frac{\pi}{2} \right)", "(3, pi/2)"),
    ("-2, 1", "1,-2", r"\{1, -2\}"),
    (r"[0, \infty)", r"\left[0,\infty\right)"),
    ("30", r"30^\circ", "30^{\\circ}", "30°", "30 degrees", r"30\text{ cm}^2", "30 apples", "x = 30"),
    (r"\text{Evelyn}", "Evelyn", "evelyn"),
    (r"x \in [1, 2]", "[1,2]"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
]


@pytest.mark.parametrize("same", EQUAL, ids=lambda same: same[0])
def test_one_value_many_spellings(same: tuple[str, ...]) -> None:
    for answer in same:
        for gt in same:
            assert check(ExpressionChecker(), rf"So it is $\boxed{{{answer}}}$.", gt).success is True, (answer, gt)


def test_different_values_are_different() -> None:
    for i, first in enumerate(EQUAL):
        for j, second in enumerate(EQUAL):
            if i != j:
                assert check(ExpressionChecker(), first[0], second[0]).success is False, (first[0], second[0])


@pytest.mark.parametrize(
    ("answer", "gt"),
    [
        ("3+4", "7"),
        ("6/2", "3"),
        ("2/4", "1/2"),
        ("2^3", "8"),
        (r"\sqrt{4}", "2"),
        ("0x", "0"),
        ("(1+1, 3)", "(2,3)"),
        ("50", r"50\%"),
        ("1.41421356", r"\sqrt{2}"),
        ("x+y", "y"),
        ("y=2", "x=2"),
        (r"\{1,2,2\}", r"\{1,2\}"),
        ("(1,2]", "[1,2)"),
        ("one", "neo"),  # no product of variables
        ("5 million", "5"),
    ],
)
def test_not_taken_for_the_answer(answer: str, gt: str) -> None:
    assert check(ExpressionChecker(), answer, gt).success is False


@given(st.integers(-200, 200), st.integers(1, 60))
def test_fractions_as_fractions(above: int, below: int) -> None:
    exact = Fraction(above, below)
    text = f"{above}/{below}"
    assert value(text, 0) == Surd.of(exact)
    assert finished(text) is (below > 1 and gcd(above, below) == 1)
    if exact.denominator > 1:
        assert check(ExpressionChecker(), rf"\boxed{{\frac{{{exact.numerator}}}{{{exact.denominator}}}}}", text).success


EXPRESSIONS = st.recursive(
    st.sampled_from(["1", "2", "3", "5", "12", "0.5", "x", "y"]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda t: f"({t[0]}){t[1]}({t[2]})"),
        st.tuples(inner, st.sampled_from("23")).map(lambda t: f"({t[0]})^{t[1]}"),
        st.sampled_from(["sqrt(2)", "sqrt(3)", "sqrt(12)", "sqrt(1/2)"]),
    ),
    max_leaves=5,
)


@given(EXPRESSIONS)
def test_values_are_those_of_sympy(text: str) -> None:
    sympy = pytest.importorskip("sympy")
    try:
        ours = value(text, 0)
    except NotExactError:
        return
    assert isinstance(ours, Surd)
    points = {}
    for name in "xy":
        point = value(name, 0)
        assert isinstance(point, Surd)
        points[name] = sympy.Rational(str(point.rational))
    exact = sympy.sympify(text.replace("^", "**"), rational=True).subs(points)
    own = sum((sympy.Rational(str(c)) * sympy.sqrt(r) for r, c in ours.terms), sympy.Integer(0))
    assert sympy.simplify(exact - own) == 0


@pytest.mark.parametrize(
    "bomb",
    [
        "9^9^9",
        "9^{9^{9^9}}",
        "(" * 240 + "1" + ")" * 240,
        "{" * 200,
        "2^1000^1000",
        "-" * 400,
        r"\sqrt" * 90,
        r"\frac" * 90,
        "9" * 450,
        r"\sqrt{" + "9" * 99 + "}",
        "(1+x)^999",
        "*".join(["(1/7+1/9)^99"] * 30),
        ",".join(["1"] * 200),
        "^" * 300,
    ],
)
def test_bombs_are_refused_at_once(bomb: str) -> None:
    for gt in ("5", "x+1"):
        assert check(ExpressionChecker(), bomb, gt).success is False
    assert check(ExpressionChecker(), bomb, bomb).success is not False  # as a gt it is compared as text


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        ("5", "5"),
        (r"a \boxed{\frac{1}{2}} .", r"\frac{1}{2}"),
        ("The answer is $5$.", "5"),
        ("the answer is **5**", "5"),
        (r"The final answer is \boxed{5}.", "5"),
        (r"\[ \boxed{5} \]", "5"),
        ("<answer> x = 5 </answer>", "x = 5"),
        ("Answer:\n5", "5"),
        (r"\boxed{5} so \boxed{5}", "5"),
        (r"\boxed{5} or \boxed{6}", None),
        (r"\boxed{5", None),
        (r"\boxed{5} and more", None),
        ("The answer is 5. Or is it?", None),
        ("I guess the answer is 5", None),
        ("<answer>5", None),
        ("答案是5。", "5"),
        ("答案不是5。", "答案不是5"),  # no mark: the text as it stands
        ("", None),
    ],
)
def test_what_is_stated(text: str, stated: str | None) -> None:
    assert stated_answer(text) == stated


def test_a_copy_of_the_question_is_no_answer() -> None:
    def judge(answer: str, question: str, gt: str) -> bool | None:
        state = Episode(gt=gt, messages=[user(question)], opening=1, answer=answer)
        return check_episode(ExpressionChecker(), state).success

    assert judge(r"\boxed{\sqrt{12}}", r"Simplify $\sqrt{12}$.", r"2\sqrt{3}") is False
    assert judge(r"\boxed{2\sqrt{3}}", r"Simplify $\sqrt{12}$.", r"2\sqrt{3}") is True
    assert judge("x^2 + 2x + 1", "Factor $x^2 + 2 x + 1$.", "(x+1)^2") is False
    assert judge("(x+1)^2", "Factor $x^2 + 2 x + 1$.", "(x+1)^2") is True
    assert judge("3/4", "Which is larger, 1/2 or 3/4?", r"\frac{3}{4}") is True
    assert judge("12*13", "What is 12 * 13?", "156") is False


def test_units_and_names_are_dropped_and_doubts_are_not() -> None:
    assert normalise(r"5\text{ cm}") == "5"
    assert normalise("5 miles") == "5"
    assert normalise("5 thousand") == "5 thousand"
    assert normalise(r"5\text{ or not}") == "5 or not"


@pytest.mark.parametrize("gt", [None, "", " ", True, [5], {"a": 1}, r"\boxed{5} \boxed{6}"])
def test_a_gt_that_states_nothing_is_broken(gt: Any) -> None:
    assert check(ExpressionChecker(), "5", gt).kind == "broken"
