"""The benchmark of attention in e4m3 runs every row, whatever fails in it."""

import torch

from sparse_flash.benchmarks import precision

CPU = torch.device("cpu")


def row(**changed):
    return precision.PrecisionRow("small", "causal", None, 128, 256, 4, 2, 64, **changed)


def test_a_contestant_that_fails_is_a_result_and_the_others_run():
    # On a CPU no back end and no kernel computes in e4m3, and neither peer runs.
    results = precision.measure_row(row(choice="causal & sampled(8, keep=0.5)"), True, 60, CPU)
    results = results["results"]
    assert results.pop("rounding")  # which Triton's interpreter runs
    assert {name for name, result in results.items() if "ms" in result} == {"bf16", "choice and bf16", "choice"}
    failed = {name: result["failed"] for name, result in results.items() if "ms" not in result}
    assert set(failed) == {"fp8", "choice and fp8", "kernel", "FlashAttention-3 fp8", "cuDNN fp8"}
    assert "is installed" in failed["FlashAttention-3 fp8"] and "no back end can run this call" in failed["fp8"]
    assert results["bf16"]["speedup"] == 1.0 and results["choice and bf16"]["from_bf16"] == 0.0
    assert 0.2 < results["choice"]["density"] < 0.6
    assert all(precision.format_result(result) for result in results.values())
