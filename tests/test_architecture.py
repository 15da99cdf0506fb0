"""Who may import whom: docs/architecture.md, held to."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "sparse_flash": ROOT / "sparse_flash",
    "sparse_flash.patterns": ROOT / "patterns",
    "sparse_flash.benchmarks": ROOT / "benchmarks",
}

# From the ground up: each part, and the parts of sparse_flash that it may import. A part is a module or a package.
MAY_IMPORT = {
    "grid": set(),
    "spec": set(),
    "tiles": set(),
    "kernels": set(),
    "terms": set(),
    "scores": {"terms"},
    "pattern": {"grid", "spec"},
    "rules": {"grid", "pattern"},
    "patterns": {"grid", "pattern", "rules"},
    "progress": set(),
    "flex": {"grid", "progress", "tiles"},
    "regroup": {"grid", "tiles"},
    "table": set(),
    "listing": {"table"},
    "block_mask": {"flex", "grid", "listing", "regroup", "table", "tiles"},
    "compiler": {"block_mask", "grid", "pattern", "progress", "rules", "table", "tiles"},
    "backends": {"block_mask", "kernels", "scores", "terms", "tiles"},
    "ops": {"backends", "block_mask", "terms"},
    "watch": set(),
    "keywords": set(),
    "attention": {"backends", "block_mask", "keywords", "ops", "pattern", "scores", "terms", "watch"},
    "moves": {"backends", "kernels", "ops"},
    "packing": {"backends", "block_mask", "grid", "kernels", "moves", "ops", "table", "tiles"},
    "runs": {"backends", "block_mask", "grid", "kernels", "moves", "ops", "packing", "table", "tiles"},
    "varlen": {"attention", "block_mask", "keywords", "moves", "packing", "pattern", "runs"},
    "decode": {"attention", "backends", "block_mask", "keywords", "ops", "pattern", "patterns", "terms", "watch"},
    "check": {"block_mask", "grid", "pattern", "scores", "terms", "watch"},
    "tools": {"backends", "block_mask", "grid", "pattern", "tiles"},
    "tuning": {"backends", "compiler", "kernels"},
    "warming": {"backends", "compiler", "kernels"},
    "integrations": {"attention", "block_mask", "decode", "moves", "pattern", "patterns", "scores", "terms", "varlen"},
    "layer": {"attention", "block_mask", "decode", "pattern", "terms"},
    "selection": {"attention", "block_mask", "grid", "pattern"},
    "": {
        "attention",
        "block_mask",
        "check",
        "compiler",
        "decode",
        "layer",
        "pattern",
        "patterns",
        "selection",
        "varlen",
        "terms",
        "tools",
    },  # sparse_flash/__init__.py: the public names
    "benchmarks": {"", "backends", "block_mask", "compiler", "grid", "pattern", "patterns", "tiles"},
    "cli": {"", "backends", "benchmarks", "block_mask", "compiler", "grid", "pattern", "patterns", "tools", "tuning", "warming"},
}


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((package, *(p for p in parts if p != "__init__")))] = path
    return found


def imports(name: str, path: Path) -> set[str]:
    """The modules that a file imports anywhere in it, by their dotted names; of ``from a import b``, a.b where that is one."""
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            nested = {f"{base}.{alias.name}" for alias in node.names} & modules().keys()
            found.update(nested or {base})
    return found


def part(name: str) -> str | None:
    """The part that a module belongs to, or None for one that is not of this package."""
    root, _, rest = name.partition(".")
    return rest.partition(".")[0] if root == "sparse_flash" else None


IMPORTS = {name: imports(name, path) for name, path in modules().items()}


def test_arrows_only_go_down():
    order = list(MAY_IMPORT)
    for name, allowed in MAY_IMPORT.items():
        assert all(order.index(below) < order.index(name) for below in allowed), name


@pytest.mark.parametrize("name", sorted(IMPORTS))
def test_a_module_imports_only_what_its_part_may(name):
    mine = part(name)
    assert mine in MAY_IMPORT, f"{name} is in no part: give it a place in MAY_IMPORT and in docs/architecture.md"
    theirs = {part(other) for other in IMPORTS[name]} - {None, mine}
    assert theirs <= MAY_IMPORT[mine]


def importers(library: str) -> set[str]:
    return {part(name) for name, found in IMPORTS.items() if any(other.split(".")[0] == library for other in found)}


def test_triton_is_known_to_kernels_and_to_those_that_ask_whether_it_is_there():
    assert importers("triton") <= {"kernels", "backends", "benchmarks", "cli"}
    outside_kernels = {name for name in IMPORTS if part(name) == "backends" and "triton" in IMPORTS[name]}
    assert outside_kernels <= {"sparse_flash.backends.triton"}


def test_patterns_and_the_algebra_know_no_devices():
    assert importers("torch").isdisjoint({"spec", "grid", "tiles", "pattern", "rules", "patterns", "compiler"})


def test_kernels_know_arrays_and_nothing_else_of_the_package():
    assert {part(other) for name in IMPORTS if part(name) == "kernels" for other in IMPORTS[name]} <= {None, "kernels"}


def test_importing_and_compiling_load_neither_triton_nor_what_only_the_command_line_needs():
    program = (
        "import sys, sparse_flash as sf; sf.compile_mask('causal & local(64)', 1000);"
        "print([m for m in ('triton', 'torch._dynamo', 'rich', 'typer', 'matplotlib', 'jinja2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_public_names_are_those_that_programs_outside_call():
    import sparse_flash as sf

    promised = {"attention", "BlockMask", "compile_mask", "Pattern", "register_pattern", "list_patterns", "parse"}
    assert promised <= set(sf.__all__)
    assert all(hasattr(sf, name) for name in sf.__all__)
    assert {"causal", "local", "butterfly"} <= set(sf.__all__)


LACKING_ON_WINDOWS = {"fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty"}


def test_what_windows_lacks_is_imported_only_where_its_absence_is_caught():
    for path in modules().values():
        tree = ast.parse(path.read_text())
        guards = [
            node
            for node in ast.walk(tree)
            if (isinstance(node, ast.Try) and any("ImportError" in ast.unparse(one) for one in node.handlers))
            or (isinstance(node, ast.With) and any("suppress(ImportError" in ast.unparse(one) for one in node.items))
        ]
        caught = {id(node) for guard in guards for node in guard.body}
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", None)]
            assert id(node) in caught or LACKING_ON_WINDOWS.isdisjoint(names), f"{path.name}, line {getattr(node, 'lineno', 0)}"


def test_triton_is_asked_for_on_linux_alone():
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (triton,) = (line for line in asked if line.startswith("triton"))
    assert triton.endswith("sys_platform == 'linux'")
