"""Traffic against density: ncu's output is read in every form, and the line fitted to the figures is right."""

import json

import pytest

from sparse_flash.benchmarks import traffic

HEADER = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
LAUNCHES = (("attention_forward_kernel 0", 1, 2), ("attention_backward_kernel 0", 3, 4))  # these warm up
LAUNCHES += (("attention_forward_kernel", "4,250,000,000", "1,234,567,936"), ("attention_backward_kernel", 32000, 2500000000))
LINES = [
    f'"{number}","{kernel}","{metric}","byte","{value}"'
    for number, (kernel, *values) in enumerate(LAUNCHES)
    for metric, value in zip(traffic.METRICS.values(), values, strict=True)
]
LOG = "\n".join(["==PROF== Connected to process 4242 (/usr/bin/python3.11)", HEADER, '"a line of","the program"', *LINES])


def test_figures_are_those_of_the_last_launch_of_each_pass_or_an_error_says_what_ncu_said():
    assert traffic.parse_point(0.5, LOG) == {
        "density": 0.5,
        "forward": {"kernel": "attention_forward_kernel", "multiprocessor_bytes": 4.25e9, "dram_bytes": 1234567936.0},
        "backward": {"kernel": "attention_backward_kernel", "multiprocessor_bytes": 32e3, "dram_bytes": 2.5e9},
    }
    with pytest.raises(ValueError, match="ERR_NVGPUCTRPERM"):
        traffic.parse_point(1.0, "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\nfine\n")
    with pytest.raises(ValueError, match="no bytes of attention_forward"):
        traffic.parse_point(1.0, HEADER)


def points(a, b):
    return [
        {"density": d, **{name: {"kernel": "k"} | dict.fromkeys(traffic.LEVELS, a + b * d) for name in traffic.PASSES}}
        for d in traffic.DENSITIES
    ]


def test_the_fit_finds_slope_intercept_and_explained_variance():
    line = {"a": pytest.approx(2e8), "b": pytest.approx(3e9), "r2": pytest.approx(1)}
    assert traffic.fit(points(2e8, 3e9), "backward", "dram_bytes") == line
    bent = points(2e8, 3e9)
    bent[0]["backward"]["dram_bytes"] *= 0.5
    assert 0 < traffic.fit(bent, "backward", "dram_bytes")["r2"] < 0.99


def test_the_files_hold_the_figures_and_a_plot_for_each_theme(tmp_path):
    data = traffic.write(tmp_path, {"device": "a GPU"}, points(2e8, 3e9))
    assert json.loads((tmp_path / "traffic.json").read_text()) == data
    assert data["environment"] == {"device": "a GPU"} and len(data["points"]) == len(traffic.DENSITIES)
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("traffic.png", "traffic-dark.png"))
