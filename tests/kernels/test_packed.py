"""The kernels that move rows of packed documents, as compiled for a Hopper GPU, without one. ``test_compiled`` has all kernels."""

import pytest
from outcomes import outcomes_of

pytest.importorskip("triton")


def test_rows_of_whole_16_bytes_move_in_pieces_of_16_bytes_without_spilling():
    moves = outcomes_of("sm90.py", "moves")
    assert len(moves) == 4 and all(k["stack"] == 0 for k in moves), moves
    for k in moves:
        whole = int(k["case"][0]) % 16 == 0
        assert not whole or (k["wide"], k["wide_stores"]) == (4, 4), k  # a thread's part of a tile is four pieces
        # So that 24 warps or more have loads under way: 65,536 registers of a multiprocessor, for programs of 128 threads.
        assert 65536 // (128 * k["reg"]) >= 6, k
