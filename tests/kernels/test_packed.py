"""The kernels of packed documents as compiled for a Hopper GPU, without one."""

import pytest
from outcomes import outcomes_of

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def packed():
    return outcomes_of("sm90_launches.py", "packed")


def test_they_compile_without_spilling(packed):
    assert len(packed) == 19 and all(k["stack"] == 0 for k in packed), packed


def test_rows_of_whole_16_bytes_move_in_pieces_of_16_bytes(packed):
    moves = [k for k in packed if k["kernel"] == "take_rows"]
    assert len(moves) == 4
    for k in moves:
        whole = k["bytes"] % 16 == 0
        assert not whole or (k["wide"], k["wide_stores"]) == (4, 4), k  # a thread's part of a tile is four pieces
        # So that 24 warps or more have loads under way: 65,536 registers of a multiprocessor, for programs of 128 threads.
        assert 65536 // (128 * k["reg"]) >= 6, k
