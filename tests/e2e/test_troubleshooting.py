"""docs/troubleshooting.md says what the program says: each text in quotation marks is one of its own."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gymtune import cli
from gymtune.trainers import TrainConfig

ROOT = Path(cli.__file__).resolve().parent
PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in row.split("|")[1:-1]] for row in PAGE.splitlines() if row.startswith("| ")]
QUOTED = [text for row in ROWS for text in re.findall(r'"([^"]{25,})"', row[0])]


def texts(tree: ast.AST) -> Iterator[str]:
    """Yield each string of a module; what an f-string holds in braces is a NUL."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.fixture(scope="module")
def source() -> str:
    files = [path for name in ("cli.py", "trainers", "agents", "envs", "tools") for path in sorted(
        (ROOT / name).rglob("*.py") if (ROOT / name).is_dir() else [ROOT / name]
    )]  # fmt: skip
    return "\n".join(text for path in files for text in texts(ast.parse(path.read_text(encoding="utf-8"))))


@pytest.mark.parametrize("quoted", QUOTED)
def test_a_quoted_error_is_one_of_ours(quoted: str, source: str):
    pieces = [piece.strip() for piece in quoted.split("...") if piece.strip(" :;,.()")]
    assert pieces
    for piece in pieces:
        assert piece in source, f"nothing says {piece!r}"


def test_metrics_and_keys_are_there():
    table = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    spans = {span for row in ROWS for span in re.findall(r"`([a-z][a-z_]*(?:/[a-z_]+)*)`", row[0])}
    unknown = spans - {"reward", "kl", *TrainConfig.model_fields}
    families = [re.compile(f"{prefix}/[a-z_]+") for prefix in re.findall(r"`([a-z]+)/<[a-z]+>`", table)]
    assert len(spans) > 12
    assert [
        span
        for span in sorted(unknown)
        if f"`{span}`" not in table and not any(family.fullmatch(span) for family in families)
    ] == []


def test_every_stage_has_its_table():
    titles = re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
    assert titles == [
        "Files", "sft", "reward", "dpo, ipo, orpo, simpo", "kto", "ppo", "grpo and its kin", "distill, opd",
        "rollout, evaluation", "models, backend, memory",
    ]  # fmt: skip
    assert all(len(row) == 3 for row in ROWS)
