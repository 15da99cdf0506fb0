"""Where each packed document starts and ends, clamped to the tokens: one program."""

import torch
import triton
import triton.language as tl

from ...kernels.launch.launch import launch

# Fields of a document: first token and length of its queries and keys.
Q_START = tl.constexpr(0)
Q_LEN = tl.constexpr(1)
K_START = tl.constexpr(2)
K_LEN = tl.constexpr(3)
DOCUMENT_FIELDS = 4

_DOCUMENTS_TOGETHER = 1024


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _load_documents(cu_seqlens, document, documents, reached, tokens, longest):
    """(first token, tokens, the end that the chunk reached) of documents. Ends that decrease or exceed the tokens cannot be
    reported without synchronizing, so they are clamped: documents neither overlap nor exceed the tokens."""
    some = document < documents
    start = tl.load(cu_seqlens + document, mask=some, other=0).to(tl.int64)
    stop = tl.load(cu_seqlens + document + 1, mask=some, other=0).to(tl.int64)
    start = tl.maximum(tl.associative_scan(tl.maximum(tl.minimum(start, tokens), 0).to(tl.int32), 0, _larger), reached)
    stop = tl.maximum(tl.associative_scan(tl.maximum(tl.minimum(stop, tokens), 0).to(tl.int32), 0, _larger), start)
    return start, tl.where(some, tl.minimum(stop - start, longest), 0), tl.maximum(tl.max(stop, 0), reached)


@triton.jit(do_not_specialize=["documents", "q_tokens", "k_tokens", "q_longest", "k_longest"])
def lay_out_kernel(
    q_cu_seqlens,
    k_cu_seqlens,
    layout,
    documents,
    q_tokens,
    k_tokens,
    q_longest,
    k_longest,
    CHUNK: tl.constexpr,
    SAME: tl.constexpr,
):
    """layout: (DOCUMENT_FIELDS, documents) int32. SAME: keys share the documents of the queries."""
    q_reached = documents * 0
    k_reached = documents * 0
    for first in range(0, documents, CHUNK):
        document = first + tl.arange(0, CHUNK)
        some = document < documents
        out = layout + document
        q_start, q_len, q_reached = _load_documents(q_cu_seqlens, document, documents, q_reached, q_tokens, q_longest)
        k_start, k_len = q_start, q_len
        if not SAME:
            k_start, k_len, k_reached = _load_documents(k_cu_seqlens, document, documents, k_reached, k_tokens, k_longest)
        tl.store(out + Q_START * documents, q_start, mask=some)
        tl.store(out + Q_LEN * documents, q_len, mask=some)
        tl.store(out + K_START * documents, k_start, mask=some)
        tl.store(out + K_LEN * documents, k_len, mask=some)


def lay_out(q_cu_seqlens, k_cu_seqlens, q_tokens: int, k_tokens: int, q_longest: int, k_longest: int, same: bool) -> torch.Tensor:
    """(DOCUMENT_FIELDS, documents) int32: see the top of this module."""
    documents = len(q_cu_seqlens) - 1
    layout = torch.empty((DOCUMENT_FIELDS, documents), dtype=torch.int32, device=q_cu_seqlens.device)
    arguments = [q_cu_seqlens, k_cu_seqlens, layout, documents, q_tokens, k_tokens, q_longest, k_longest]
    constants = {"CHUNK": min(_DOCUMENTS_TOGETHER, triton.next_power_of_2(documents)), "SAME": same}
    launch(lay_out_kernel, (1, 1), arguments, constants, {"num_warps": 4}, (k_cu_seqlens.dtype,))
    return layout
