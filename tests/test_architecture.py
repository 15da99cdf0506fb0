"""Who may import whom, as docs/architecture.md says."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "sparse_flash": ROOT / "sparse_flash",
    "sparse_flash.patterns": ROOT / "patterns",
    "sparse_flash.benchmarks": ROOT / "benchmarks",
}


def floors() -> dict[str, int]:
    """The rooms in docs/architecture.md's table and their floors, counted from the roof."""
    lines = (ROOT / "docs" / "architecture.md").read_text().splitlines()
    rows = [re.match(r"\| (\d+) \| (.*?) \|", line) for line in lines]
    return {room: int(row[1]) for row in rows if row for room in re.findall(r"`([^`]+)`", row[2])}


FLOORS = floors()


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((package, *(p for p in parts if p != "__init__")))] = path
    return found


@cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(path.read_text()) for name, path in modules().items()}


def imports(name: str, tree: ast.AST) -> set[str]:
    """The modules that a module's tree imports anywhere, by dotted name; for ``from a import b``, a.b if that is a module."""
    package = name if modules()[name].stem == "__init__" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(tree):
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


def room(name: str) -> str | None:
    """The room of a module, or None for one that is not of this package."""
    root, *inner = name.split(".")
    if root != "sparse_flash":
        return None
    if inner in (["__main__"], ["names"]):
        return "cli" if inner == ["__main__"] else root
    return "/".join(inner[:2]) if inner[:1] == ["kernels"] and len(inner) > 1 else inner[0] if inner else root


IMPORTS = {name: imports(name, tree) for name, tree in trees().items()}


def test_the_table_names_every_room_and_no_other():
    # sparse_flash.kernels itself only documents what its rooms have in common; it holds no code.
    assert not IMPORTS["sparse_flash.kernels"]
    assert {room(name) for name in IMPORTS if name != "sparse_flash.kernels"} == FLOORS.keys()
    assert len({name.split("/")[0] for name in FLOORS} - {"sparse_flash"}) <= 16  # kernels count as one


@pytest.mark.parametrize("name", sorted(IMPORTS.keys() - {"sparse_flash.kernels"}))
def test_a_module_imports_only_rooms_of_floors_below(name):
    theirs = {room(other) for other in IMPORTS[name]} - {None, room(name)}
    if name == "sparse_flash":  # sf.bench, which is loaded at its first use
        theirs -= {"benchmarks"}
    assert all(FLOORS[room(name)] < FLOORS[other] for other in theirs), theirs


class OfTypes(ast.NodeTransformer):
    """Removes what only type checkers read."""

    def visit_If(self, node):
        return None if ast.unparse(node.test) == "TYPE_CHECKING" else node


def test_modules_import_each_other_in_no_circle_also_within_functions():
    running = {name: OfTypes().visit(ast.parse(path.read_text())) for name, path in modules().items()}
    waiting = {name: imports(name, tree) & modules().keys() - {name} for name, tree in running.items()}
    # sf.bench and sf.context_parallel are loaded at their first use.
    waiting.pop("sparse_flash")
    while free := [name for name in waiting if not waiting[name] & waiting.keys()]:
        for name in free:
            del waiting[name]
    assert not waiting


def test_every_room_says_what_lives_there():
    for name in FLOORS:
        module = "sparse_flash" if name == "sparse_flash" else f"sparse_flash.{name.replace('/', '.')}"
        assert ast.get_docstring(trees()[module]), f"{module} has no docstring"


def test_no_two_classes_have_one_name():
    named = [(node.name, name) for name, tree in trees().items() for node in tree.body if isinstance(node, ast.ClassDef)]
    count = Counter(cls for cls, _ in named)
    assert count and {cls: [name for other, name in named if other == cls] for cls in count if count[cls] > 1} == {}


def importers(library: str) -> set[str]:
    return {room(name) for name, found in IMPORTS.items() if any(other.split(".")[0] == library for other in found)}


def test_triton_is_known_to_kernels_and_to_those_that_ask_whether_it_is_there():
    kernels = {name for name in FLOORS if name.startswith("kernels/")}
    assert importers("triton") <= {*kernels, "backends", "benchmarks", "cli"}
    outside_kernels = {name for name in IMPORTS if room(name) == "backends" and "triton" in IMPORTS[name]}
    assert outside_kernels <= {"sparse_flash.backends.triton"}


def test_patterns_and_the_algebra_know_no_devices():
    modules_of_tables = "block_mask build cache document_blocks from_flex from_maps methods reorder select_blocks table"
    of_tables = {f"sparse_flash.masks.{name}" for name in modules_of_tables.split()}
    knowing = {name for name in IMPORTS if any(other.split(".")[0] == "torch" for other in IMPORTS[name])}
    assert {name for name in knowing if room(name) in ("masks", "patterns")} == of_tables


PRIVATE_OF_TORCH = re.compile(r"\btorch\.(\w+\.)*_[A-Za-z]\w*|\b_dynamo_\w+|ops\.aten\._\w+")


def test_private_names_of_pytorch_are_in_one_place():
    """In room ``compat``, and in ``streams``, because kernels import nothing from the package."""
    found = set()
    for name, tree in trees().items():
        for node in ast.walk(tree):
            dotted = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            of_import = [node.module or "", *(a.name for a in node.names)] if isinstance(node, ast.ImportFrom) else []
            private = PRIVATE_OF_TORCH.search(dotted.replace("__version__", "").replace("torch.__", ""))
            if private or (of_import and of_import[0].startswith("torch") and re.search(r"(^|\.)_", " ".join(of_import))):
                found.add(name)
    assert found == {"sparse_flash.compat.constants", "sparse_flash.compat.dynamo", "sparse_flash.kernels.common.streams"}


def test_private_names_of_triton_are_imported_in_one_module():
    found = set()
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("triton"):
                private = re.search(r"(^|[. ])_[a-zA-Z]", " ".join([node.module, *(alias.name for alias in node.names)]))
                found |= {name} if private else set()
    assert found == {"sparse_flash.kernels.common.gluon"}


def test_kernels_know_arrays_and_nothing_else_of_the_package():
    theirs = {room(other) for name in IMPORTS if "kernels" in room(name) for other in IMPORTS[name]} - {None}
    assert theirs and all(name.startswith("kernels/") for name in theirs)


def test_no_test_skips_a_module_of_this_package_that_it_does_not_find():
    for path in (ROOT / "tests").rglob("*.py"):
        assert not re.search(r"(importorskip|sys\.modules\.get)\(.sparse_flash", path.read_text()), path.name


def test_importing_and_compiling_load_neither_triton_nor_what_only_some_programs_need():
    program = (
        "import sys, sparse_flash as sf; sf.compile_mask('causal & local(64)', 1000);"
        "late = ('triton', 'torch._dynamo', 'sparse_flash.parallel', 'sparse_flash.benchmarks', 'rich', 'typer', 'jinja2');"
        "print([m for m in late if m in sys.modules])"
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
    for name, tree in trees().items():
        guards = [
            node
            for node in ast.walk(tree)
            if (isinstance(node, ast.Try) and any("ImportError" in ast.unparse(one) for one in node.handlers))
            or (isinstance(node, ast.With) and any("suppress(ImportError" in ast.unparse(one) for one in node.items))
        ]
        caught = {id(node) for guard in guards for node in guard.body}
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", None)]
            assert id(node) in caught or LACKING_ON_WINDOWS.isdisjoint(names), f"{name}, line {getattr(node, 'lineno', 0)}"


PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_triton_is_asked_for_on_linux_alone():
    (triton,) = (line for line in PYPROJECT["project"]["dependencies"] if line.startswith("triton"))
    assert triton.endswith("sys_platform == 'linux'")


def test_every_folder_of_the_package_is_installed():
    listed = PYPROJECT["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(name for name, path in modules().items() if path.name == "__init__.py")
