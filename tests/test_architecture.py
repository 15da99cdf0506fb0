"""Who may import whom, as docs/architecture.md says."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = {
    "sparse_flash": ROOT / "sparse_flash",
    "sparse_flash.patterns": ROOT / "patterns",
    "sparse_flash.benchmarks": ROOT / "benchmarks",
}
# The rooms in docs/architecture.md's table and their floors, counted from the roof.
TABLE = re.findall(r"^\| (\d+) \| (.*?) \|", (ROOT / "docs" / "architecture.md").read_text(), re.M)
FLOORS = {room: int(floor) for floor, rooms in TABLE for room in re.findall(r"`([^`]+)`", rooms)}


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((package, *(p for p in parts if p != "__init__")))] = path
    return found


MODULES = modules()
TEXTS = {name: path.read_text() for name, path in MODULES.items()}
TREES = {name: ast.parse(text) for name, text in TEXTS.items()}


def imports(name: str) -> set[str]:
    """The modules that a module imports anywhere, by dotted name; for ``from a import b``, a.b if that is a module."""
    package = name if MODULES[name].stem == "__init__" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            found.update({f"{base}.{alias.name}" for alias in node.names} & MODULES.keys() or {base})
    return found


def room(name: str) -> str | None:
    """The room of a module, or None for one that is not of this package."""
    root, *inner = name.split(".")
    if root != "sparse_flash":
        return None
    if inner in (["__main__"], ["names"]):
        return "cli" if inner == ["__main__"] else root
    return "/".join(inner[:2]) if "kernels" in inner[:2] and len(inner) > 1 else inner[0] if inner else root


IMPORTS = {name: imports(name) for name in MODULES}


def test_the_table_names_every_folder_and_each_says_what_lives_there():
    # sparse_flash.kernels itself only documents what its rooms have in common; it holds no code.
    assert not IMPORTS["sparse_flash.kernels"]
    assert {room(name) for name in IMPORTS if name != "sparse_flash.kernels"} == FLOORS.keys()
    assert len({name.split("/")[0] for name in FLOORS} - {"sparse_flash"}) <= 16
    packages = {name: f"sparse_flash.{name.replace('/', '.')}" for name in FLOORS} | {"sparse_flash": "sparse_flash"}
    assert [name for name, package in packages.items() if not ast.get_docstring(TREES[package])] == []


def test_modules_import_only_folders_of_lower_floors():
    wrong = {}
    for name in IMPORTS.keys() - {"sparse_flash.kernels"}:
        theirs = {room(other) for other in IMPORTS[name]} - {None, room(name)}
        if name == "sparse_flash":  # sf.bench, which is loaded at its first use
            theirs -= {"benchmarks"}
        if above := [other for other in theirs if FLOORS[room(name)] >= FLOORS[other]]:
            wrong[name] = above
    assert wrong == {}


COMPLETED = re.compile(r"(?:^ *(?=\w+\.\w+ = )|\bsetattr\()(\w+)", re.M)


def test_imports_have_no_cycles_also_within_functions():
    waiting = {name: IMPORTS[name] & MODULES.keys() - {name} for name in MODULES}
    waiting.pop("sparse_flash")  # sf.bench and sf.context_parallel are loaded at their first use
    while free := [name for name in waiting if not waiting[name] & waiting.keys()]:
        for name in free:
            del waiting[name]
    assert not waiting
    # No module completes a class that it imports. Only the parser does, because expressions take text.
    completed = set()
    for name, tree in TREES.items():
        imported = {a.asname or a.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for a in node.names}
        completed |= {(name, target) for target in COMPLETED.findall(TEXTS[name]) if target in imported}
    assert completed == {("sparse_flash.masks.parsing", "Pattern")}


def importers(library: str) -> set[str]:
    return {name for name, found in IMPORTS.items() if any(other.split(".")[0] == library for other in found)}


def test_kernels_import_only_kernels_and_few_rooms_import_triton():
    kernels = {name for name in FLOORS if "kernels" in name.split("/")}
    assert {room(other) for name in IMPORTS if room(name) in kernels for other in IMPORTS[name]} <= {*kernels, None}
    assert {room(name) for name in importers("triton")} <= {*kernels, "core", "benchmarks", "cli"}
    of_backends = {name for name in importers("triton") if room(name) == "core"}
    assert of_backends <= {"sparse_flash.core.triton", "sparse_flash.core.hopper"}


def test_patterns_and_the_algebra_know_no_devices():
    modules_of_tables = "block_mask build cache document_blocks from_flex mask_tables reorder select_blocks table"
    of_tables = {f"sparse_flash.masks.{name}" for name in modules_of_tables.split()}
    assert {name for name in importers("torch") if room(name) in ("masks", "patterns")} == of_tables


PRIVATE_OF_TORCH = re.compile(r"\btorch\.(\w+\.)*_[A-Za-z]\w*|\b_dynamo_\w+|ops\.aten\._\w+")


def test_private_names_of_pytorch_and_triton_are_in_few_modules():
    """Those of PyTorch in room ``compat``, and in ``streams``, because kernels import nothing from the package."""
    found = {"torch": set(), "triton": set()}
    for name, tree in TREES.items():
        nodes = ast.walk(tree) if PRIVATE_OF_TORCH.search(TEXTS[name]) else ()  # else it stands in no expression either
        if any(PRIVATE_OF_TORCH.search(ast.unparse(node)) for node in nodes if isinstance(node, ast.Attribute)):
            found["torch"].add(name)
        for node in ast.walk(tree):
            imported = [node.module or "", *(alias.name for alias in node.names)] if isinstance(node, ast.ImportFrom) else [""]
            library = imported[0].split(".")[0]
            if library in found and re.search(r"(^|[. ])_[a-zA-Z]", " ".join(imported)):
                found[library].add(name)
    assert found == {
        "torch": {"sparse_flash.compat.constants", "sparse_flash.compat.dynamo", "sparse_flash.kernels.common.streams"},
        "triton": {"sparse_flash.kernels.common.gluon"},
    }


PROGRAM = """
import sys, torch, program
sf = program.sparse_flash
print("attention" in vars(sf), hasattr(torch.ops.sparse_flash, "attention"))
sf.compile_mask("causal & local(64)", 1000)
late = {"triton", "torch._dynamo", "sparse_flash.parallel", "sparse_flash.benchmarks"}
late |= {"scipy", "rich", "typer", "matplotlib", "jinja2"}
print(late & sys.modules.keys())
"""


def test_a_program_has_all_names_and_operators_at_import_and_loads_only_what_it_needs(tmp_path):
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "__init__.py").write_text("import sparse_flash\n")  # run while the program is still called -m
    (tmp_path / "program" / "__main__.py").write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])}
    command = [sys.executable, "-m", "program", "sparse_flash"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "True True\nset()\n"


LACKING_ON_WINDOWS = {"fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty"}


def test_what_windows_lacks_is_imported_only_where_its_absence_is_caught():
    importing = [name for name in IMPORTS if IMPORTS[name] & LACKING_ON_WINDOWS]
    assert importing
    for name in importing:
        catching = [node for node in ast.walk(TREES[name]) if isinstance(node, (ast.Try, ast.With))]
        caught = [node for one in catching if "ImportError" in ast.unparse(one) for node in one.body]
        for node in ast.walk(TREES[name]):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", None)]
            assert node in caught or LACKING_ON_WINDOWS.isdisjoint(names), f"{name}, line {node.lineno}"
