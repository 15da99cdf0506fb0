"""Prints why the Hopper back end does not take each of some score functions, or null, one JSON value per line.

Run it as a separate process: kernels defined under TRITON_INTERPRET cannot be compiled.
"""

import json

import torch
import triton
import triton.language as tl

import sparse_flash as sf
from sparse_flash.kernels.hopper.own_scores import refusal


@triton.jit
def faded(score):
    return tl.exp(-tl.abs(score))


@triton.jit
def elementwise(score, batch, head, q_pos, k_pos, params):
    same = tl.load(params[0] + q_pos) == tl.load(params[0] + k_pos)
    return tl.where(same, score + faded((q_pos - k_pos).to(tl.float32)), -float("inf"))


@triton.jit
def of_its_own(score, batch, head, q_pos, k_pos, params):
    return score + tl.arange(0, 128)[None, :]


@triton.jit
def along_keys(score, batch, head, q_pos, k_pos, params):
    return tl.cumsum(score, 1)


@triton.jit
def of_rows(score, batch, head, q_pos, k_pos, params):
    return q_pos.to(tl.float32)


@triton.jit
def rounded(score, batch, head, q_pos, k_pos, params):
    return score.to(tl.float16)


@triton.jit
def one(score, batch, head, q_pos, k_pos, params):
    return 1.0


def in_torch(score, batch, head, q_pos, k_pos, params):
    return score


ASKED = [(elementwise, torch.int32), (elementwise, torch.complex64)]
ASKED += [(function, torch.float32) for function in (of_its_own, along_keys, of_rows, rounded)]

if __name__ == "__main__":
    for function, dtype in ASKED:
        print(json.dumps(refusal(sf.ScoreFunction(in_torch, function, one), (dtype,))))
