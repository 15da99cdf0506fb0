"""Attention in TLX, the low-level extensions of Meta's fork of Triton.

The fork, fbtriton, takes the place of Triton. So measure TLX in an environment of its own, with ``--only "tlx$"``. The folder may
be that of a run that measured the others.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata

import torch

from ..workload.problem import Problem
from .base import Peer

_TILE = 128  # queries, and keys, that its kernel computes at once


class Tlx(Peer):
    """The fork's own kernel for Hopper, among its tutorials."""

    has_backward = False

    def refuses(self, problem: Problem) -> str | None:
        if problem.name != "full" or problem.grouped or problem.dropout_p or problem.kv_lens is not None:
            return "its kernel for Hopper is dense, without groups of heads, dropout or padding"
        if problem.q.shape[2] % _TILE:
            return f"its tokens are a multiple of {_TILE}; got {problem.q.shape[2]}"
        try:
            import triton.language.extra.tlx  # noqa: F401
        except ImportError as error:
            return f"fbtriton, the Triton with TLX, is not installed ({error})"
        return None

    def runs_on(self, problem: Problem) -> str | None:
        return f"fbtriton {metadata.version('fbtriton')}"

    def prepare(self, problem: Problem) -> Callable[[], torch.Tensor]:
        from triton.language.extra.tlx.tutorials import hopper_fa_ws_pipelined_pingpong_persistent as tutorial

        return lambda: tutorial.attention(*problem.leaves, problem.q.shape[3] ** -0.5)
