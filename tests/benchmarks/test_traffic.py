"""Traffic against density: ncu's output is read in every form, and the line fitted to the figures is right."""

import json
import sys

import pytest
import torch

from sparse_flash.benchmarks import traffic

# ruff: noqa: E501
LONG = """==PROF== Connected to process 4242 (/usr/bin/python3.11)
==PROF== Profiling "attention_forward_kernel" - 0: 0%....50%....100% - 3 passes
==PROF== Disconnected from process 4242
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"
"0","4242","python3.11","127.0.0.1","attention_forward_kernel","1","7","(384, 1, 1)","(132, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_read.sum","byte","999"
"0","4242","python3.11","127.0.0.1","attention_forward_kernel","1","7","(384, 1, 1)","(132, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_write.sum","byte","1"
"0","4242","python3.11","127.0.0.1","attention_forward_kernel","1","7","(384, 1, 1)","(132, 1, 1)","0","9.0","Command line profiler metrics","gpu__time_duration.sum","nsecond","1"
"1","4242","python3.11","127.0.0.1","attention_forward_kernel","1","7","(384, 1, 1)","(132, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_read.sum","byte","1,234,567,936"
"1","4242","python3.11","127.0.0.1","attention_forward_kernel","1","7","(384, 1, 1)","(132, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_write.sum","Mbyte","67.25"
"1","4242","python3.11","127.0.0.1","attention_forward_kernel","1","7","(384, 1, 1)","(132, 1, 1)","0","9.0","Command line profiler metrics","gpu__time_duration.sum","usecond","4,512.50"
"""

WIDE = """"the program's own line"
"ID","Process ID","Kernel Name","Context","dram__bytes_read.sum","dram__bytes_write.sum","gpu__time_duration.sum"
"","","","","Gbyte","MB","ms"
"0","4242","attention_forward_kernel","1","0.5","1","1"
done
"1","4242","attention_forward_kernel","1","1.234567936","67.25","4.5125"
==WARNING== something
"""
WANTED = {
    "density": 0.5,
    "kernel": "attention_forward_kernel",
    "read_bytes": pytest.approx(1234567936),
    "write_bytes": pytest.approx(67.25e6),
    "ns": pytest.approx(4.5125e6),
}


@pytest.mark.parametrize("text", [LONG, WIDE], ids=["a row for each metric", "a row for each launch"])
def test_the_last_launch_is_read_whatever_the_form_and_the_units(text):
    assert traffic.point(0.5, text) == WANTED
    assert len(traffic.launches(text)) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\nfine\n", "ERR_NVGPUCTRPERM"),
        ("", "nothing"),
        ("\n".join(LONG.splitlines()[:4]), "still named attention_forward"),
        ("\n".join(LONG.splitlines()[:-1]), "no gpu__time_duration.sum"),
        (LONG.replace("1,234,567,936", "n/a"), "'n/a'"),
        (LONG.replace("usecond", "cycle"), "'cycle'"),
    ],
)
def test_what_ncu_could_not_measure_is_an_error_that_says_so(text, said):
    with pytest.raises(ValueError, match=said):
        traffic.point(1.0, text)


def points(a, b):
    return [{"density": d, "kernel": "k", "read_bytes": a + b * d, "write_bytes": 1.0, "ns": 1.0} for d in traffic.DENSITIES]


def test_the_fit_finds_the_line_and_how_much_it_explains():
    assert traffic.fit(points(2e8, 3e9)) == {"a": pytest.approx(2e8), "b": pytest.approx(3e9), "r2": pytest.approx(1)}
    bent = points(2e8, 3e9)
    bent[0]["read_bytes"] *= 0.5
    assert 0 < traffic.fit(bent)["r2"] < 0.99


def test_the_files_hold_the_figures_and_a_plot_for_each_theme(tmp_path):
    data = traffic.write(tmp_path / "new", {"device": "a GPU"}, points(2e8, 3e9))
    assert json.loads((tmp_path / "new" / "traffic.json").read_text()) == data
    assert data["environment"] == {"device": "a GPU"} and len(data["points"]) == 5
    for name in ("traffic.png", "traffic-dark.png"):
        assert (tmp_path / "new" / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("density", traffic.DENSITIES[1:])
def test_rows_of_a_block_map_keep_equally_many_blocks(density):
    blocks = traffic.block_map(density)
    assert blocks.dtype == torch.bool and blocks.shape == (1, 16, 128, 128)
    assert (blocks.sum(-1) == density * 128).all()
    assert not torch.equal(blocks[0, 0], blocks[0, 1])


def stand_in(folder, text, status=0):
    """A program that accepts ncu's options, writes this log and runs nothing."""
    path = folder / "ncu"
    worker = [sys.executable, "-m", "sparse_flash.benchmarks.traffic", "--worker", "0.5", "--backend", "auto"]
    path.write_text(
        f"#!{sys.executable}\nimport sys\nassert sys.argv[-7:] == {worker!r}, sys.argv\n"
        f"open(sys.argv[sys.argv.index('--log-file') + 1], 'w').write({text!r})\nsys.exit({status})\n"
    )
    path.chmod(0o755)
    return str(path)


def test_ncu_is_wrapped_around_a_worker_and_its_log_read(tmp_path):
    assert traffic.point(0.5, traffic.profile(stand_in(tmp_path, LONG), 0.5, "auto")) == WANTED


def test_ncu_that_fails_is_quoted(tmp_path):
    with pytest.raises(RuntimeError, match=r"status 3 at density 0\.5:\n==ERROR== no"):
        traffic.profile(stand_in(tmp_path, "==ERROR== no", 3), 0.5, "auto")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_program_says_so(capsys):
    with pytest.raises(SystemExit):
        traffic.main(["--out", "nowhere"])
    assert "finds no GPU" in capsys.readouterr().err


def test_without_ncu_the_program_says_how_to_get_it(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit):
        traffic.main(["--ncu", "no-such-program"])
    assert "install Nsight Compute" in capsys.readouterr().err
