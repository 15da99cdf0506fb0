"""The command line: what it prints, and that mistakes are one message and exit code 2."""

import contextlib
import importlib
import os
import pkgutil
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from sparse_flash.cli.app import app

run = CliRunner()


def invoke(*arguments, code=0):
    result = run.invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result


@pytest.mark.parametrize("command", [("show", "causal", "-n", "40"), ("gallery", "causal", "-n", "40")], ids=["show", "gallery"])
def test_a_written_path_is_printed_as_it_is_on_one_line(command, tmp_path):
    path = tmp_path / "[bold]" / ("long" * 40) / "a[red]b.svg"
    assert f"wrote {path}\n" in invoke(*command, "--out", str(path)).output
    assert path.exists()


def test_patterns_lists_every_name_with_its_use_and_arguments():
    import sparse_flash
    from sparse_flash.masks.registry import find_docstring_line, pattern_class

    out = invoke("patterns").output
    for name in sparse_flash.list_patterns():
        assert f"\n{name} " in out
        assert find_docstring_line(pattern_class(name), "use")[:20] in out
    assert "window" in out and "``" not in out
    assert ", ".join(sparse_flash.list_choosers()) in out


@pytest.mark.parametrize("command", ["patterns", "doctor"])
def test_nothing_is_cut_off_on_a_narrow_terminal(command, monkeypatch):
    import sparse_flash

    monkeypatch.setattr("sparse_flash.cli.console._PIPE_WIDTH", 40)
    out = invoke(command).output
    assert "…" not in out and max(map(len, out.splitlines())) <= 40
    assert command != "patterns" or all(f"\n{name} " in out for name in sparse_flash.list_patterns())


@pytest.mark.parametrize("command", [("show",), ("explain",), ("bench", "--suite", "compile")])
def test_a_bad_spec_is_one_message_with_a_caret(command):
    result = invoke(*command, "causal & lokal(4)", code=2)
    assert "unknown pattern 'lokal'; did you mean 'local'" in result.stderr
    spec_line, caret_line = result.stderr.rstrip("\n").split("\n")[-2:]
    assert spec_line[caret_line.index("^")] == "l" and spec_line.endswith("lokal(4)")
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("show", "causal", "--out", "mask.gif"), ".png or .svg"),
        (("show", "causal", "--level", "rows"), "level must be"),
        (("show", "local(9)", "--level", "tokens", "-n", "100000"), "too many to draw"),
        (("show", "tile_window(layout, 1)"), "layout must be given: pass layout=sf.VideoLayout"),
        (("explain", "layout", "--video", "5x16"), "--video must be FRAMESxHEIGHTxWIDTH in tokens, such as 21x30x52; got '5x16'"),
        (("explain", "causal", "--video", "5x16x16"), "spec must say where the layout of the video goes"),
        (
            ("bench", "ring(4)", "--quick"),
            "For one of your own, import the file that registers it, on the command line by --import FILE",
        ),
        (("explain", "causal", "--dtype", "int8"), "dtype must be one of bf16, fp16, fp32; got 'int8'"),
        (("bench", "causal", "--dtype", "fp8"), "dtype must be one of bf16, fp16, fp32; got 'fp8'"),
        (("bench", "causal", "-n", "0"), "tokens must be an integer of at least 1; got 0"),
        (("bench", "--suite", "paper", "-n", "512"), "suite 'paper' has the paper's sizes"),
        (("show", "causal", "--import", "nowhere.py"), "--import must be a Python file; got nowhere.py, which is not a file"),
        (("bench", "--suite", "speed"), "unknown suite 'speed'"),
        (("bench", "--device", "meta"), "device must be"),
        (("bench", "--backend", "tritn", "--list"), "backend must be"),
        (("bench", "--quick", "--only", "N77"), "no case has 'N77' in its line"),
        (("bench", "--report-only", "nowhere"), "there are no results"),
    ],
)
def test_a_bad_option_is_one_message(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments, code=2)
    assert message in result.stderr and "Traceback" not in result.output
    assert not list(tmp_path.iterdir())


@pytest.fixture
def own_file(tmp_path):
    """A file with a pattern of the user's, which imports from a file beside it; forgotten afterwards."""
    from sparse_flash.masks import registry

    (tmp_path / "beside_ringed.py").write_text("PERIOD = 64\n")
    path = tmp_path / "ringed.py"
    path.write_text(
        "from dataclasses import dataclass\n"
        "import sparse_flash as sf\n"
        "from beside_ringed import PERIOD\n"
        "@sf.register_pattern('ringed')\n"
        "@dataclass(frozen=True)\n"
        "class Ringed(sf.Pattern):\n"
        '    """Keeps keys whose distance is a multiple of the period."""\n'
        "    period: int = PERIOD\n"
        "    def token_rule(self, q, kv):\n"
        "        return (q - kv) % self.period == 0\n"
    )
    yield str(path)
    registry._registry.pop("ringed", None)
    for name in ("ringed", "beside_ringed"):
        sys.modules.pop(name, None)
    sys.path[:] = [entry for entry in sys.path if entry != str(tmp_path)]


def test_commands_that_take_a_spec_take_a_file_of_the_users_patterns(own_file):
    for command in ("patterns", "show", "gallery", "explain", "bench"):
        assert "--import" in invoke(command, "--help").output
    assert "ringed" not in invoke("patterns").output
    listed = next(line for line in invoke("patterns", "--import", own_file).output.splitlines() if line.startswith("ringed "))
    assert "Keeps keys whose distance" in listed and listed.rstrip().endswith(" ringed")  # its file
    assert "keeps 1.56% of the pairs" in invoke("show", "ringed", "-n", "128", "--import", own_file).output
    assert "causal & ringed(period=64)" in invoke("explain", "causal & ringed(64)", "-n", "128", "--import", own_file).output
    listed = invoke("bench", "causal & ringed(64)", "--quick", "--list", "--import", own_file).output
    assert "speedup: B1 H2 N1024 D64 | causal & ringed(period=64) | sparse_flash" in listed


def test_a_file_that_fails_is_one_message_with_its_error(tmp_path):
    path = tmp_path / "broken_ring.py"
    path.write_text("1 / 0\n")
    for _ in range(2):
        assert (
            f"error: {path} fails: ZeroDivisionError: division by zero"
            in invoke("show", "full", "--import", str(path), code=2).stderr
        )
    (tmp_path / "torch.py").touch()
    assert "rename the file" in invoke("show", "full", "--import", str(tmp_path / "torch.py"), code=2).stderr
    assert str(tmp_path) not in sys.path


def test_results_of_an_imported_file_are_not_reused_after_it_changed(own_file, tmp_path, monkeypatch):
    from sparse_flash.benchmarks.measure import throughput

    monkeypatch.setattr(throughput, "run", lambda case, *_: {"refused": "not now"})
    command = ["bench", "ringed(64)", "--suite", "speedup", "--quick", "--device", "cpu", "--out", str(tmp_path / "out")]
    assert "reused" not in invoke(*command, "--import", own_file).output
    assert "reused: 3 cases" in invoke(*command, "--import", own_file).output
    with open(own_file, "a") as more:
        more.write("# changed\n")
    assert "starting anew (imports changed)" in invoke(*command, "--import", own_file).output


def test_sizes_are_those_of_every_case():
    sizes = ["-n", "768", "--heads", "6", "--kv-heads", "3", "--head-dim", "32", "--batch", "2", "--v-head-dim", "16"]
    listed = invoke("bench", "causal & local(64)", "--quick", "--device", "cpu", "--list", *sizes).output.splitlines()
    assert "speedup: B2 H6/3 N768 D32/16 | causal & local(64) | sparse_flash" in listed
    assert "compile: compile | N768 | causal & local(64)" in listed
    assert all("B2 H6/3 " in line and "D32/16 " in line for line in listed if not line.startswith("compile"))


def test_programs_other_than_the_command_have_all_names_and_operators_at_import(tmp_path):
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "__init__.py").write_text("import sparse_flash\n")  # run while the program is still called -m
    found = "import torch, program; print('attention' in vars(program.sparse_flash), hasattr(torch.ops.sparse_flash, 'attention'))"
    (tmp_path / "program" / "__main__.py").write_text(found)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])}
    done = subprocess.run(
        [sys.executable, "-m", "program", "sparse_flash"], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.strip() == "True True"


@pytest.mark.parametrize(
    "arguments, unloaded",
    [
        (["bench", "--help"], "torch numpy scipy"),
        (["patterns"], "torch"),
        (["show", "causal", "-n", "64"], "triton sparse_flash.names sparse_flash.api sparse_flash.backends sparse_flash.parallel"),
    ],
    ids=str,
)
def test_looking_loads_no_more_than_it_needs(arguments, unloaded):
    """In a process of the command, where the package leaves its names for later. Its output, to a pipe, is plain."""
    program = (
        f"import sys; sys.argv = ['sparse-flash', *{arguments}]; from sparse_flash.cli import main\n"
        f"try: main()\nfinally: print('loaded:', sorted(set({unloaded.split()}) & set(sys.modules)))"
    )
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "130", "LINES": "72"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, env=environment, check=True)
    said = done.stdout.decode("ascii")
    assert said.endswith("loaded: []\n") and len(said) > 500 and "\x1b" not in said, said
    assert arguments[0] != "show" or said.count("\n") > 32


def test_a_checkout_that_is_only_on_the_path_says_how_to_install_it():
    program = [sys.executable, "-S", "-c", "import sys; sys.path.insert(0, sys.argv[1]); import sparse_flash", os.getcwd()]
    said = subprocess.run(program, capture_output=True, text=True).stderr.splitlines()[-1]  # -S: without what is installed
    assert "sparse_flash must be installed; got its checkout on the path" in said and f"run pip install -e {os.getcwd()}" in said


def test_show_draws_tokens_at_small_lengths_and_blocks_at_large_ones(tmp_path):
    small = invoke("show", "causal", "-n", "8").output
    assert "████████········" in small and "(tokens)" in small
    assert "8 x 12 tokens" in invoke("show", "causal", "-n", "8", "--kv-len", "12").output
    large = invoke("show", "causal & local(1024)", "-n", "65536", "--out", str(tmp_path / "mask.png")).output
    assert "(blocks)" in large and re.search("\n·+[░▒]+·", large) and (tmp_path / "mask.png").stat().st_size > 1000
    assert "by the share visited" in invoke("show", "causal & sinks(1)", "-n", "512", "--level", "visited").output


def test_explain_says_what_is_kept_and_reached():
    out = invoke("explain", "causal & local(1024)", "-n", "65536").output
    for text in ("66,585,088", "4,572 of 262,144", "share of blocks", "after layers 1: 3.3%"):
        assert text in out
    assert "hint" not in out
    assert "q, k and v 384.0 MiB, out and lse 130.0 MiB" in out
    wide = invoke("explain", "causal", "-n", "1024", "--batch", "2", "--heads", "4", "--kv-heads", "2", "--dtype", "float32").output
    assert "batch 2, 4 heads on 2 of keys and values of 128, float32" in wide and "q, k and v 8.0 MiB" in wide
    assert "not defined" in invoke("explain", "causal", "-n", "256", "--kv-len", "512").output


VIDEO = "tile_window(video_layout(4, 16, 16, tile=(2, 8, 4), prefix=7), 1)"


def test_patterns_that_name_their_tokens_need_no_length(tmp_path):
    explained = invoke("explain", VIDEO).output
    assert "1,031 queries x 1,031 keys" in explained and "in 2 x 2 x 4 tiles of 2 x 8 x 4; prefix 7, suffix 0" in explained
    assert "block_size=64 visits less" in explained
    assert "1,031 x 1,031 tokens" in invoke("show", VIDEO).output
    assert "in 1 x 4 x 2 tiles of 4 x 4 x 8" in invoke("explain", "tile_window(layout, 1)", "--video", "4x16x16").output
    assert "1,024 x 1,024 tokens" in invoke("show", "tile_window(layout, 1)", "--video", "4x16x16").output
    assert "65,536 queries" in invoke("explain", "local(9)").output and "4,096 x 4,096 tokens" in invoke("show", "local(9)").output
    assert "wrote" in invoke("gallery", VIDEO, "local(9)", "--out", str(tmp_path / "masks.png")).output


def test_explain_of_a_mask_that_keeps_nothing_says_so():
    out = invoke("explain", "causal & ~causal", "-n", "100").output
    assert "inf" not in out and "0.000% of the 1 " in out and "This mask keeps nothing" in out


def test_a_terminal_shows_states_by_signs_and_colours():
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"TERM": "xterm-256color"}
    command = [sys.executable, "-m", "sparse_flash", "show", "causal", "-n", "640"]
    shown = b""
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL, env=environment):
        os.close(theirs)
        with contextlib.suppress(OSError):  # how Linux reports that the other end is closed
            while part := os.read(ours, 1 << 16):
                shown += part
    os.close(ours)
    assert all(sign in shown.decode() for sign in "·▒█") and "\x1b[34m██" in shown.decode()


def test_a_folder_that_cannot_be_made_is_said_before_anything_is_measured(tmp_path, monkeypatch):
    from sparse_flash.benchmarks import run as measuring

    monkeypatch.setattr(measuring, "measure", lambda *args: pytest.fail("measured"))
    (tmp_path / "file").touch()
    result = invoke("bench", "--quick", "--suite", "compile", "--out", str(tmp_path / "file" / "folder"), code=2)
    assert f"{tmp_path / 'file' / 'folder'}: Not a directory; pass another path" in result.stderr
    assert "Errno" not in result.stderr


def test_no_back_end_is_advised_to_use_what_it_cannot_run_under():
    from sparse_flash import backends

    assert "TRITON_INTERPRET" not in (backends.get_backend("hopper").why_unavailable() or "")


def test_doctor_names_every_back_end_and_its_reason():
    from sparse_flash import backends

    out = invoke("doctor").output
    for name in (*backends.NAMES, "torch", "triton", "scipy", "bfloat16, dropout"):
        assert name in out


def test_importing_every_module_runs_no_command(capsys):
    import sparse_flash

    names = [module.name for module in pkgutil.walk_packages(sparse_flash.__path__, "sparse_flash.")]
    for name in names:
        importlib.import_module(name)
    assert "sparse_flash.__main__" in names and capsys.readouterr() == ("", "")
