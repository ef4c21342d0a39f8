"""Surd: exact sums of rational multiples of square roots, such as 1/2 + 3*sqrt(5) or 2 - i. Plain data, bounded sizes.

Square roots of distinct square-free whole numbers (negative ones give the imaginary unit) are linearly independent over
the rationals, so two such sums are equal exactly when their terms are.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import gcd, isqrt

_MAX_BITS = 2048  # of a numerator or denominator: enough for any answer, too little to hang on
_MAX_RADICAND = 10**9  # trial division up to its square root: 31,623 steps
_MAX_EXPONENT = 1000
_MAX_TERMS = 16


class NotExactError(ValueError):
    """The value has no exact form here: too large, a division by zero, a root of a root."""


@dataclass(frozen=True, slots=True)
class Surd:
    """A sum of `coefficient * sqrt(radicand)`: radicands are square-free, coefficients are not 0."""

    terms: tuple[tuple[int, Fraction], ...]

    @classmethod
    def of(cls, number: Fraction | int) -> Surd:
        """Return a rational number as a surd."""
        return cls.collect([(1, Fraction(number))])

    @classmethod
    def collect(cls, terms: list[tuple[int, Fraction]]) -> Surd:
        """Return the sum of terms with square-free radicands. Raises NotExactError when it grows too large."""
        total: dict[int, Fraction] = {}
        for radicand, coefficient in terms:
            total[radicand] = total.get(radicand, Fraction(0)) + coefficient
        kept = tuple(sorted((radicand, c) for radicand, c in total.items() if c))
        for radicand, c in kept:
            bits = max(c.numerator.bit_length(), c.denominator.bit_length())
            if bits > _MAX_BITS or abs(radicand) > _MAX_RADICAND or len(kept) > _MAX_TERMS:
                raise NotExactError("too large")
        return cls(kept)

    @property
    def rational(self) -> Fraction | None:
        """The value as a fraction, or None when there is a root in it."""
        if not self.terms:
            return Fraction(0)
        return self.terms[0][1] if len(self.terms) == 1 and self.terms[0][0] == 1 else None

    def __add__(self, other: Surd) -> Surd:
        return Surd.collect([*self.terms, *other.terms])

    def __neg__(self) -> Surd:
        return Surd(tuple((radicand, -c) for radicand, c in self.terms))

    def __sub__(self, other: Surd) -> Surd:
        return self + -other

    def __mul__(self, other: Surd) -> Surd:
        products = []
        for a, x in self.terms:
            for b, y in other.terms:
                common = gcd(a, b)
                sign = -1 if a < 0 and b < 0 else 1  # i * i = -1
                products.append((a * b // common**2, x * y * common * sign))
        return Surd.collect(products)

    def inverse(self) -> Surd:
        """Return 1 / self, by conjugates. Raises NotExactError for 0."""
        number = self.rational
        if number is not None:
            if number == 0:
                raise NotExactError("division by zero")
            return Surd.of(1 / number)
        root = next(radicand for radicand, _ in self.terms if radicand != 1)
        factor = -1 if root < 0 else _smallest_factor(root)
        split = [(r, -c if (r < 0 if factor == -1 else r % factor == 0) else c) for r, c in self.terms]
        conjugate = Surd.collect(split)  # the other sign for every root that holds the factor
        return conjugate * (self * conjugate).inverse()

    def power(self, exponent: int) -> Surd:
        """Return self to a whole power. Raises NotExactError when it grows too large."""
        if abs(exponent) > _MAX_EXPONENT:
            raise NotExactError("too large an exponent")
        result, base = Surd.of(1), self if exponent >= 0 else self.inverse()
        left = abs(exponent)
        while left:
            if left % 2:
                result = result * base
            left //= 2
            base = base * base if left else base
        return result

    def root(self) -> Surd:
        """Return the square root of a rational number. Raises NotExactError for anything else."""
        number = self.rational
        if number is None:
            raise NotExactError("a root of a root")
        outside, radicand = _square_free(number.numerator * number.denominator)
        return Surd.collect([(radicand, Fraction(outside, number.denominator))])


def _square_free(number: int) -> tuple[int, int]:
    """Return (a, b) with number = a*a*b and b square-free."""
    sign, rest = (-1 if number < 0 else 1), abs(number)
    whole = isqrt(rest)
    if whole * whole == rest:
        return whole, sign
    if rest > _MAX_RADICAND:
        raise NotExactError("too large a radicand")
    outside, factor = 1, 2
    while factor * factor <= rest:
        while rest % (factor * factor) == 0:
            rest //= factor * factor
            outside *= factor
        factor += 1
    return outside, sign * rest


def _smallest_factor(number: int) -> int:
    return next((factor for factor in range(2, isqrt(number) + 1) if number % factor == 0), number)
