"""The command line: what it prints, and that mistakes are one message and exit code 2."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import sparse_flash as sf
from sparse_flash.benchmarks.measure import throughput
from sparse_flash.cli import app
from sparse_flash.core import backends
from sparse_flash.masks.registry import _registry, find_docstring_line, pattern_class


def invoke(command: str, code=0, **environment):
    result = CliRunner().invoke(app, shlex.split(command), env=environment)
    assert result.exit_code == code, result.output
    return result


def printed(command: str) -> str:
    return invoke(command).output


@pytest.mark.parametrize("command", ["show", "gallery"])
def test_a_written_path_is_printed_unwrapped(command, tmp_path):
    path = tmp_path / "[bold]" / ("long" * 40) / "a[red]b.svg"
    assert f"wrote {path}\n" in printed(f"{command} causal -n 40 --out '{path}'")
    assert path.exists()


def test_patterns_lists_every_name_with_its_use_and_arguments():
    out = printed("patterns")
    for name in sf.list_patterns():
        assert f"\n{name} " in out
        assert find_docstring_line(pattern_class(name), "use")[:20] in out
    assert "window" in out and "``" not in out
    assert ", ".join(sf.list_choosers()) in out


def test_no_name_is_cut_off_on_a_narrow_terminal(monkeypatch):
    monkeypatch.setattr("sparse_flash.cli.options._PIPE_WIDTH", 40)
    out = printed("patterns")
    assert "…" not in out and all(f"\n{name} " in out for name in sf.list_patterns())


@pytest.mark.parametrize("command", ["show", "explain", "bench --suite compile"])
def test_a_bad_spec_is_one_message_with_a_caret(command):
    result = invoke(f"{command} 'causal & lokal(4)'", code=2)
    assert "unknown pattern 'lokal'; did you mean 'local'" in result.stderr
    spec_line, caret_line = result.stderr.rstrip("\n").split("\n")[-2:]
    assert spec_line[caret_line.index("^")] == "l" and spec_line.endswith("lokal(4)")
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "command, message",
    [
        ("show 'local(9)' --level tokens -n 100000", "too many to draw"),
        ("show causal --import nowhere.py", "--import must be a Python file, whose name ends in .py; got nowhere.py"),
        ("gallery causal --out mask.gif", ".png or .svg"),
        ("explain causal --dtype int8", "dtype must be one of bf16, fp16, fp32; got 'int8'"),
        ("bench 'ring(4)' --quick", "import the file that registers it, on the command line by --import FILE"),
        ("bench causal -n 0", "tokens must be an integer of at least 1; got 0"),
        ("bench --suite paper -n 512", "suite 'paper' has the paper's sizes"),
        ("bench --suite speed", "unknown suite 'speed'"),
        ("bench --backend tritn --list", "backend must be"),
        ("bench --quick --only N77", "no case has 'N77' in its line"),
        ("bench --report-only nowhere", "there are no results"),
        ("bench --quick --suite compile --out a_file/folder", "a_file/folder: Not a directory; pass another path"),
    ],
)
def test_a_bad_option_is_one_message_before_anything_is_measured(command, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a_file").touch()
    result = invoke(command, code=2)
    assert message in result.stderr and "Traceback" not in result.output and "Errno" not in result.stderr
    assert os.listdir() == ["a_file"] and not result.stdout


OWN = """
from dataclasses import dataclass
import sparse_flash as sf
from beside_ringed import PERIOD

@sf.register_pattern("ringed")
@dataclass(frozen=True)
class Ringed(sf.Pattern):
    '''Keeps keys whose distance is a multiple of the period.'''
    period: int = PERIOD

    def token_rule(self, q, kv):
        return (q - kv) % self.period == 0
"""


@pytest.fixture
def own_file(tmp_path, monkeypatch):
    """A file with a pattern of the user's, which imports from a file beside it; forgotten afterwards."""
    (tmp_path / "beside_ringed.py").write_text("PERIOD = 64\n")
    (tmp_path / "ringed.py").write_text(OWN)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path / "ringed.py"
    _registry.pop("ringed", None)
    for name in ("ringed", "beside_ringed"):
        sys.modules.pop(name, None)


def test_commands_that_take_a_spec_take_a_file_of_the_users_patterns(own_file):
    assert "ringed" not in printed("patterns")
    listed = next(line for line in printed(f"patterns --import {own_file}").splitlines() if line.startswith("ringed "))
    assert "Keeps keys whose distance" in listed
    assert "keeps 1.56% of the pairs" in printed(f"show ringed -n 128 --import {own_file}")
    assert "wrote" in printed(f"gallery ringed -n 128 --import {own_file} --out {own_file.parent}/masks.svg")
    assert "causal & ringed(64)" in printed(f"explain 'causal & ringed(64)' -n 128 --import {own_file}")
    listed = printed(f"bench 'causal & ringed(64)' --quick --list --import {own_file}")
    assert "speedup: B1 H2 N1024 D64 | causal & ringed(period=64) | sparse_flash" in listed


def test_a_file_that_fails_is_one_message_with_its_error(tmp_path):
    (tmp_path / "broken_ring.py").write_text("1 / 0\n")
    (tmp_path / "torch.py").touch()
    fails = f"error: {tmp_path}/broken_ring.py fails: ZeroDivisionError: division by zero"
    for name, said in (("broken_ring", fails), ("broken_ring", fails), ("torch", "rename the file")):
        assert said in invoke(f"show full --import {tmp_path}/{name}.py", code=2).stderr
    assert str(tmp_path) not in sys.path


def test_results_are_reused_until_another_run_is_asked_for_or_an_imported_file_changes(own_file, tmp_path, monkeypatch):
    monkeypatch.setattr(throughput, "run", lambda case, *_: {"refused": "not now"})
    command = f"bench 'ringed(64)' --suite speedup --quick --device cpu --out {tmp_path}/out --import {own_file}"
    assert "reused:" not in printed(command)
    assert "reused: 3 cases" in (again := printed(command)) and "--retry measures the 3 without numbers" in again
    assert "reused:" not in printed(f"{command} --retry") and "starting anew (as asked)" in printed(f"{command} --fresh")
    before = (tmp_path / "out" / "results.json").read_text()
    own_file.write_text(OWN + "# changed\n")
    assert "starting anew (imports changed)" in printed(command)
    assert before in [path.read_text() for path in (tmp_path / "out").glob("results-*.json")]  # set aside


def test_sizes_are_those_of_every_case():
    listed = printed("bench 'causal & local(64)' --quick --device cpu --list -n 768 --heads 6 --kv-heads 3 --head-dim 32 --batch 2")
    assert "speedup: B2 H6/3 N768 D32 | causal & local(64) | sparse_flash" in listed
    assert "compile: compile | N768 | causal & local(64)" in listed


@pytest.mark.parametrize(
    "arguments, unloaded",
    [
        ("bench --help", "torch numpy scipy"),
        ("patterns", "torch"),
        ("show causal -n 64", "triton sparse_flash.names sparse_flash.api sparse_flash.core.operators sparse_flash.parallel"),
    ],
)
def test_looking_loads_no_more_than_it_needs(arguments, unloaded):
    """In a process of the command, where the package leaves its names for later. Its output, to a pipe, is plain."""
    program = (
        f"import sys; sys.argv = ['sparse-flash', *{arguments.split()}]; from sparse_flash.__main__ import main\n"
        f"try: main()\nfinally: print('loaded:', sorted(set({unloaded.split()}) & set(sys.modules)))"
    )
    environment = os.environ | {"PYTHONIOENCODING": "utf-8", "COLUMNS": "130", "LINES": "72"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, env=environment, check=True)
    said = done.stdout.decode()
    assert said.endswith("loaded: []\n") and len(said) > 500 and "\x1b" not in said, said
    assert "show" not in arguments or said.count("\n") > 32


def test_a_checkout_that_is_only_on_the_path_says_how_to_install_it(tmp_path):
    (tmp_path / "sparse_flash").mkdir()
    shutil.copy(sf.__file__, tmp_path / "sparse_flash")
    # Without what is installed (-S) or named by the environment (-I). What is asked for comes before PyTorch is imported.
    program = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import sparse_flash"]
    said = subprocess.run(program, capture_output=True, text=True).stderr.splitlines()[-1]
    assert f"sparse_flash must be installed; got its checkout on the path, {tmp_path}; run pip install -e {tmp_path}" in said


def test_show_draws_tokens_at_small_lengths_and_blocks_at_large_ones(tmp_path):
    small = printed("show causal -n 8")
    assert "████████········" in small and "(tokens)" in small
    assert "8 x 12 tokens" in printed("show causal -n 8 --kv-len 12")
    large = printed(f"show 'causal & local(1024)' -n 65536 --out {tmp_path}/mask.png")
    assert "(blocks)" in large and re.search("\n·+[░▒]+·", large) and (tmp_path / "mask.png").stat().st_size > 1000


def test_a_terminal_shows_states_by_signs_and_colours():
    shown = invoke("show causal -n 640", FORCE_COLOR="1", TERM="xterm-256color", NO_COLOR=None).output
    assert all(sign in shown for sign in "·▒█") and "\x1b[34m██" in shown


def test_explain_says_what_is_kept_and_reached():
    out = printed("explain 'causal & local(1024)' -n 65536")
    for text in ("66,585,088", "4,572 of 262,144", "share of blocks", "after layers 1: 3.3%"):
        assert text in out
    assert "hint" not in out and "q, k and v 384.0 MiB, out and lse 130.0 MiB" in out
    wide = printed("explain causal -n 1024 --batch 2 --heads 4 --kv-heads 2 --dtype float32")
    assert "batch 2, 4 heads on 2 of keys and values of 128, float32" in wide and "q, k and v 8.0 MiB" in wide
    assert "not defined" in printed("explain causal -n 256 --kv-len 512")
    nothing = printed("explain 'causal & ~causal' -n 100")
    assert "inf" not in nothing and "0.000% of the 1 " in nothing and "This mask keeps nothing" in nothing


def test_patterns_that_name_their_tokens_need_no_length(tmp_path):
    video = "tile_window(video_layout(4, 16, 16, tile=(2, 8, 4), prefix=7), 1)"
    assert "1,031 queries x 1,031 keys" in printed(f"explain '{video}'")
    assert "1,031 x 1,031 tokens" in printed(f"show '{video}'")
    assert "65,536 queries" in printed("explain 'local(9)'") and "4,096 x 4,096 tokens" in printed("show 'local(9)'")
    assert "wrote" in printed(f"gallery '{video}' 'local(9)' --out {tmp_path}/masks.png")


def test_doctor_names_every_back_end_and_its_reason():
    out = printed("doctor")
    assert all(name in out for name in (*backends.NAMES, "torch", "triton", "scipy", "float32 on the CPU"))
    # Interpreted kernels are no way out where Hopper's are missing.
    assert "TRITON_INTERPRET" not in (backends.get_backend("hopper").why_unavailable() or "")
