"""The pages do what they say: every block is run, every option, key, metric, file and link that they name is there.

Per page, in order and in one folder of its own:

- a `python` or `toml` block that begins with `# name.py` or `# name.toml` is written to that file;
- any other `python` block is run; a `text` block straight below it is its output, to the letter;
- in a `console` block, `$ gymtune ...` is run by the console script's own function (and must end well, unless
  ` ; echo $?` shows how it ends), `$ export PYTHONPATH=...` is heeded; other programs are not run; a `text` block
  straight below it is the output, but for white space and what `...` stands for;
- a `json` block is a trajectory that can be read;
- every other block is not run.

Sizes are made smaller first, by `SMALLER`; nothing else is changed.
"""

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE, OutputChecker
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import typer.main

from gymtune import cli
from gymtune.agents import Trajectory, Turn
from gymtune.trainers import TrainConfig
from gymtune.trainers.presets import PRESETS

ROOT = Path(cli.__file__).resolve().parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

#: Sizes of the pages -> sizes of this test, whether written `--max-steps 150`, `max_steps=150` or `max_steps = 150`.
SMALLER = {
    "-n": 20, "--max-steps": 2, "--warmup-steps": 1, "--save-steps": 1, "--batch-size": 8, "--prompts-per-step": 2,
    "--num-generations": 2,
}  # fmt: skip
_SIZE = re.compile(r"(?<!\w)(?P<set>-n |--[a-z]+(?:-[a-z]+)* |[a-z]+(?:_[a-z]+)* ?= ?)(?P<size>\d+)")
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")
_FILE = re.compile(r"# (\w+\.(?:py|toml))\n")
_STATUS = [";", "echo", "$?"]


@dataclass(frozen=True)
class Block:
    """A fenced block: language, text, the number of lines before it, and whether it stands straight below another."""

    language: str
    text: str
    line: int
    follows: bool


def blocks(text: str) -> list[Block]:
    found, end = [], -1
    for match in _BLOCK.finditer(text):
        follows = end >= 0 and not text[end : match.start()].strip()
        found.append(Block(match[1], match[2], text.count("\n", 0, match.start(2)), follows))
        end = match.end()
    return found


def smaller(text: str) -> str:
    def shrink(match: re.Match[str]) -> str:
        name = match["set"].rstrip(" =")
        name = name if name.startswith("-") else f"--{name.replace('_', '-')}"
        return f"{match['set']}{min(SMALLER[name], int(match['size']))}" if name in SMALLER else match[0]

    return _SIZE.sub(shrink, text)


def shortened(text: str, output: str) -> bool:
    """Tell whether a page's text is the output, but for white space and what `...` stands for."""
    return OutputChecker().check_output(text, output, ELLIPSIS | NORMALIZE_WHITESPACE)


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each line that begins with `$`; a backslash at its end goes on with the next."""
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            yield shlex.split(line[2:], comments=True)


class Reader:
    """Somebody who types a page into a fresh folder."""

    def __init__(self, page: Path, folder: Path, monkeypatch: Any, capsys: Any) -> None:
        self.page, self.folder, self.monkeypatch, self.capsys = page, folder, monkeypatch, capsys
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.modules: list[str] = []
        monkeypatch.chdir(folder)
        monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)

    def read(self) -> None:
        said, exact = None, True
        for block in blocks(self.page.read_text(encoding="utf-8")):
            text, file = smaller(block.text), _FILE.match(block.text)
            if file and block.language in ("python", "toml"):
                (self.folder / file[1]).write_text(text, encoding="utf-8")
                self.modules.append(Path(file[1]).stem)
            elif block.language == "python":
                self.capsys.readouterr()
                exec(compile("\n" * block.line + text, self.page, "exec"), self.names)
                said, exact = self.capsys.readouterr().out, True
                continue
            elif block.language == "console":
                self.capsys.readouterr()
                for words in commands(text):
                    self.type(words, block.line)
                said, exact = self.capsys.readouterr().out, False
                continue
            elif block.language == "text" and block.follows and said is not None:
                alike = said == block.text or (not exact and shortened(block.text, said))
                assert alike, f"{self.page}:{block.line}: this is not what the block above prints, but:\n{said}"
            elif block.language == "json":
                Trajectory.model_validate_json(text)
            said = None

    def type(self, words: list[str], line: int) -> None:
        if words[0] == "export":
            name, _, value = words[1].partition("=")
            assert name == "PYTHONPATH", words
            self.monkeypatch.syspath_prepend(str(self.folder / value))
        elif words[0] == "gymtune":
            asked = words[-3:] == _STATUS
            self.monkeypatch.setattr(sys, "argv", words[:-3] if asked else words)
            with pytest.raises(SystemExit) as ended:
                cli.main()
            if asked:
                print(ended.value.code or 0)
                return
            assert not ended.value.code, f"{self.page}:{line}: {shlex.join(words)}\n{self.capsys.readouterr().err}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: Any, capsys: Any):
    registered, reader = set(gymnasium.registry), Reader(page, tmp_path, monkeypatch, capsys)
    try:
        reader.read()
    finally:
        for name in reader.modules:
            sys.modules.pop(name, None)
        for env_id in set(gymnasium.registry) - registered:
            del gymnasium.registry[env_id]
    names = [re.escape(name).replace("<metric>", "[\\w/]+") for name in metric_names()]
    pattern = re.compile("|".join(re.sub(r"<\w+>", r"\\w+", name) for name in names))
    for file in tmp_path.rglob("metrics.jsonl"):
        unknown = [key for key in re.findall(r'"([^"]+)": ', file.read_text()) if not pattern.fullmatch(key)]
        assert not unknown, "docs/training.md lists every metric"


def metric_names() -> list[str]:
    """Return the first column of the table of metrics."""
    text = (ROOT / "docs/training.md").read_text(encoding="utf-8").partition("\n| metric |")[2].partition("\n\n")[0]
    return [name for row in text.splitlines()[2:] for name in _SPAN.findall(row.split("|")[1])]


def test_every_metric_of_the_table_is_written_somewhere():
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "trainers").glob("*.py"))
    names = metric_names()
    assert len(names) == len(set(names)) > 20
    assert [name for name in names if "<" not in name and f'"{name}"' not in source] == []


def test_every_field_of_a_trajectory_is_in_its_table():
    rows = re.findall(r"^\| (`[^|]+) \|", (ROOT / "docs/trajectories.md").read_text(encoding="utf-8"), re.MULTILINE)
    fields = {*Trajectory.model_fields, *Trajectory.model_computed_fields, *Turn.model_fields}
    assert {name for row in rows for name in _SPAN.findall(row)} == fields


def test_every_key_of_a_run_is_in_the_tables_with_its_default_and_its_readers():
    text = (ROOT / "docs/training.md").read_text(encoding="utf-8").partition("\n## Every key\n")[2]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in text.splitlines() if "|" in line]
    table = {row[0].strip("`"): row for row in rows if row[0].startswith("`")}
    assert table.keys() == TrainConfig.model_fields.keys()
    for key, field in TrainConfig.model_fields.items():
        default = field.get_default(call_default_factory=True, validated_data={})
        shown = "required" if field.is_required() else f"`{'none' if default is None else json.dumps(default)}`"
        readers = {name for name, preset in PRESETS.items() if key in preset.reads}
        named = set(_SPAN.findall(table[key][2]))
        told = set(PRESETS) - named if table[key][2].startswith("all") else named
        meaning = table[key][3].replace("\\|", "|")  # a bar in a cell is written so
        assert (table[key][1], told, meaning) == (shown, readers, field.description), key


# -- what the pages name -----------------------------------------------------------------------------------------------


def options_of(words: list[str]) -> tuple[str, set[str]]:
    """Return the command that `words` begin with, and its options. A command that is not there is an error."""
    command, path = typer.main.get_command(cli.app), ["gymtune"]
    found = {"--help", *(option for parameter in command.params for option in parameter.opts)}
    for word in words:
        if not hasattr(command, "commands") or not re.fullmatch(r"[a-z]+", word):
            break
        assert word in command.commands, f"there is no command {' '.join([*path, word])!r}"
        command, path = command.commands[word], [*path, word]
        found = {"--help", *(option for parameter in command.params for option in parameter.opts)}
    return " ".join(path), found


def every_option(command: Any = None) -> set[str]:
    command = command or typer.main.get_command(cli.app)
    inner = [every_option(each) for each in getattr(command, "commands", {}).values()]
    return {"--help"}.union(*inner, *(parameter.opts for parameter in command.params))


def uses(text: str) -> Iterator[list[str]]:
    """Yield what a page says of the command line, word by word: its console blocks, and its code spans in prose."""
    for block in blocks(text):
        if block.language == "console":
            yield from (words for words in commands(block.text) if words[0] == "gymtune")
    for span in _SPAN.findall(_BLOCK.sub("", text)):
        if span.startswith(("--", "gymtune ")):
            yield span.split()


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_options_and_keys_exist(page: Path):
    for words in uses(page.read_text(encoding="utf-8")):
        where, known = options_of(words[1:]) if words[0] == "gymtune" else ("gymtune", every_option())
        for word in words:
            if re.fullmatch(r"--?[a-z].*", word):
                assert word in known, f"{page.name}: {where} has no option {word}"
        for before, word in pairwise(words):
            if before == "--set" and "=" in word and word != "KEY=VALUE":
                assert re.split("[.=]", word)[0] in TrainConfig.model_fields, f"{page.name}: no key in {word}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_files_and_links_exist(page: Path):
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    places = r"[\w.]+(/[\w.]+)+\.(py|md|jinja|txt|toml)|\w+/"
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    files = [span for span in _SPAN.findall(text) if re.fullmatch(places, span)]
    missing = [link for link in links if not (page.parent / link).exists()]
    assert missing + [file for file in files if not (ROOT / file).exists()] == []


def test_the_reader_can_tell():
    """A size that is made smaller, a command across two lines, a block straight below another."""
    assert smaller("-n 6000 --max-steps 150 --seed 7 --set warmup_steps=10") == (
        "-n 20 --max-steps 2 --seed 7 --set warmup_steps=1"
    )
    assert smaller("max_steps = 150\nn=3, batch_size=4 -n 10") == "max_steps = 2\nn=3, batch_size=4 -n 10"
    typed = commands("$ gymtune a \\\n    --b 1  # why\nout\n$ make x\n")
    assert list(typed) == [["gymtune", "a", "--b", "1"], ["make", "x"]]
    assert shortened("a b ... d\n1\n", "a  b\n c d \n1\n")
    assert not shortened("a ... d\n1\n", "a b c d\n0\n")
    found = blocks("a\n```python\nx\n```\n\n```text\ny\n```\nwords\n```text\nz\n```\n")
    assert [(b.text, b.line, b.follows) for b in found] == [("x\n", 2, False), ("y\n", 6, True), ("z\n", 10, False)]
    with pytest.raises(AssertionError, match="no command 'gymtune audit'"):
        options_of(["audit"])
    assert "--max-steps" not in options_of(["rollout"])[1]
