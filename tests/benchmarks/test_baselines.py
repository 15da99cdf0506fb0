"""Peers refuse what they cannot compute, and operations are counted. What a peer computes is compared with float64 wherever it is
installed, before it is timed."""

from dataclasses import replace

import pytest
import torch
from problems import problem

from sparse_flash.benchmarks.baselines import registry
from sparse_flash.benchmarks.measure import throughput
from sparse_flash.benchmarks.workload import cases, masks

CPU = torch.device("cpu")
PLAIN = {"block_size": 64}
REFUSED = [
    ("sdpa-flash", "local(9)", {}, "dense"),
    ("fa3", "local(9)", {}, "window"),
    ("fa4", "local(9)", {}, "window"),
    ("cudnn-blocks", "causal", PLAIN, "full blocks"),
    ("cudnn-blocks", "full", PLAIN, "full blocks"),
    ("cudnn-blocks", "butterfly(block=32)", {"block_size": 32}, "blocks of 32"),
    *(("fastvideo", spec, PLAIN | {"head_dim": 64}, "full blocks") for spec in ("causal", "full", "~local(200)")),
    ("fastvideo", "butterfly(block=64)", PLAIN, "head_dim"),
]


@pytest.mark.parametrize("peer, spec, shape, reason", REFUSED, ids=str)
def test_peers_refuse_with_a_reason(peer, spec, shape, reason):
    assert reason in registry.find_peer(peer).refuses(problem(spec, **shape))


def test_peers_refuse_dtypes_and_dropout_and_unknown_ones_are_errors():
    doubled = replace(problem("local(9)"), q=problem("local(9)").q.double())
    assert registry.find_peer("sparse_flash:triton").refuses(doubled)
    assert registry.find_peer("sparse_flash:torch").refuses(doubled) is None
    dropped = replace(problem("full"), dropout_p=0.1)
    assert all("dropout" in registry.find_peer(name).refuses(dropped) for name in ("flex", "fa4"))
    for name in ("flax", "flex:triton"):
        with pytest.raises(ValueError, match="unknown peer"):
            registry.find_peer(name)


def test_operations_are_counted_product_by_product():
    assert cases.Shape(1, 1, 1, 128).flops == (4 * 128, 10 * 128)
    assert cases.Shape(1, 1, 1, 192, v_head_dim=128).flops == (2 * (192 + 128), 2 * (3 * 192 + 2 * 128))


def test_values_of_another_head_dim_are_measured():
    case = cases.Case(cases.Shape(1, 2, 128, 24, v_head_dim=16), masks.CAUSAL, "sparse_flash")
    assert str(case.shape) == "B1 H2 N128 D24/16"
    assert throughput.run(case, CPU, seconds=0.01)["correct"]
