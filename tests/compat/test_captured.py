"""A mask follows the data that its function reads, also where they change in place."""

import collections
import dataclasses
import types
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, create_block_mask

import sparse_flash as sf
from sparse_flash.compat.captured import learned, state_of

N = 128


class Holder:
    def __init__(self, data):
        self._data = data

    @property
    def data(self):
        return self._data

    def rule(self, q, kv):
        return self._data[q] >= self._data[kv]


class Rows(Holder):
    def __getitem__(self, index):
        return self._data[index]


class Rule(Holder):
    def __call__(self, q, kv):
        return self._data[q] >= self._data[kv]


class Entries:
    def __init__(self, data):
        self.entries = {"data": data}

    def __getattr__(self, name):
        return self.__dict__["entries"][name]


def module_of(data):
    module = torch.nn.Module()
    module.data = torch.nn.Buffer(data) if isinstance(data, torch.Tensor) else data
    return module


def by_items(data):
    return lambda q, kv: data[q] >= data[kv]


def with_offset(data):
    rows = Rows(data)
    rows.offset = 0
    return rows


def with_a_function_of_its_own(data):
    holder = Holder(None)
    holder.rule = by_items(data)
    return holder


OF_ITEMS, OF_BOTH, OF_ATTRIBUTE = "it[q] >= it[kv]", "it[0][q] >= it[1][kv]", "it.data[q] >= it.data[kv]"
# What a function of q and kv returns, and what it reads, made of the data.
READERS = {
    "data in a closure": (OF_ITEMS, lambda data: data),
    "function in a closure": ("it(q, kv)", by_items),
    "list in a closure": (OF_BOTH, lambda data: [data, data]),
    "deque": (OF_BOTH, lambda data: collections.deque([data, data])),
    "attribute of an object": (OF_ATTRIBUTE, lambda data: types.SimpleNamespace(data=data)),
    "buffer of a module": (OF_ATTRIBUTE, module_of),
    "slots": (OF_ATTRIBUTE, dataclasses.make_dataclass("Slots", ["data"], slots=True)),
    "property": (OF_ATTRIBUTE, Holder),
    "__getattr__": (OF_ATTRIBUTE, Entries),
    "getattr": ("getattr(it, 'data')[q] >= it.data[kv]", lambda data: types.SimpleNamespace(data=data)),
    "method of an object": ("it.rule(q, kv)", Holder),
    "function set on an object": ("it.rule(q, kv)", with_a_function_of_its_own),
    "__getitem__": (OF_ITEMS, Rows),
    "__getitem__ and an attribute": ("it[q] >= it[kv] + it.offset", with_offset),
    "another pattern": ("it.token_rule(q, kv)", lambda data: sf.from_mask_fn(by_items(data))),
}
RULES = {
    "default": lambda data: lambda q, kv, data=data: data[q] >= data[kv],
    "partial": lambda data: partial(lambda q, kv, data: data[q] >= data[kv], data=data),
    "method": lambda data: Holder(data).rule,
    "object": Rule,
}


def rule_of(reader, data):
    if reader in RULES:
        return RULES[reader](data)
    text, made = READERS[reader]
    return eval(f"lambda it: lambda q, kv: {text}")(made(data))


COMBINED = {
    "alone": lambda pattern: pattern,
    "&": lambda pattern: sf.full() & (sf.local(200) & pattern),
    "shifted": lambda pattern: sf.local(200) & sf.shifted(~~pattern, 0),
    "per head": lambda pattern: sf.per_head([pattern]),
}
CASES = [*((reader, "alone") for reader in (*READERS, *RULES)), *(("default", combined) for combined in COMBINED)]


@pytest.mark.parametrize("kind", ["array", "tensor"])
@pytest.mark.parametrize("reader, combined", CASES)
def test_a_pattern_whose_function_reads_data_follows_in_place_changes(reader, combined, kind):
    data = torch.arange(N) if kind == "tensor" else np.arange(N)
    pattern = COMBINED[combined](sf.from_mask_fn(rule_of(reader, data)))
    q = torch.randn(1, 1, N, 8)
    calls = (lambda mask: sf.attention(q, q, q, mask), lambda mask: sf.attention_decode(q[:, :, -9:], q, q, mask))
    for call in calls:
        torch.testing.assert_close(call(pattern), call("causal"))
    data[:] = 0
    for call in calls:
        torch.testing.assert_close(call(pattern), call("full"))


def test_two_callable_objects_of_one_class_are_followed_each():
    first, second = Rule(np.arange(N)), Rule(np.arange(N))
    rule = lambda q, kv: first(q, kv) & second(q, kv)  # noqa: E731
    for _ in range(100):  # an id of a freed method may come again
        before = state_of(rule)
        assert before == state_of(rule)
        second.data[0] += 1
        assert before != state_of(rule)


class LearnedTable(torch.nn.Embedding):
    def rate(self, head):
        return self.rates[head]


def test_learned_tensors_are_found_where_the_function_may_read_them_and_nowhere_else():
    module = LearnedTable(2, 1)
    module.rates = torch.zeros(2)
    holder = Holder(module.weight)
    readers = (
        ("self.weight", lambda score, head: score + module(head)),
        ("self._data", lambda score, head: score + holder.rule(head, head)),
        ("self._data", lambda score, head: score + holder.data[head]),
        (None, lambda score, head: score + module.rates[head] + module.rate(head)),
    )
    assert all(learned(reader) == name for name, reader in readers)


WIDTH = 3


def in_closure():
    width = 3

    def rebind(to):
        nonlocal width
        width = to

    return lambda q, kv: q - kv < width, rebind


def in_global():
    return lambda q, kv: q - kv < WIDTH, lambda to: globals().update(WIDTH=to)


def in_default():
    def rule(q, kv, width=3):
        return q - kv < width

    return rule, lambda to: setattr(rule, "__defaults__", (to,))


def in_one_of_two_lists():
    lists = {3: [3], 1: [1, 20, -1, -2]}
    both = [lists[3], lists[1], lists[3], lists[1]]
    return lambda q, kv: q - kv < both[2][0], lambda to: both.__setitem__(2, lists.get(to, [to]))


def in_an_object(text, it, rebind):
    """A rule of this text that reads ``it``."""
    return eval(f"lambda it: lambda q, kv: {text}")(it), partial(rebind, it)


def set_function(functions, to):
    functions[0] = {1: lambda d: d < 1, 20: lambda d: d < 20, -1: lambda d: d < -1, -2: lambda d: d == 7, 3: lambda d: d < 3}[to]


REBOUND = {
    "closure": in_closure,
    "global": in_global,
    "default": in_default,
    "one of two lists": in_one_of_two_lists,
    # 3 to 1 leaves the numbers that differ as they are.
    "list": lambda: in_an_object("q - kv < it[1]", [1, 3, 1], lambda it, to: it.__setitem__(1, to)),
    "attribute": lambda: in_an_object("q - kv < it.width", types.SimpleNamespace(), lambda it, to: setattr(it, "width", to)),
    "function": lambda: in_an_object("it[0](q - kv)", [None], set_function),
}


@pytest.mark.parametrize("name", REBOUND)
def test_a_pattern_follows_values_and_functions_that_its_function_reads(name, monkeypatch):
    rule, rebind = REBOUND[name]()
    q, i, pattern = torch.randn(1, 1, N, 8), np.arange(N), sf.from_mask_fn(rule)
    for width in (3, 20, 1, -1, -2, 3):
        rebind(width)
        wanted = sf.BlockMask.from_dense(torch.from_numpy(np.broadcast_to(rule(i[:, None], i), (N, N)).copy()))
        torch.testing.assert_close(sf.attention(q, q, q, pattern), sf.attention(q, q, q, wanted))
    monkeypatch.setattr(sf.from_mask_fn, "token_rule", None)
    sf.attention(q, q, q, pattern)  # what did not change is not asked again


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16])
def test_a_pattern_follows_a_tensor_of_inference_mode_which_counts_no_changes(dtype):
    with torch.inference_mode():
        data = torch.arange(N).to(dtype)
    q, pattern = torch.randn(1, 1, N, 8), sf.from_mask_fn(lambda q, kv: (data[q] >= data[kv]).numpy())
    torch.testing.assert_close(sf.attention(q, q, q, pattern), sf.attention(q, q, q, "causal"))
    with torch.inference_mode():
        data.zero_()
    torch.testing.assert_close(sf.attention(q, q, q, pattern), sf.attention(q, q, q, "full"))


EARLIER = (torch.arange(700) - 1).clamp(min=0)
# of: a tensor, or the array of its numbers.
RULES_OF_DATA = {
    "unequal": lambda q, kv, of: of[q] != kv,
    "unequal distance": lambda q, kv, of: q - kv != of[q],
    "equal, of both": lambda q, kv, of: (q >= kv) & (of[q] // 50 == of[kv] // 50),
    "data first": lambda q, kv, of: (of[q] // 50 == of[kv] // 50) | (q >= kv),
    "compared later": lambda q, kv, of: kv >= of[q] // 50 * 50,
    "arithmetic": lambda q, kv, of: (kv % 3 + of[q] // 2) % (of[kv] % 5 + 1) == 0,
    "not": lambda q, kv, of: ~(of[q] == kv) ^ (q > kv),
    "an array of the tensor": lambda q, kv, of: (np.asarray(of)[q] != kv) & (np.asarray(of)[kv] != of[q]),
    "functions of NumPy": lambda q, kv, of: (np.where(q > kv, 1, 2) != of[kv]) & (np.abs(q - kv) < 40),
    "of two axes": lambda q, kv, of: (of[:, None] // 9 != of[None] // 9)[q, kv],
}


@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("name", RULES_OF_DATA)
@pytest.mark.filterwarnings("error")
def test_a_function_of_a_tensor_keeps_what_it_keeps_of_the_array_of_its_numbers(name, size):
    rule, array = RULES_OF_DATA[name], EARLIER.numpy()
    for n in (16, 100, 513):
        i = np.arange(n)
        kept = torch.from_numpy(np.broadcast_to(rule(i[:, None], i, array), (n, n)).copy())
        for data in (EARLIER, array):
            mask = sf.compile_mask(sf.from_mask_fn(lambda q, kv, of=data: rule(q, kv, of)), n, block_size=size)
            assert torch.equal(mask.to_dense().view(n, n), kept)


def test_a_function_that_names_torch_gets_tensors():
    for rule in (lambda q, kv: torch.where(q > kv, True, kv % 3 == 0), lambda q, kv: (q - kv).abs() < torch.arange(300)[q] // 3):
        i = torch.arange(300)
        assert torch.equal(sf.compile_mask(sf.from_mask_fn(rule), 300).to_dense().view(300, 300), rule(i[:, None], i))


def test_a_mask_of_flex_attention_follows_the_data_of_its_function():
    document = torch.zeros(N, dtype=torch.int64)
    rule = and_masks(lambda b, h, q, kv: document[q] == document[kv], lambda b, h, q, kv: q >= kv)
    mask = create_block_mask(rule, None, None, N, N, device="cpu")
    q = torch.randn(1, 1, N, 8)
    torch.testing.assert_close(sf.attention(q, q, q, mask), sf.attention(q, q, q, "causal"))
    document[20:] = 1
    wanted = sf.attention(q, q, q, "causal & documents([0, 20, 128])")
    torch.testing.assert_close(sf.attention(q, q, q, mask), wanted)
