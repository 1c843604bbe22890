"""The direction of imports: cli -> run -> trainer -> engine -> {model, memory, parallel} -> ops -> kernels."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "fullstride"
BASE = {"errors", "files", "version"}  # anyone may use these

# layer -> the layers that it may import besides itself
ALLOWED = {
    "kernels": set(),
    "ops": {"kernels"},
    "model": {"ops"},
    "memory": {"ops"},
    "parallel": {"ops"},
    "engine": {"model", "memory", "parallel", "ops", "config"},
    "trainer": {"engine", "model", "memory", "parallel", "ops", "config"},
    "data": set(),
    "run": {"trainer", "engine", "model", "ops", "data", "config"},
    "cli": {"run", "trainer", "engine", "model", "data", "config"},
    "config": set(),
}


def layer_of(file: Path) -> str:
    relative = file.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports(file: Path) -> set[tuple[str, str]]:
    """(layer, module) of every import of our own, inside functions too; those for type checkers alone do not count."""
    found = set()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            module = str(node.module)
            names = [f"{module}.{alias.name}" if module == "fullstride" else module for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.split(".")[0] == "fullstride" and "." in name:
                found.add((name.split(".")[1], name))
    return found


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_go_down(file: Path) -> None:
    layer = layer_of(file)
    if layer in ("__init__", "__main__"):
        return
    allowed = ALLOWED.get(layer, set()) | BASE | {layer}
    wrong = {module for target, module in imports(file) if target not in allowed}
    assert not wrong, f"{layer} must not import {wrong}"


def test_import_needs_only_torch_numpy_safetensors() -> None:
    """A GPU machine may have nothing else."""
    code = (
        "import sys\n"
        "import torch, numpy, safetensors.torch\n"
        "with_torch = set(sys.modules)\n"
        "import fullstride\n"
        "fullstride.Trainer, fullstride.Options, fullstride.ModelConfig\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - with_torch}\n"
        "print(*sorted(new - {'fullstride'} - set(sys.stdlib_module_names)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
