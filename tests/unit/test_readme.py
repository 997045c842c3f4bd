"""The Python of the README."""

import ast
import re
from importlib import import_module
from pathlib import Path

_README = Path(__file__).parents[2] / "README.md"


def test_everything_that_the_readme_imports_is_there() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", _README.read_text(), re.DOTALL | re.MULTILINE)
    statements = [node for block in blocks for node in ast.walk(ast.parse(block)) if isinstance(node, ast.ImportFrom)]
    names = {(node.module or "", alias.name) for node in statements for alias in node.names}
    assert names
    assert [(module, name) for module, name in sorted(names) if not hasattr(import_module(module), name)] == []
