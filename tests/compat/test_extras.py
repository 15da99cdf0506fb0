"""Without the libraries of the extras, masks and attention work, and everything else names the extra."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from sparse_flash.compat.extras import EXTRAS, naming_extra

BLOCKED = "import sys, runpy; sys.modules |= dict.fromkeys({}); import torch, sparse_flash as sf; from sparse_flash import *\n"
WORKS = """
q = torch.randn(1, 2, 300, 16)
mask = sf.compile_mask("causal & (local(64) | butterfly(block=32))", 300, progress=True)
assert torch.allclose(sf.attention(q, q, q, mask), sf.attention(q, q, q, mask, backend="reference"), atol=1e-5)
print(sf.draw(mask), sf.explain(mask))
"""
PROGRAMS = ["calls", "choosers", "context", "decoding", "precision", "selection", "traffic", "video"]
ENTRIES = {
    "cli": [
        "sf.bench('causal', 64, quick=True)",
        "runpy.run_module('sparse_flash', run_name='__main__')",
        *(f"import sparse_flash.benchmarks.{name}" for name in PROGRAMS),
        "from sparse_flash.benchmarks import checkouts; checkouts.main([])",
    ],
    "plots": ["sf.draw(mask, 'mask.png')", "sf.draw(mask)._repr_png_()", "from sparse_flash.benchmarks.report import page"],
}


def run(program: str, folder: Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=folder)


def test_a_program_without_extras_runs_and_all_that_needs_one_names_it(tmp_path):
    tried = [(extra, entry) for extra, entries in ENTRIES.items() for entry in entries]
    program = BLOCKED.format(["rich", "typer", "matplotlib", "jinja2"]) + WORKS
    for _, entry in tried:
        program += f"try:\n    {entry}\nexcept (ImportError, SystemExit) as error:\n    print('error:', error)\n"
    done = run(program, tmp_path)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert len(said) == len(tried)
    for line, (extra, entry) in zip(said, tried, strict=True):
        assert line.endswith(f' is missing: pip install "sparse-flash[{extra}]"'), (entry, line)
    assert "keeps" in done.stdout and not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["bench --quick --device cpu --out found", "show causal -n 64 --out found/mask.png"])
def test_a_command_whose_plots_cannot_be_drawn_says_so_before_it_measures(command, tmp_path):
    program = BLOCKED.format(["matplotlib", "jinja2"])
    done = run(
        f"{program}sys.argv = {['sparse-flash', *command.split()]}\nfrom sparse_flash.__main__ import main; main()", tmp_path
    )
    assert done.returncode == 2
    assert done.stderr == 'error: matplotlib is missing: pip install "sparse-flash[plots]"\n'


def test_other_missing_modules_keep_their_error_and_extras_are_those_of_the_project():
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_module'"), naming_extra():
        import no_such_module  # noqa: F401
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert all(any(one.startswith(library) for one in extras[extra]) for library, extra in EXTRAS.items())
    assert extras["all"] == ["sparse-flash[cli,plots]"]
