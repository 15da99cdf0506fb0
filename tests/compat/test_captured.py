"""A mask follows the data that its function reads, also where they change in place."""

import functools
import types

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, create_block_mask

import sparse_flash as sf

N = 128
TABLE = np.arange(N)


class Reader:
    def __init__(self, data):
        self.data = data

    def __call__(self, q, kv):
        return self.data[q] >= self.data[kv]

    def rule(self, q, kv):
        return self.data[q] >= self.data[kv]


def of_default(q, kv, data):
    return data[q] >= data[kv]


def of_global(q, kv):
    return TABLE[q] >= TABLE[kv]


def nested(data):
    def inner(q, kv):
        return data[q] >= data[kv]

    return lambda q, kv: inner(q, kv)


def of_attribute(data):
    holder = types.SimpleNamespace(data=data)
    return lambda q, kv: holder.data[q] >= holder.data[kv]


def of_buffer(data):
    module = torch.nn.Module()
    if isinstance(data, torch.Tensor):
        module.register_buffer("data", data)
    else:
        module.data = data
    return lambda q, kv: module.data[q] >= module.data[kv]


READERS = {
    "attribute of an object": of_attribute,
    "buffer of a module": of_buffer,
    "list in a closure": lambda data: (lambda both: lambda q, kv: both[0][q] >= both[1][kv])([data, data]),
    "closure": lambda data: lambda q, kv: data[q] >= data[kv],
    "function in a closure": nested,
    "default": lambda data: lambda q, kv, data=data: data[q] >= data[kv],
    "partial": lambda data: functools.partial(of_default, data=data),
    "method": lambda data: Reader(data).rule,
    "object": lambda data: Reader(data),
}


@pytest.mark.parametrize("combined", ["alone", "&", "shifted", "per head"])
@pytest.mark.parametrize("kind", ["array", "tensor"])
@pytest.mark.parametrize("reader", READERS)
def test_a_pattern_whose_function_reads_data_follows_their_change_in_place(reader, kind, combined):
    data = torch.arange(N) if kind == "tensor" else np.arange(N)
    alone = sf.from_mask_fn(READERS[reader](data))
    pattern = {
        "alone": alone,
        "&": sf.full() & (sf.local(200) & alone),
        "shifted": sf.local(200) & sf.shifted(~~alone, 0),
        "per head": sf.per_head([alone]),
    }[combined]
    q = torch.randn(1, 1, N, 8)
    calls = (lambda mask: sf.attention(q, q, q, mask), lambda mask: sf.attention_decode(q[:, :, -9:], q, q, mask))
    for call in calls:
        torch.testing.assert_close(call(pattern), call("causal"))
    data[:] = 0
    for call in calls:
        torch.testing.assert_close(call(pattern), call("full"))


def test_a_pattern_whose_function_reads_a_global_follows_it_and_unchanged_data_compile_nothing(monkeypatch):
    q, pattern = torch.randn(1, 1, N, 8), sf.from_mask_fn(of_global)
    torch.testing.assert_close(sf.attention(q, q, q, pattern), sf.attention(q, q, q, "causal"))
    monkeypatch.setitem(globals(), "TABLE", np.zeros(N))
    torch.testing.assert_close(sf.attention(q, q, q, pattern), sf.attention(q, q, q, "full"))
    monkeypatch.setattr(sf.from_mask_fn, "token_rule", None)  # not asked again
    sf.attention(q, q, q, pattern)


def test_a_mask_of_flex_attention_follows_the_data_of_its_function():
    document = torch.zeros(N, dtype=torch.int64)
    rule = and_masks(lambda b, h, q, kv: document[q] == document[kv], lambda b, h, q, kv: q >= kv)
    mask = create_block_mask(rule, None, None, N, N, device="cpu")
    q = torch.randn(1, 1, N, 8)
    torch.testing.assert_close(sf.attention(q, q, q, mask), sf.attention(q, q, q, "causal"))
    document[20:] = 1
    wanted = sf.attention(q, q, q, "causal & documents([0, 20, 128])")
    torch.testing.assert_close(sf.attention(q, q, q, mask), wanted)
