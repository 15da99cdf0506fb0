"""A mask follows the data that its function reads, also where they change in place."""

import collections
import dataclasses
import functools
import types

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, create_block_mask

import sparse_flash as sf
from sparse_flash.compat.captured import learned, state_of

N = 128
TABLE = np.arange(N)


class Reader:
    def __init__(self, data):
        self.data = data

    def __call__(self, q, kv):
        return self.data[q] >= self.data[kv]

    def rule(self, q, kv):
        return self.data[q] >= self.data[kv]


@dataclasses.dataclass(slots=True)
class Slots:
    data: object


class Hidden:
    def __init__(self, data):
        self._data = data

    @property
    def data(self):
        return self._data


class Config:
    def __init__(self, data):
        self.entries = {"data": data}

    def __getattr__(self, name):
        return self.__dict__["entries"][name]


class Rows:
    def __init__(self, data):
        self.rows = data

    def __getitem__(self, index):
        return self.rows[index]


def of_default(q, kv, data):
    return data[q] >= data[kv]


def of_global(q, kv):
    return TABLE[q] >= TABLE[kv]


def nested(data):
    def inner(q, kv):
        return data[q] >= data[kv]

    return lambda q, kv: inner(q, kv)


def of_object(made):
    def reader(data):
        holder = made(data)
        return lambda q, kv: holder.data[q] >= holder.data[kv]

    return reader


def of_items_and_an_attribute(data):
    rows = Rows(data)
    rows.offset = 0
    return lambda q, kv: rows[q] >= rows[kv] + rows.offset


def of_a_method_of_its_own(data):
    holder = Reader(None)
    holder.rule = lambda q, kv: data[q] >= data[kv]
    return lambda q, kv: holder.rule(q, kv)


def of_pattern(data):
    pattern = sf.from_mask_fn(lambda q, kv: data[q] >= data[kv])
    return lambda q, kv: pattern.token_rule(q, kv)


def module_of(data):
    module = torch.nn.Module()
    if isinstance(data, torch.Tensor):
        module.register_buffer("data", data)
    else:
        module.data = data
    return module


READERS = {
    "attribute of an object": of_object(lambda data: types.SimpleNamespace(data=data)),
    "buffer of a module": of_object(module_of),
    "slots": of_object(Slots),
    "property": of_object(Hidden),
    "__getattr__": of_object(Config),
    "method of an object": lambda data: (lambda holder: lambda q, kv: holder.rule(q, kv))(Reader(data)),
    "getattr": lambda data: (lambda holder: lambda q, kv: getattr(holder, "data")[q] >= holder.data[kv])(Reader(data)),  # noqa: B009
    "__getitem__": lambda data: (lambda rows: lambda q, kv: rows[q] >= rows[kv])(Rows(data)),
    "__getitem__ and an attribute": of_items_and_an_attribute,
    "function set on an object": of_a_method_of_its_own,
    "another pattern": of_pattern,
    "deque": lambda data: (lambda both: lambda q, kv: both[0][q] >= both[1][kv])(collections.deque([data, data])),
    "list in a closure": lambda data: (lambda both: lambda q, kv: both[0][q] >= both[1][kv])([data, data]),
    "closure": lambda data: lambda q, kv: data[q] >= data[kv],
    "function in a closure": nested,
    "default": lambda data: lambda q, kv, data=data: data[q] >= data[kv],
    "partial": lambda data: functools.partial(of_default, data=data),
    "method": lambda data: Reader(data).rule,
    "object": lambda data: Reader(data),
}


COMBINED = {
    "alone": lambda pattern: pattern,
    "&": lambda pattern: sf.full() & (sf.local(200) & pattern),
    "shifted": lambda pattern: sf.local(200) & sf.shifted(~~pattern, 0),
    "per head": lambda pattern: sf.per_head([pattern]),
}


@pytest.mark.parametrize("kind", ["array", "tensor"])
@pytest.mark.parametrize("reader, combined", [*((reader, "alone") for reader in READERS), *(("closure", one) for one in COMBINED)])
def test_a_pattern_whose_function_reads_data_follows_their_change_in_place(reader, combined, kind):
    data = torch.arange(N) if kind == "tensor" else np.arange(N)
    pattern = COMBINED[combined](sf.from_mask_fn(READERS[reader](data)))
    q = torch.randn(1, 1, N, 8)
    calls = (lambda mask: sf.attention(q, q, q, mask), lambda mask: sf.attention_decode(q[:, :, -9:], q, q, mask))
    for call in calls:
        torch.testing.assert_close(call(pattern), call("causal"))
    data[:] = 0
    for call in calls:
        torch.testing.assert_close(call(pattern), call("full"))


def test_two_callable_objects_of_one_class_are_followed_each():
    first, second = Reader(np.arange(N)), Reader(np.arange(N))
    rule = lambda q, kv: first(q, kv) & second(q, kv)  # noqa: E731
    for _ in range(100):  # an id of a freed method may come again
        before = state_of(rule)
        assert before == state_of(rule)
        second.data[0] += 1
        assert before != state_of(rule)


class LearnedTable(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.ones(2))
        self.rates = torch.zeros(2)

    def forward(self, head):
        return self.table[head]

    def rate(self, head):
        return self.rates[head]


def test_learned_tensors_are_found_where_the_function_may_read_them_and_nowhere_else():
    module = LearnedTable()
    holder, hidden = Reader(module.table), Hidden(module.table)
    readers = {
        "self.table": lambda score, head: score + module(head),
        "self.data": lambda score, head: score + holder.rule(head, head),
        "self._data": lambda score, head: score + hidden.data[head],
        None: lambda score, head: score + module.rates[head] + module.rate(head),
    }
    assert {learned(reader): name for name, reader in zip(readers, readers.values())} == {name: name for name in readers}


WIDTH = 3


def in_closure():
    width = 3

    def rebind(to):
        nonlocal width
        width = to

    return lambda q, kv: abs(q - kv) < width, rebind


def in_global():
    return lambda q, kv: abs(q - kv) < WIDTH, lambda to: globals().update(WIDTH=to)


def in_list():
    width = [1, 3, 1]  # 3 to 1 leaves the numbers that differ as they are
    return lambda q, kv: abs(q - kv) < width[1], lambda to: width.__setitem__(1, to)


def in_attribute():
    holder = types.SimpleNamespace(width=3)
    return lambda q, kv: abs(q - kv) < holder.width, lambda to: setattr(holder, "width", to)


def in_default():
    def rule(q, kv, width=3):
        return abs(q - kv) < width

    return rule, lambda to: setattr(rule, "__defaults__", (to,))


def in_one_of_two_lists():
    lists = {3: [3], 1: [1, 20, -1, -2]}
    both = [lists[3], lists[1], lists[3], lists[1]]
    return lambda q, kv: abs(q - kv) < both[2][0], lambda to: both.__setitem__(2, lists.get(to, [to]))


def in_a_function():
    functions = {1: lambda d: d < 1, 20: lambda d: d < 20, -1: lambda d: d < -1, -2: lambda d: d == 7, 3: lambda d: d < 3}
    used = [functions[3]]
    return lambda q, kv: used[0](abs(q - kv)), lambda to: used.__setitem__(0, functions[to])


@pytest.mark.parametrize("made", [in_closure, in_global, in_list, in_attribute, in_default, in_one_of_two_lists, in_a_function])
def test_a_pattern_follows_values_and_functions_that_its_function_reads(made):
    rule, rebind = made()
    q, i, pattern = torch.randn(1, 1, N, 8), np.arange(N), sf.from_mask_fn(rule)
    for width in (3, 20, 1, -1, -2, 3):
        rebind(width)
        wanted = sf.BlockMask.from_dense(torch.from_numpy(np.broadcast_to(rule(i[:, None], i), (N, N)).copy()))
        torch.testing.assert_close(sf.attention(q, q, q, pattern), sf.attention(q, q, q, wanted))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16])
def test_a_pattern_follows_a_tensor_of_inference_mode_which_counts_no_changes(dtype):
    with torch.inference_mode():
        data = torch.arange(N).to(dtype)
    q, pattern = torch.randn(1, 1, N, 8), sf.from_mask_fn(lambda q, kv: (data[q] >= data[kv]).numpy())
    torch.testing.assert_close(sf.attention(q, q, q, pattern), sf.attention(q, q, q, "causal"))
    with torch.inference_mode():
        data.zero_()
    torch.testing.assert_close(sf.attention(q, q, q, pattern), sf.attention(q, q, q, "full"))


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
