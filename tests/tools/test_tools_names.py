import subprocess
import sys

import gymtune.tools


def test_all_is_sorted_and_there() -> None:
    names = gymtune.tools.__all__
    assert names == sorted(set(names))
    assert all(hasattr(gymtune.tools, name) for name in names)


def test_tools_import_neither_torch_nor_transformers() -> None:
    code = "import sys, gymtune.tools; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
