"""``integrations.block_sparse_attn`` against what that package documents: which pairs each type of head keeps.

Arguments are passed by their positions, as these are that package's too."""

from itertools import count

import torch
from accepted import DEVICE
from calls import bounds_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracle import Call, assert_right, dense_attention

import sparse_flash as sf
from sparse_flash.integrations import block_sparse_attn as bsa

HEADS, DIM, BLOCK = 4, 16, 128
DTYPE = torch.float64 if DEVICE == "cpu" else torch.float16


def blocks(tokens):
    return -(-tokens // BLOCK)


def kept_pairs(kind, first, last, causal, exact, own_map, q_len, kv_len):
    """(q_len, kv_len) bool of one head of one document. kind: 0, -1, or positive for own_map, (q_blocks, kv_blocks)."""
    i, j = torch.arange(q_len)[:, None], torch.arange(kv_len)
    position = i + kv_len - q_len
    seen = (j <= position) | (not causal)
    if kind == 0:
        return seen
    if kind > 0:
        return seen & own_map[i // BLOCK, j // BLOCK]
    if exact:
        return seen & ((j < first) | (j > position - last))
    rows_before = max(0, (q_len - kv_len) // BLOCK)
    stop = blocks(max(0, kv_len - q_len)) + 1 + i // BLOCK - rows_before if causal else blocks(kv_len)
    return seen & ((j // BLOCK < first) | ((j // BLOCK >= stop - last) & (j // BLOCK < stop)))


lengths = st.integers(1, 300) | st.sampled_from([0, 1, 127, 128, 129, 256, 257])
pairs = st.tuples(lengths, lengths) | lengths.map(lambda n: (n, n))


@st.composite
def calls(draw):
    documents = draw(st.lists(pairs, min_size=1, max_size=3) | st.builds(lambda pair: [pair, pair], pairs))
    exact = draw(st.booleans())
    most, types = (300, [0, -1]) if exact else (3, [0, 1, -1])
    return {
        "documents": documents,
        "types": draw(st.lists(st.sampled_from(types), min_size=HEADS, max_size=HEADS)),
        "info": draw(st.lists(st.integers(0, most), min_size=2 * HEADS, max_size=2 * HEADS)),
        "kv_heads": draw(st.sampled_from([1, 2, 4])),
        "causal": exact or draw(st.booleans()),
        "exact": exact,
        "share": draw(st.sampled_from([0.2, 0.6, 1.0])),
        "past": draw(st.sampled_from([0, 3])),
        "on_host": draw(st.booleans()),
        "seed": draw(st.integers(0, 99)),
    }


MIXED = {"documents": [(257, 384)] * 2, "types": [1, -1, 0, 1], "info": [1, 1] * HEADS, "kv_heads": 2, "causal": True}
MIXED |= {"exact": False, "share": 0.6, "past": 0, "on_host": False, "seed": 0}
STREAMING = MIXED | {"types": [-1, -1, 0, -1]}


@settings(max_examples=25)
@given(calls())
@example(MIXED)
@example(MIXED | {"causal": False})
@example(MIXED | {"types": [1, 2, -1, 1]})  # two heads share a map
@example(STREAMING | {"info": [3, 140] * HEADS, "exact": True})
# A whole block of queries from position 255 on would end in the third block of keys.
@example(STREAMING | {"documents": [(1, 256)], "info": [0, 1] * HEADS})
def test_each_head_of_each_document_is_the_definition(call):
    torch.manual_seed(call["seed"])
    types, info = call["types"], call["info"]
    q_lens, kv_lens = zip(*call["documents"], strict=True)
    longest = max(q_lens) + 5, max(kv_lens) + 5
    maps, number = torch.rand(len(q_lens), types.count(1), *map(blocks, longest)) < call["share"], count()
    kept = []
    for head, kind in enumerate(types):
        own_maps = maps[:, next(number) if kind == 1 else kind - 1] if kind > 0 else maps
        counts = info[2 * head : 2 * head + 2]
        of_documents = [
            kept_pairs(kind, *counts, call["causal"], call["exact"], own_map, *lens)
            for own_map, lens in zip(own_maps, call["documents"], strict=True)
        ]
        kept.append(torch.block_diag(*of_documents).bool())
    kept = torch.nn.functional.pad(torch.stack(kept), (0, 0, 0, call["past"])).to(DEVICE)
    of_host = [bounds_of(q_lens), bounds_of(kv_lens), *(torch.tensor(numbers, dtype=torch.int32) for numbers in (types, info))]
    documents = [t if call["on_host"] else t.to(DEVICE) for t in of_host]
    exact, of_maps = call["exact"], maps.to(DEVICE) if 1 in types else None

    def run(q, k, v):
        packed = (t[0].transpose(0, 1) for t in (q, k, v))
        terms = 0.0, False, None, call["causal"], exact, True
        out, lse, none = bsa.block_sparse_attn_func(*packed, *documents, of_maps, *longest, *terms)
        assert none is None and all(of_one[:, n:].isneginf().all() for of_one, n in zip(lse, q_lens, strict=True))
        past = lse.new_full((HEADS, call["past"]), float("-inf"))
        lse = torch.cat([*(of_one[:, :n] for of_one, n in zip(lse, q_lens, strict=True)), past], 1)
        return out.transpose(0, 1)[None], lse[None]

    shapes = (HEADS, sum(q_lens) + call["past"]), *[(call["kv_heads"], sum(kv_lens))] * 2
    inputs = tuple(torch.randn(1, *shape, DIM).to(DEVICE, DTYPE) for shape in shapes)
    assert_right(Call(inputs, run, lambda *t: dense_attention(*t, kept)), "auto")


def test_dropout_and_scale_are_those_of_attention():
    q, k, v = torch.randn(3, 200, 2, DIM)
    documents = bounds_of([200]), bounds_of([200]), torch.zeros(2, dtype=torch.int32), None, None, 200, 200
    torch.manual_seed(1)
    out = bsa.block_sparse_attn_func(q, k, v, *documents, 0.3, False, 0.2, True)
    torch.manual_seed(1)
    right = sf.attention(*(t.transpose(0, 1)[None] for t in (q, k, v)), "causal", dropout_p=0.3, scale=0.2)
    torch.testing.assert_close(out, right[0].transpose(0, 1))
