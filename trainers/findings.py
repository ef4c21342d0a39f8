"""What a preflight finds: a list of all that fits and all that does not, and what was read on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from ..agents.models.inspection import ModelFacts
from ..agents.renderer import Renderer
from ..agents.scorer import Scorer
from ..tools.errors import ConfigError, GymtuneError
from .dataset import Dataset
from .stored import FileDataset

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: what was wanted of it, what came, and how to mend it where it is `wrong`."""

    what: str
    verdict: Literal["fits", "note", "wrong"]
    wanted: str
    came: str
    mend: str = ""


@dataclass(slots=True)
class Preflight:
    """What was found and, where nothing was wrong with it, what was read. Made by `preflight`."""

    findings: list[Finding] = field(default_factory=list)
    errors: list[tuple[str, GymtuneError]] = field(default_factory=list)
    facts: ModelFacts | None = None
    teacher: ModelFacts | None = None
    renderer: Renderer | None = None
    dataset: Dataset | None = None
    held_out: FileDataset | None = None
    rewards: tuple[dict[str, float], Scorer] | None = None

    @property
    def notes(self) -> list[str]:
        """What is worth knowing and stops nobody."""
        return [f"{finding.what}: {finding.came}" for finding in self.findings if finding.verdict == "note"]

    def refuse(self) -> None:
        """Raise what is wrong: an error by itself, several as one ConfigError that lists them."""
        if len(self.errors) == 1:
            raise self.errors[0][1]
        if self.errors:
            listed = " ".join(f"({n}) {what}: {error}." for n, (what, error) in enumerate(self.errors, 1))
            raise ConfigError(f"{len(self.errors)} things are wrong; --preflight shows them as a table. {listed}")

    def look(self, what: str, wanted: str, mend: str, attempt: Callable[[], tuple[T, str]]) -> T | None:
        """Try something that returns what it made and what to say of it; its error is a finding, and None comes back.

        Only what a user can mend is caught.
        """
        try:
            made, came = attempt()
        except GymtuneError as error:
            self.findings.append(Finding(what, "wrong", wanted, str(error), mend))
            self.errors.append((what, error))
            return None
        self.findings.append(Finding(what, "fits", wanted, came))
        return made

    def note(self, what: str, wanted: str, came: str) -> None:
        """Write down what is worth knowing."""
        self.findings.append(Finding(what, "note", wanted, came))
