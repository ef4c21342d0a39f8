"""A new env, as the command writes it: its own test passes, its contract holds, bad names are refused."""

import subprocess
import sys
from pathlib import Path

import pytest

from gymtune.envs.scaffold import env_id, new_env
from gymtune.tools import ConfigError


@pytest.mark.parametrize(("name", "wanted"), [("demo_env", "demo_env:DemoEnv-v0"), ("words", "words:WordsEnv-v0")])
def test_a_new_env_passes_its_own_test(tmp_path: Path, name: str, wanted: str) -> None:
    written = [path.name for path in new_env(name, tmp_path)]
    assert written == ["README.md", "__init__.py", "checker.py", "env.py", f"test_{name}.py", "tool.py"]
    assert env_id(name) == wanted
    assert len((tmp_path / name / "env.py").read_text().splitlines()) < 40
    pytest_run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", name]
    found = subprocess.run(pytest_run, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "3 passed" in found.stdout


@pytest.mark.parametrize("name", ["", "My_Env", "my-env", "class", "1st", "../up"])
def test_what_cannot_be_a_package_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="must be a Python package's"):
        new_env(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigError, match="is there already"):
        new_env("mine", tmp_path)
