"""The command line: what it prints, and that mistakes are one message and exit code 2."""

import contextlib
import importlib
import json
import os
import pkgutil
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
        (("show", "causal", "--block-size", "100"), "block_size"),
        (("show", "causal", "--out", "mask.gif"), ".png, .svg or .html"),
        (("show", "causal", "--level", "rows"), "level must be"),
        (("show", "local(9)", "--level", "tokens", "-n", "100000"), "too many to draw"),
        (("explain", "causal", "--q-len", "0"), "q_len"),
        (("explain", "per_head([causal, full])"), "must be that of one head; got 2 different ones; pass one, such as 'causal'"),
        (("show", "per_head([causal, full])"), "must be that of one head; got 2 different ones; pass one, such as 'causal'"),
        (("explain", "causal", "--heads", "0"), "heads"),
        (("design", "--budget", "x"), "budget must be a share, 0 < budget <= 1, or text such as '10%'; got 'x'"),
        (("design", "-n", "256", "--budget", "1%", "--keep", "local(99)"), "what keep=local(99) takes; got 1%; raise it, or keep"),
        (("design", "-n", "2048", "--connected-in", "1"), "got connected_in=1; pass budget='100%' for causal"),
        (("explain", "causal", "--dtype", "int8"), "dtype must be one of bf16, fp16, fp32; got 'int8'"),
        (("bench", "causal", "--dtype", "fp8"), "dtype must be one of bf16, fp16, fp32; got 'fp8'"),
        (("tune", "--dtype", "half"), "dtype must be one of bf16, fp16, fp32; got 'half'"),
        (("bench", "causal", "--heads", "3", "--kv-heads", "2"), "heads must be a multiple of kv_heads; got 3 and 2"),
        (("bench", "causal", "-n", "0"), "tokens must be an integer of at least 1; got 0"),
        (("bench", "per_head([causal, causal, full])", "-n", "512", "--heads", "2"), "the mask's heads must be q's, 2, or 1 for a"),
        (("bench", "causal", "neighborhood((8, 8), 3)", "-n", "512"), "neighborhood((8, 8), (3, 3)) must name the 512 tokens"),
        (
            ("bench", "neighborhood((8, 8), 3)", "-n", "512", "--suite", "compile", "--list"),
            "neighborhood((8, 8), (3, 3)) must name the 512 tokens",
        ),
        (("bench", "--suite", "paper", "-n", "512"), "suite 'paper' has the paper's sizes"),
        (("show", "causal", "--import", "nowhere.py"), "--import must be a Python file; got nowhere.py, which is not a file"),
        (("bench", "--suite", "speed"), "unknown suite 'speed'"),
        (("bench", "--device", "meta"), "device must be"),
        (("bench", "--device", "meta", "--list"), "device must be"),
        (("bench", "--backend", "tritn"), "backend must be"),
        (("bench", "--backend", "tritn", "--list"), "backend must be"),
        (("bench", "--quick", "--only", "N77"), "no case has 'N77' in its line"),
        (("bench", "--quick", "--only", "N77", "--list"), "no case has 'N77' in its line"),
        (("bench", "--report-only", "nowhere"), "there are no results"),
    ],
)
def test_a_bad_option_is_one_message(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sparse_flash.tools.tuning.unavailable", lambda: None)
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


def test_every_command_takes_a_file_of_the_users_patterns(own_file):
    for command in ("patterns", "show", "gallery", "explain", "design", "fit", "bench", "tune", "warm", "doctor"):
        assert "--import" in invoke(command, "--help").output
    assert "ringed" not in invoke("patterns").output
    listed = next(line for line in invoke("patterns", "--import", own_file).output.splitlines() if line.startswith("ringed "))
    assert "Keeps keys whose distance" in listed and listed.rstrip().endswith(" ringed")  # its file
    assert "keeps 1.562% of the pairs" in invoke("show", "ringed", "-n", "128", "--import", own_file).output
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


def test_a_run_says_first_how_long_it_takes_and_each_note_once(tmp_path, monkeypatch):
    from sparse_flash.benchmarks.measure import drift, throughput
    from sparse_flash.benchmarks.report import page

    figures = dict.fromkeys(("forward_ms", "forward_us", "forward_host_us", "compile_s"), 1.0)
    figures |= dict.fromkeys(("backward_ms", "both_us", "both_host_us"), 2.0)
    figures |= dict.fromkeys(("peak_bytes", "table_bytes", "kept_blocks"), 1)
    figures |= {"forward_ms_spread": [0.5, 1.5], "compile_s_spread": [0.1, 1.9], "density": 0.5, "block_density": 0.5}
    figures |= {"causal": True, "correct": True, "dtype": "float32"}
    monkeypatch.setattr(throughput, "run", lambda case, *_: dict(figures))
    monkeypatch.setattr(drift.BaselineTimer, "measure", lambda self, baselines, case: case())
    monkeypatch.setattr(page, "write", lambda results: None)
    out = invoke("bench", "--device", "cpu", "--out", str(tmp_path / "brief")).output
    assert out.index("this takes two to three minutes on two idle cores") < out.index("compile | N65536 | causal")
    assert "peers" not in out.partition("\n\n")[2] and "Speed-up against density" in out
    out = " ".join(invoke("bench", "--device", "cpu", "--quick", "--out", str(tmp_path / "quick")).output.split())
    assert "this takes" not in out
    for note in (
        "?: not to be relied on, for",
        "spread: from the first",
        "grows as: N to",
        "x: how many times as fast as the fastest other",
    ):
        assert out.count(note) == 1


def test_results_of_an_imported_file_are_not_reused_after_it_changed(own_file, tmp_path, monkeypatch):
    from sparse_flash.benchmarks.measure import throughput

    monkeypatch.setattr(throughput, "run", lambda case, *_: {"refused": "not now"})
    command = ["bench", "ringed(64)", "--suite", "speedup", "--quick", "--device", "cpu", "--out", str(tmp_path / "out")]
    assert "reused" not in invoke(*command, "--import", own_file).output
    assert "reused: 3 cases" in invoke(*command, "--import", own_file).output
    with open(own_file, "a") as more:
        more.write("# changed\n")
    assert "starting anew (imports changed)" in invoke(*command, "--import", own_file).output


def test_sizes_are_those_of_every_case_and_have_results_of_their_own(tmp_path, monkeypatch):
    from sparse_flash.benchmarks.measure import throughput

    sizes = ["-n", "768", "--heads", "6", "--kv-heads", "3", "--head-dim", "32", "--batch", "2", "--v-head-dim", "16"]
    listed = invoke("bench", "causal & local(64)", "--quick", "--device", "cpu", "--list", *sizes).output.splitlines()
    assert "speedup: B2 H6/3 N768 D32/16 | causal & local(64) | sparse_flash" in listed
    assert "compile: compile | N768 | causal & local(64)" in listed
    assert all("B2 H6/3 " in line and "D32/16 " in line for line in listed if not line.startswith("compile"))
    seen = []
    monkeypatch.setattr(throughput, "run", lambda case, *_: seen.append(case.dtype) or {"refused": "not now"})
    monkeypatch.chdir(tmp_path)
    for dtype in ("fp16", "float16", "bf16"):
        invoke("bench", "full", "--suite", "speedup", "--quick", "--device", "cpu", "--dtype", dtype)
    assert seen == ["float16", "float16", "bfloat16", "bfloat16"]  # the second name of fp16 found its results
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_a_mask_of_each_head_is_measured(tmp_path):
    spec, sizes = "per_head([causal & local(64), causal])", ["-n", "256", "--heads", "2", "--head-dim", "16"]
    invoke("bench", spec, "--suite", "speedup", "--quick", "--device", "cpu", "--out", str(tmp_path), *sizes)
    cases = json.loads((tmp_path / "results.json").read_text())["cases"]
    result = cases[f"B1 H2 N256 D16 | {spec} | sparse_flash"]["result"]
    assert result["correct"] and result["causal"] and "B1 H2 N256 D16 | causal | sdpa-flash" in result["around"]
    assert result["density"] == pytest.approx((64 * 65 / 2 + 192 * 64 + 256 * 257 / 2) / 2 / 256**2)


@pytest.mark.parametrize("command", [(), ("explain",), ("fit",), ("bench",), ("warm",)], ids=str)
def test_help_loads_no_pytorch(command):
    script = "import sys; sys.argv[0] = 'bin/sparse-flash'; from sparse_flash.cli import main; main()"
    for program in (["-m", "sparse_flash"], ["-c", script]):
        started = [sys.executable, "-X", "importtime", *program, *command, "--help"]
        done = subprocess.run(started, capture_output=True, text=True, check=True)
        loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        assert "Usage: sparse-flash" in done.stdout and "typer" in loaded and loaded.isdisjoint({"torch", "numpy", "scipy"})


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


def test_show_draws_tokens_at_small_lengths_and_blocks_at_large_ones(tmp_path):
    small = invoke("show", "causal", "-n", "8").output
    assert "████████········" in small and "(tokens)" in small
    large = invoke("show", "causal & local(1024)", "-n", "65536", "--out", str(tmp_path / "mask.png")).output
    assert "(blocks)" in large and (tmp_path / "mask.png").stat().st_size > 1000


def test_explain_says_what_is_kept_and_reached():
    out = invoke("explain", "causal & local(1024)", "-n", "65536").output
    for text in ("66,585,088", "4,572 of 262,144", "predicted speed-up", "after layers 1: 3.3%", "0 queries keep nothing"):
        assert text in out
    assert "hint" not in out
    assert "q, k and v 384.0 MiB, out and lse 130.0 MiB" in out
    wide = invoke("explain", "causal", "-n", "1024", "--batch", "2", "--heads", "4", "--kv-heads", "2", "--dtype", "float32").output
    assert "batch 2, 4 heads on 2 of keys and values of 128, float32" in wide and "q, k and v 8.0 MiB" in wide
    assert "not defined" in invoke("explain", "causal", "-n", "256", "--kv-len", "512").output


def test_design_prints_what_the_call_returns(own_file):
    import sparse_flash

    arguments = ("design", "-n", "2048", "--budget", "40%", "--heads", "4", "--layers", "4", "--keep", "local(128)", "--count", "3")
    found = sparse_flash.design(2048, "40%", heads=4, layers=4, keep="local(128)", count=3)
    printed = json.loads(invoke(*arguments, "--json").output)
    assert [(tuple(one["layers"]), one["density"], tuple(one["reach"])) for one in printed] == [
        (one.layers, one.density, one.reach) for one in found
    ]
    table = " ".join(invoke(*arguments).output.split())
    for one in found:
        assert f"{one.density:.2%} {one.time:.1%} {one.connected_in} layer" in table and one.summary in table
    assert "in units of 128 tokens, so at least" in table and "█ full" in table
    drawn = sum(len({*getattr(layer, "patterns", (layer,))}) for one in found for layer in dict.fromkeys(one.patterns))
    lines = invoke(*arguments).output.splitlines()
    first_rows = sum(line.count("▒▒" + "·" * 30) + line.count("██" + "·" * 30) for line in lines)
    assert first_rows == drawn


VIDEO = "tile_window(video_layout(4, 16, 16, tile=(2, 8, 4), prefix=7), 1)"


def test_patterns_that_name_their_tokens_need_no_length(tmp_path):
    explained = invoke("explain", VIDEO).output
    assert "1,031 queries x 1,031 keys" in explained and "in 2 x 2 x 4 tiles of 2 x 8 x 4; prefix 7, suffix 0" in explained
    assert "block_size=64 visits less" in explained
    assert "1,031 x 1,031 tokens" in invoke("show", VIDEO).output
    assert "65,536 queries" in invoke("explain", "local(9)").output and "4,096 x 4,096 tokens" in invoke("show", "local(9)").output
    assert "wrote" in invoke("gallery", VIDEO, "local(9)", "--out", str(tmp_path / "masks.png")).output


def test_show_draws_the_frames_that_a_query_sees(tmp_path, monkeypatch):
    import sparse_flash.tools.draw

    drawn = []
    monkeypatch.setattr(sparse_flash.tools.draw, "_write", lambda figure, path: drawn.append(figure))
    invoke("show", VIDEO, "--out", str(tmp_path / "frames.png"), "--query", "2", "12", "1")
    (figure,) = drawn
    assert (
        "what frame 2, row 12, column 1 (orange) sees" in figure._suptitle.get_text()
        and "tile_window" in figure._suptitle.get_text()
    )
    for command, message in (
        (("show", VIDEO, "--query", "0", "0", "0"), "--query must come with --out"),
        (("show", "causal", "--query", "0", "0", "0", "--out", str(tmp_path / "frames.png")), "a pattern over one video_layout"),
        (("show", VIDEO, "--query", "4", "0", "0", "--out", str(tmp_path / "frames.png")), "frame of query must be 0 to 3; got 4"),
    ):
        assert message in invoke(*command, code=2).stderr


def test_explain_of_a_mask_that_keeps_nothing_predicts_nothing():
    out = invoke("explain", "causal & ~causal", "-n", "100").output
    assert "inf" not in out and "not defined, as no block is visited" in out and "This mask keeps nothing" in out
    assert "none, except each token's own" in out and "after layers" not in out


def test_long_work_is_shown_on_a_terminal_alone():
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    commands = [["explain", "causal", "-n", "4096"], ["show", "causal", "-n", "4096"]]
    code = f"from sparse_flash.cli.app import app\nfor command in {commands}: app(command, standalone_mode=False)"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=theirs, env=os.environ | {"TERM": "xterm"})
    shown = os.read(ours, 1 << 16).decode()
    assert done.returncode == 0 and b"counting" not in done.stdout
    assert shown.count("compiling") >= 2 and shown.count("counting") >= 2
    assert [invoke(*command).stderr for command in commands] == ["", ""]


def read_to_the_end(terminal):
    parts = []
    with contextlib.suppress(OSError):  # how Linux reports that the other end is closed
        while part := os.read(terminal, 1 << 16):
            parts.append(part)
    os.close(terminal)
    return b"".join(parts).decode()


def test_a_search_for_designs_shows_its_progress_on_a_terminal_alone():
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    command = ["design", "-n", "2048", "--budget", "40%", "--json"]
    program = [sys.executable, "-m", "sparse_flash", *command]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=theirs, env=os.environ | {"TERM": "xterm"}) as process:
        os.close(theirs)
        shown = read_to_the_end(ours)
        assert json.loads(process.stdout.read())
    assert "compiling patterns" in shown and "comparing unions" in shown
    assert invoke(*command).stderr == ""


def test_without_colours_a_terminal_shows_states_by_signs():
    pty = pytest.importorskip("pty")
    command = [sys.executable, "-c", "from sparse_flash.cli import main; main()", "show", "causal", "-n", "4096"]
    shown = {}
    for name, more in {"plain": {"NO_COLOR": "1"}, "coloured": {}}.items():
        ours, theirs = pty.openpty()
        environment = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"TERM": "xterm-256color"} | more
        process = subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL, env=environment)
        os.close(theirs)
        shown[name] = read_to_the_end(ours)
        assert process.wait() == 0
    picture = shown["plain"].split("causal", 1)[1]
    assert all(sign in picture for sign in "·▒█") and "▀" not in picture and ";5;" not in picture
    assert "▀" in shown["coloured"] and "\x1b[" in shown["coloured"]


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


def test_the_package_runs_as_a_program():
    done = subprocess.run([sys.executable, "-m", "sparse_flash", "show", "lokal(4)"], capture_output=True, text=True)
    assert done.returncode == 2 and "did you mean 'local'" in done.stderr and "Traceback" not in done.stderr


def test_importing_every_module_runs_no_command(capsys):
    import sparse_flash

    names = [module.name for module in pkgutil.walk_packages(sparse_flash.__path__, "sparse_flash.")]
    for name in names:
        importlib.import_module(name)
    assert "sparse_flash.__main__" in names and capsys.readouterr() == ("", "")


def test_output_without_a_terminal_is_plain():
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "NO_COLOR": "1"}
    command = [sys.executable, "-c", "from sparse_flash.cli import main; main()", "show", "causal", "-n", "64"]
    in_ascii = subprocess.run(command, capture_output=True, env=environment, check=True).stdout.decode("ascii")
    for text in (in_ascii, invoke(*command[3:]).output):
        assert "\x1b" not in text and text.count("\n") > 32
