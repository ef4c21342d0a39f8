"""The house, read from the syntax trees: direction of imports, no cycles, sizes, docstrings, names handed on.

Each rule is a function from modules to complaints. It is run over the package, and over a small tree made to break it.
"""

import ast
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = ["tools", "rewards", "envs", "agents", "trainers", "cli"]  # each imports only those before it
NOT_THE_PACKAGE = {"tests", "docs", "benchmarks", "build", "dist"}
HEAVY = {"torch", "transformers", "tokenizers"}
LIGHT = ("gymtune", "gymtune.tools", "gymtune.rewards", "gymtune.envs", "gymtune.cli")  # import nothing heavy
LIGHT_FILES = ("gymtune.trainers.config",)
MAX_FILE, MAX_FUNCTION, MAX_NESTING = 350, 60, 4
MAX_CLI = 900  # lists of options: one command after another, each with a body of a few lines
VAGUE = {"utils", "util", "helpers", "helper", "common", "misc"}

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Module:
    """One module: dotted name, whether it is a package's `__init__`, text and tree."""

    name: str
    is_package: bool
    text: str
    tree: ast.Module

    @property
    def floor(self) -> str:
        return (self.name.split(".") + [""])[1]

    def resolve(self, node: ast.ImportFrom) -> str:
        """Return the absolute name of what a `from` import names."""
        if node.level == 0:
            return node.module or ""
        parts = self.name.split(".")
        base = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*base, *filter(None, [node.module])])


Modules = dict[str, Module]
Rule = Callable[[Modules], list[str]]


def build(sources: dict[str, str]) -> Modules:
    """Read modules from `{path below the root: text}`."""
    modules = {}
    for path, text in sources.items():
        parts = ["gymtune", *Path(path).with_suffix("").parts]
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        modules[name] = Module(name, is_package, text, ast.parse(text))
    return modules


def read_package() -> Modules:
    files = [
        path.relative_to(ROOT)
        for top in ROOT.iterdir()
        if not top.name.startswith(".") and top.name not in NOT_THE_PACKAGE
        for path in ([top] if top.suffix == ".py" else sorted(top.rglob("*.py")))
    ]
    return build({str(path): (ROOT / path).read_text(encoding="utf-8") for path in files})


def at_import(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements that run when a module is imported: none in functions, none for type checkers only."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            yield from at_import(ast.Module(child.orelse, []))
            continue
        if isinstance(child, ast.stmt):
            yield child
        yield from at_import(child)


def imports(module: Module, modules: Modules, *, lazy: bool) -> Iterator[tuple[str, int]]:
    """Yield (imported module, line), of the package and of others; with `lazy` those inside functions too."""
    for node in ast.walk(module.tree) if lazy else at_import(module.tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            target = module.resolve(node)
            for alias in node.names:
                inner = f"{target}.{alias.name}"
                yield (inner if inner in modules else target), node.lineno


def direction(modules: Modules) -> list[str]:
    """`cli -> trainers -> agents -> envs -> rewards -> tools`, and the package's own `__init__` imports none."""
    found = []
    for module in modules.values():
        own = FLOORS.index(module.floor) if module.floor in FLOORS else -1
        for target, line in imports(module, modules, lazy=True):
            floor = (target.split(".") + [""])[1]
            if target.split(".")[0] != "gymtune" or target == "gymtune":
                continue
            if floor not in FLOORS or FLOORS.index(floor) > own:
                found.append(f"{module.name}:{line} imports {target}, which is not below it")
    return found


def relative(modules: Modules) -> list[str]:
    """Inside the package imports are relative; `cli` may name the package, to run as a script."""
    return [
        f"{module.name}:{node.lineno} imports gymtune by its absolute name"
        for module in modules.values()
        if module.name != "gymtune.cli"
        for node in ast.walk(module.tree)
        if (isinstance(node, ast.Import) and any(a.name.split(".")[0] == "gymtune" for a in node.names))
        or (isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "gymtune")
    ]


def cycles(modules: Modules) -> list[str]:
    """No module imports itself by way of others, not even lazily."""
    graph = {m.name: {t for t, _ in imports(m, modules, lazy=True) if t in modules} for m in modules.values()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [f"import cycle: {' <- '.join(error.args[1])}"]
    return []


def light(modules: Modules) -> list[str]:
    """What must import quickly reaches no torch at import, by whatever way."""
    found = []
    roots = [n for n in modules if n in LIGHT or n.startswith(tuple(f"{p}." for p in LIGHT if p != "gymtune"))]
    for root in roots:
        todo, seen = [root], set()
        while todo:
            name = todo.pop()
            if name in seen:
                continue
            seen.add(name)
            for target, line in imports(modules[name], modules, lazy=False):
                if target.split(".")[0] in HEAVY:
                    found.append(f"{root} imports {target} (at {name}:{line})")
                parts = target.split(".")
                todo += [p for i in range(1, len(parts) + 1) if (p := ".".join(parts[:i])) in modules]
    for name in LIGHT_FILES:
        heavy = imports(modules[name], modules, lazy=False) if name in modules else []
        found += [f"{name}:{line} imports {target}" for target, line in heavy if target.split(".")[0] in HEAVY]
    return found


def bound_names(module: Module) -> set[str]:
    """Return the names that a module's top level binds; with `__getattr__` also those it declares to checkers."""
    names: set[str] = set()
    lazy = any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in module.tree.body)
    for node in ast.walk(module.tree) if lazy else at_import(module.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
    return names | {n.name for n in module.tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}


def names_exist(modules: Modules) -> list[str]:
    """What `__all__` lists is there, once; what one module imports from another is there, or is a module."""
    found = []
    for module in modules.values():
        bound = bound_names(module)
        for node in module.tree.body:
            if isinstance(node, ast.Assign) and any(
                isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets
            ):
                names = ast.literal_eval(node.value)
                found += [f"{module.name}: __all__ lists {name!r}, which is not there" for name in set(names) - bound]
                found += [f"{module.name}: __all__ lists a name twice"] * (len(set(names)) < len(names))
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom) and (target := module.resolve(node)) in modules:
                known = bound_names(modules[target]) | {
                    n.rpartition(".")[2] for n in modules if n.startswith(f"{target}.")
                }
                found += [f"{module.name}: {target} has no {a.name!r}" for a in node.names if a.name not in known]
    return found


def depth(node: ast.AST) -> int:
    """Return how deep blocks nest inside `node`; `elif` is no level of its own."""
    blocks = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try, ast.Match)
    deepest = 0
    for child in ast.iter_child_nodes(node):
        chained = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, depth(child) + (isinstance(child, blocks) and not chained))
    return deepest


def sizes(modules: Modules) -> list[str]:
    """Files, functions and nesting stay within the house numbers; ruff counts arguments, statements and branches."""
    found = []
    for module in modules.values():
        lines, most = module.text.count("\n"), MAX_CLI if module.name == "gymtune.cli" else MAX_FILE
        if lines > most:
            found.append(f"{module.name} has {lines} lines, {most} are allowed")
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            numbers = {
                "lines": ((node.end_lineno or 0) - node.lineno + 1, MAX_FUNCTION),
                "levels": (depth(node), MAX_NESTING),
            }
            if module.name == "gymtune.cli":
                del numbers["lines"]
            for what, (number, allowed) in numbers.items():
                if number > allowed:
                    found.append(f"{module.name}.{node.name} has {number} {what}, {allowed} are allowed")
    return found


def no_print(modules: Modules) -> list[str]:
    """Only `cli` prints."""
    return [
        f"{module.name}:{node.lineno} prints"
        for module in modules.values()
        if module.name != "gymtune.cli"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def named(modules: Modules) -> list[str]:
    """No module is named for what it is not."""
    return [f"{name} says nothing by its name" for name in modules if name.rpartition(".")[2] in VAGUE]


def documented(modules: Modules) -> list[str]:
    """Every module, public class and public function has a docstring."""
    found = []
    for module in modules.values():
        todo: list[tuple[str, ast.Module | Definition]] = [(module.name, module.tree)]
        while todo:
            name, node = todo.pop()
            if not ast.get_docstring(node):
                found.append(f"{name} has no docstring")
            if isinstance(node, ast.Module | ast.ClassDef):
                inner = [n for n in node.body if isinstance(n, Definition) and not n.name.startswith("_")]
                todo += [(f"{name}.{n.name}", n) for n in inner if "overload" not in map(ast.unparse, n.decorator_list)]
    return found


#: rule -> a tree that breaks it, and a piece of the complaint
BROKEN: dict[Rule, tuple[dict[str, str], str]] = {
    direction: (
        {"tools/a.py": "def f():\n    from ..rewards import b", "rewards/b.py": ""},
        "tools.a:2 imports gymtune.rew",
    ),
    relative: ({"tools/a.py": "import gymtune.tools.b", "tools/b.py": ""}, "tools.a:1 imports gymtune by"),
    cycles: ({"tools/a.py": "from . import b", "tools/b.py": "from .a import x"}, "import cycle"),
    light: (
        {"envs/a.py": "from ..tools.b import c", "tools/b.py": "", "tools/__init__.py": "if 1:\n    import torch.nn"},
        "envs.a imports torch.nn (at gymtune.tools:2)",
    ),
    names_exist: ({"tools/a.py": "from .b import x, y\n__all__ = ['x', 'z']", "tools/b.py": "x = 1"}, "has no 'y'"),
    sizes: ({"tools/a.py": "def f():\n" + "    pass\n" * 60 + "x = 1\n" * 300}, "f has 61 lines"),
    no_print: ({"tools/a.py": "print()"}, "tools.a:1 prints"),
    named: ({"tools/utils.py": ""}, "utils says nothing"),
    documented: ({"tools/a.py": '"""A."""\nclass A:\n    """A."""\n    def f(self): ...'}, "a.A.f has no docstring"),
}


@pytest.mark.parametrize("rule", BROKEN, ids=lambda rule: rule.__name__)
def test_the_package_keeps(rule: Rule) -> None:
    assert rule(read_package()) == []


@pytest.mark.parametrize("rule", BROKEN, ids=lambda rule: rule.__name__)
def test_a_breach_is_seen(rule: Rule) -> None:
    sources, complaint = BROKEN[rule]
    assert complaint in "\n".join(rule(build(sources)))


def test_more_breaches_are_seen() -> None:
    deep = "def f(a):\n" + "".join(f"{'  ' * n}if a:\n" for n in range(1, 6)) + "  " * 6 + "pass"
    assert sizes(build({"tools/a.py": deep})) == ["gymtune.tools.a.f has 5 levels, 4 are allowed"]
    assert sizes(build({"cli.py": "\n" * 901})) == ["gymtune.cli has 901 lines, 900 are allowed"]
    assert light(build({"trainers/config.py": "import torch"})) == ["gymtune.trainers.config:1 imports torch"]
    assert light(build({"envs/a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"})) == []
    assert sizes(build({"tools/a.py": "\n" * 351})) == ["gymtune.tools.a has 351 lines, 350 are allowed"]
    assert "__all__ lists 'z'" in names_exist(build({"tools/a.py": "__all__ = ['z']"}))[0]
    assert direction(build({"__init__.py": "from .tools import a", "tools/a.py": ""})) != []
    assert cycles(build({"tools/a.py": "def f():\n    from . import b", "tools/b.py": "from . import a"})) != []


def test_the_root_holds_two_modules() -> None:
    assert {path.name for path in ROOT.glob("*.py")} <= {"__init__.py", "cli.py"}


def test_pyproject_lists_every_package() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    modules = read_package()
    assert listed == list(dict.fromkeys(listed))
    assert set(listed) == {module.name for module in modules.values() if module.is_package}
    homes = {module.name.rpartition(".")[0] for module in modules.values() if not module.is_package}
    assert homes <= set(listed), "a folder of modules has no __init__.py"


def test_files_are_short_by_habit() -> None:
    lengths = sorted(module.text.count("\n") for module in read_package().values())
    assert lengths[len(lengths) // 2] <= 120


def test_tests_mirror_the_folders() -> None:
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()}
    assert set(FLOORS) - {"cli"} <= folders
    assert list((ROOT / "tests").rglob("__init__.py")) == []  # tests are no package
