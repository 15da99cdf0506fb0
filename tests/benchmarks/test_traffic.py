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
"""
for number, (kernel, values) in enumerate(
    {
        "attention_forward_kernel 0": ("999", "byte", "1", "byte", "1", "byte", "1", "nsecond"),
        "attention_backward_kernel 0": ("998", "byte", "1", "byte", "1", "byte", "1", "nsecond"),
        "attention_forward_kernel": ("4.25", "Gbyte", "1,234,567,936", "byte", "67.25", "Mbyte", "4,512.50", "usecond"),
        "attention_backward_kernel": ("32", "Kbyte", "2.5", "GB", "3", "Gbyte", "9", "msecond"),
    }.items()
):
    for metric, value, unit in zip(traffic.METRICS.values(), values[::2], values[1::2], strict=True):
        place = '"4242","python3.11","127.0.0.1"'
        LONG += (
            f'"{number}",{place},"{kernel}","1","7","(384, 1, 1)","(132, 1, 1)","0","9.0","metrics","{metric}","{unit}","{value}"\n'
        )

WANTED = {
    "density": 0.5,
    "forward": {
        "kernel": "attention_forward_kernel",
        "multiprocessor_bytes": pytest.approx(4.25e9),
        "dram_bytes": pytest.approx(1234567936),
        "dram_written_bytes": pytest.approx(67.25e6),
        "ns": pytest.approx(4.5125e6),
    },
    "backward": {
        "kernel": "attention_backward_kernel",
        "multiprocessor_bytes": pytest.approx(32e3),
        "dram_bytes": pytest.approx(2.5e9),
        "dram_written_bytes": pytest.approx(3e9),
        "ns": pytest.approx(9e6),
    },
}


def test_the_last_launch_is_read_whatever_the_units():
    text = LONG.replace('"3","4242"', '"a line of","the program"\n"3","4242"', 1)
    assert traffic.parse_point(0.5, text) == WANTED and len(traffic.parse_launches(text)) == 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\nfine\n", "ERR_NVGPUCTRPERM"),
        ("", "nothing"),
        ("\n".join(LONG.splitlines()[:4]), "still named attention_forward"),
        ("\n".join(line for line in LONG.splitlines() if "backward" not in line), "still named attention_backward"),
        ("\n".join(line for line in LONG.splitlines() if "time_duration" not in line), "no gpu__time_duration.sum"),
        (LONG.replace("1,234,567,936", "n/a"), "'n/a'"),
        (LONG.replace("usecond", "cycle"), "'cycle'"),
    ],
)
def test_what_ncu_could_not_measure_is_an_error_that_says_so(text, said):
    with pytest.raises(ValueError, match=said):
        traffic.parse_point(1.0, text)


def points(a, b):
    of_pass = {"kernel": "k", "dram_written_bytes": 1.0, "ns": 1.0}
    return [
        {"density": d, **{name: of_pass | dict.fromkeys(traffic.LEVELS, a + b * d) for name in traffic.PASSES}}
        for d in traffic.DENSITIES
    ]


@pytest.mark.parametrize("level", traffic.LEVELS)
@pytest.mark.parametrize("name", traffic.PASSES)
def test_the_fit_finds_the_line_and_how_much_it_explains(name, level):
    line = {"a": pytest.approx(2e8), "b": pytest.approx(3e9), "r2": pytest.approx(1)}
    assert traffic.fit(points(2e8, 3e9), name, level) == line
    bent = points(2e8, 3e9)
    bent[0][name][level] *= 0.5
    assert 0 < traffic.fit(bent, name, level)["r2"] < 0.99


def test_the_count_is_that_of_a_walk_over_all_blocks():
    blocks, block = traffic.TOKENS // traffic.BLOCK, traffic.BLOCK * traffic.HEAD_DIM * 2  # bytes of a tile of one tensor
    forward, backward = (sum(traffic.count_bytes(name).values()) for name in traffic.PASSES)
    assert forward == traffic.HEADS * (blocks * block + blocks**2 * 2 * block)
    assert backward == traffic.HEADS * (blocks * 2 * block + blocks**2 * (2 * block + 2 * traffic.BLOCK * 4))


def test_the_files_hold_the_figures_and_a_plot_for_each_theme(tmp_path):
    data = traffic.write(tmp_path / "new", {"device": "a GPU"}, points(2e8, 3e9))
    assert json.loads((tmp_path / "new" / "traffic.json").read_text()) == data
    assert data["environment"] == {"device": "a GPU"} and len(data["points"]) == len(traffic.DENSITIES)
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
    assert traffic.parse_point(0.5, traffic.profile(stand_in(tmp_path, LONG), 0.5, "auto")) == WANTED


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
