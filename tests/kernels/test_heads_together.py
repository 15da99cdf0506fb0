"""Hopper's backward pass where one tile is of all query heads that share a key head. Without such a GPU its kernel is simulated."""

from contextlib import nullcontext

import pytest
import torch
from oracle import DEVICE, check, heavy_rows_split

import sparse_flash as sf
from sparse_flash.backends import hopper

pytest.importorskip("triton.experimental.gluon")
import gluon_on_cpu as emulated

from sparse_flash.kernels.hopper import backward, division

parametrize = pytest.mark.parametrize

CASES = {
    "causal": ("causal", 300, 300, {}),
    "bits": ("causal & (local(70) | strided(7, block=1))", 300, 300, {"head_dim": 96}),
    "whole blocks": ("butterfly(block=128)", 512, 512, {"head_dim": 128}),
    "empty rows and columns": ("prefix(70) & ~causal", 400, 300, {}),
    "blocks of 256": ("causal & local(200)", 400, 400, {"block_size": 256}),
    "blocks of 64": ("local(90)", 300, 300, {"block_size": 64, "head_dim": 128}),
}


@pytest.fixture(autouse=True)
def on_hopper(poison):
    if DEVICE == "cuda" and (reason := hopper.why_unavailable()):
        pytest.skip(reason)


@pytest.fixture
def workspaces(monkeypatch):
    """A list of the workspaces of all calls. Columns of any mask are taken for short ones."""
    found, workspace_of = [], backward._workspace
    monkeypatch.setattr(division, "has_short_columns", lambda *sizes: True)
    monkeypatch.setattr(backward, "_workspace", lambda *call: found.append(workspace_of(*call)) or found[-1])
    return found


def simulated(seed: int):
    return emulated.gluon_on_cpu(seed=seed) if DEVICE == "cpu" else nullcontext()


@parametrize("heads, kv_heads, batch", [(4, 1, 1), (6, 2, 2)])
@parametrize("name", CASES)
def test_gradients_are_right_and_need_no_sums_in_memory(workspaces, name, heads, kv_heads, batch):
    spec, q_len, kv_len, changed = CASES[name]
    options = {"block_size": 128, "dtype": torch.float16, "head_dim": 64} | changed
    with simulated(len(name)):
        check("hopper", spec, q_len, kv_len, heads=heads, kv_heads=kv_heads, batch=batch, **options)
    assert {(workspace.together, workspace.added, workspace.kv_sums) for workspace in workspaces} == {(True, False, 0)}


@parametrize(
    "changed",
    [
        {"mask": sf.BlockMask.per_head(["causal", "local(150)"], 300, 300, 128)},
        {"dropout_p": 0.2},
        {"softcap": 2.0},
        {"deterministic": True},
        {"head_dim": 192},
        {"kv_heads": 2},
    ],
)
def test_other_calls_have_a_tile_for_each_head(workspaces, changed):
    sizes = {"heads": 2, "kv_heads": 1, "head_dim": 64}
    options = {"mask": sf.compile_mask("causal", 300, block_size=128)} | {n: of for n, of in changed.items() if n not in sizes}
    sizes |= {n: of for n, of in changed.items() if n in sizes}
    shapes = [(1, sizes[of], 300, sizes["head_dim"]) for of in ("heads", "kv_heads", "kv_heads")]
    q, k, v = (torch.ones(shape, dtype=torch.float16, device=DEVICE, requires_grad=True) for shape in shapes)
    with simulated(1):
        sf.attention(q, k, v, options.pop("mask").to(DEVICE), backend="hopper", **options).sum().backward()
    assert workspaces and not any(workspace.together for workspace in workspaces)


def test_split_columns_are_summed_by_head(workspaces):
    with heavy_rows_split():
        mask = sf.compile_mask("causal | sinks(130)", 512, 512, 128)
    assert mask.by_key.is_split
    with simulated(2):
        check("hopper", mask, 512, 512, dtype=torch.float16, heads=2, kv_heads=1, head_dim=64)
    assert workspaces and not any(workspace.together for workspace in workspaces)


PROGRAMS = 132


@parametrize(
    "spec, tokens, block_size, kv_heads, short",
    [
        ("causal & local(1024)", 65_536, 128, 8, True),
        ("causal & (local(1024) | power_of_two)", 65_536, 128, 8, True),
        ("causal & (local(1024) | power_of_two)", 65_536, 64, 8, True),
        ("causal & local(4096)", 65_536, 128, 8, False),  # 33 blocks
        ("causal", 65_536, 128, 8, False),
        ("causal & local(1024)", 8_192, 128, 8, False),  # 512 tiles for 132 programs
        ("causal & local(1024)", 262_144, 128, 1, False),  # a column may be a thirty-second of one head's work
    ],
)
def test_short_columns_of_many_tiles_are_computed_together(spec, tokens, block_size, kv_heads, short):
    table = sf.compile_mask(spec, tokens, block_size=block_size, progress=False).by_key
    columns, blocks = table.row_order.shape[1], table.col_idx.numel()
    assert division.has_short_columns(kv_heads, columns, blocks, block_size, PROGRAMS) == short
