"""PyTorch operators: what torch.compile, autograd and autocast see of a back end.

A mask enters an operator as its list of tensors (``BlockMask.tensors()``), by which it is found again, and its block size, 0 for
dense attention; a pattern as its spec text; a variant as its tensors, their names and its numbers (``Variant.packed()``). Blocks
that a compiled graph chose enter as bits, with the pattern that limits them (``ChosenBlocks``). Tables are looked up or made inside
the operator, where lengths are numbers, so one compiled graph serves all lengths. An empty list is replaced by a list of q, which
is unused: AOTInductor turns an empty list into None.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.library import CustomOpDef

from ..compat import pytorch
from ..compat.names import operator_name
from ..kernels.common.layout import empty_out
from ..masks.block_mask import BlockMask, check_batch_and_heads, compile_cached, from_block_maps, resolve_within
from ..masks.cache import keep_if_captured
from ..masks.grid import BlockGrid
from . import backends
from .call import AttentionCall, ChosenBlocks, prepare
from .definition import with_sinks
from .results import compute_dtype, zero_keyless_queries
from .variant import NO_VARIANT, Variant

DEFAULT_BLOCK_SIZE = 128  # tokens, in the tables of patterns
NOTHING = "nothing"  # the back end of calls with nothing to compute


def attend(call: AttentionCall):
    """(out, lse) of a call, differentiable in q, k, v, sinks and a learned rel_bias."""
    q, k, v, _, table, scale, deterministic, backend, variant, precision, launches = call
    if backend == NOTHING:
        return make_empty_results(q, k, v, variant)
    if precision is not None:
        out, lse = _compute_in_eight_bits(call)
        return (out, lse) if variant is None or variant.sinks is None else with_sinks(out, lse, variant.sinks, None)
    if launches is not None:
        learned = variant is not None and (variant.learned or variant.learned_sinks)
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or learned):
            return _attend_directly(q, k, v, call.on(*NO_TENSORS), False, *(variant.tensors() if variant is not None else ()))
        return backends.get_backend(backend).forward(call)
    refuse_transforms(*call.inputs())
    tensors, *packed = NO_VARIANT if variant is None else variant.packed()
    return _forward(q, k, v, *_to_operator_args(table, q), scale, deterministic, backend, tensors or [q], *packed)


def documents_as_batch(x: torch.Tensor) -> torch.Tensor:
    """Views (tokens, heads, head_dim) as a batch of one, (1, heads, tokens, head_dim)."""
    return x.transpose(0, 1).unsqueeze(0)


def batch_as_documents(x: torch.Tensor) -> torch.Tensor:
    """The reverse of ``documents_as_batch``."""
    return x.squeeze(0).transpose(0, 1)


def _plain_as_batch(x: torch.Tensor) -> torch.Tensor:
    """``documents_as_batch`` in one operation, for plain tensors."""
    (tokens, heads, dim), (of_token, of_head, of_dim) = x.shape, x.stride()
    return x.as_strided((1, heads, tokens, dim), (heads * of_head, of_head, of_token, of_dim))


def _plain_as_documents(x: torch.Tensor) -> torch.Tensor:
    """The reverse of ``_plain_as_batch``."""
    _, *sizes = zip(x.shape, x.stride())
    (heads, of_head), (tokens, of_token), (dim, of_dim) = sizes
    return x.as_strided((tokens, heads, dim), (of_token, of_head, of_dim))


def attend_to_documents(call: AttentionCall):
    """``attend`` on packed q, k and v, (tokens, heads, head_dim): out (tokens, heads, v_head_dim), lse (heads, tokens)."""
    q, k, v = tensors = call[:3]
    if call.backend == NOTHING or call.launches is None or not pytorch.is_plain_eager(*tensors):
        call = call._replace(launches=None)
        out, lse = attend(call.on(*map(documents_as_batch, tensors)))
        return batch_as_documents(out), lse.squeeze(0)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _attend_directly(q, k, v, call.on(*NO_TENSORS), True)
    out, lse = attend(call.on(*map(_plain_as_batch, tensors)))
    return _plain_as_documents(out), lse[0]


def make_empty_results(q, k, v, variant: Variant | None):
    """The results without queries or keys. No kernel runs; all gradients except the sinks' are 0."""
    learned = [variant.rel_bias] if variant is not None and variant.learned else []
    zero = sum(t.flatten()[:0].float().sum() for t in (q, k, v, *learned))
    lse = q.new_full(q.shape[:3], float("-inf"), dtype=compute_dtype(q))
    out, lse = torch.zeros_like(empty_out(q, v.shape[3])) + zero, lse + zero.to(lse.dtype)
    return (out, lse) if variant is None or variant.sinks is None else with_sinks(out, lse, variant.sinks, variant)


def _compute_in_eight_bits(call: AttentionCall):
    """(out, lse), not differentiable."""
    if call.launches is not None:
        return backends.get_backend(call.backend).forward_in_eight_bits(call)
    refuse_transforms(*call[:3])
    return _forward_in_eight_bits(*call[:3], *_to_operator_args(call.table, call.q), call.scale, call.backend)


def _to_operator_args(table: BlockMask | ChosenBlocks | str | None, q: torch.Tensor) -> tuple[list[torch.Tensor], int, str]:
    """(tables, block size, pattern): the operator's arguments for a table."""
    if isinstance(table, ChosenBlocks):
        return [table.bits], table.block_size, table.within
    if isinstance(table, str):
        return [q], DEFAULT_BLOCK_SIZE, table
    return ([q], 0, "") if table is None else (table.tensors(), table.block_size, "")


def attention_decode(
    q, k, v, mask: BlockMask | None, kv_lens, block_table, causal: bool, scale: float | None, backend: str, *of_cache
):
    """(out, lse), not differentiable. backend: one that supports the call. of_cache: k_scale, v_scale, kv_starts."""
    if pytorch.is_plain_eager(q, k, v):
        return backends.get_backend(backend).decode(q, k, v, mask, kv_lens, block_table, causal, scale, *of_cache)
    refuse_transforms(q, k, v)
    tables, tokens, block_size = ([q], 0, 0) if mask is None else (mask.tensors(), mask.q_len, mask.block_size)
    return _decode(q, k, v, tables, tokens, block_size, kv_lens, block_table, causal, scale, backend, *of_cache)


def refuse_transforms(*tensors) -> None:
    """Raises NotImplementedError under vmap, torch.func's derivatives and forward-mode differentiation. For the first two,
    PyTorch's error suggests no fix; in forward mode, PyTorch silently takes an operator's derivative to be 0."""
    if not torch.compiler.is_compiling() and (pytorch.in_differentiating_transform() or pytorch.has_forward_derivative(*tensors)):
        raise _transform_error()


def refuse_batched(gradient: torch.Tensor | None) -> None:
    """Raises NotImplementedError for an incoming gradient that vmap maps over."""
    if gradient is not None and not torch.compiler.is_compiling() and pytorch.is_batched_gradient(gradient):
        raise _transform_error()


def _transform_error() -> NotImplementedError:
    return NotImplementedError(
        "sparse_flash's operators work under reverse-mode autograd (backward, torch.autograd.grad), not under vmap, torch.func's "
        "transforms, forward mode, is_grads_batched=True or jacobian(vectorize=True); put what vmap would map over into the batch, "
        "loop over the gradients, or write attention in PyTorch operations"
    )


def needs_operator() -> bool:
    """Whether a compiler, an exporter or a dispatch mode has to see the operator."""
    return torch.compiler.is_compiling() or pytorch.active_modes() > 0


class _DirectAttention(torch.autograd.Function):
    """The operator's autograd without dispatch, which takes the host long; views, made here for packed documents, do too."""

    @staticmethod
    def forward(ctx, q, k, v, call, of_documents, *more):
        tensors = map(_plain_as_batch, (q, k, v)) if of_documents else (q, k, v)
        out, lse = backends.get_backend(call.backend).forward(call.on(*tensors))
        ctx.save_for_backward(q, k, v, out, lse, *more)
        # Without the variant's tensors, which hooks of saved tensors may move.
        ctx.packed = None if call.variant is None else call.variant.packed()[1:]
        ctx.call, ctx.of_documents = call._replace(variant=None), of_documents
        ctx.set_materialize_grads(False)
        return (_plain_as_documents(out), lse[0]) if of_documents else (out, lse)

    @staticmethod
    def backward(ctx, dout, dlse):
        if torch.is_grad_enabled():  # create_graph is set
            with torch.no_grad():
                gradients = _DirectAttention._gradients(ctx, dout, dlse)
            return _OnceDifferentiable.apply(len(gradients), *gradients, dout, dlse, *ctx.saved_tensors)
        return _DirectAttention._gradients(ctx, dout, dlse)

    @staticmethod
    def _gradients(ctx, dout, dlse):
        q, k, v, out, lse, *more = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * (5 + len(more))
        visible = needs_operator()  # if a mode was entered after the forward pass
        if ctx.of_documents:
            q, k, v = map(documents_as_batch if visible else _plain_as_batch, (q, k, v))
            dout, dlse = dout if dout is None else documents_as_batch(dout), dlse if dlse is None else dlse.unsqueeze(0)
        variant = None if ctx.packed is None else Variant.unpacked(more, *ctx.packed)
        dout, dlse = prepare_upstream(dout, dlse, out, lse)
        call = ctx.call._replace(q=q, k=k, v=v, variant=variant)
        if visible:
            of_call = *_to_operator_args(call.table, q), call.scale, call.deterministic, call.backend
            grads = _backward(dout, dlse, q, k, v, out, lse, *of_call, more or [q], *(ctx.packed or NO_VARIANT[1:]))
        else:
            grads = _all_gradients(call, dout, dlse, out, lse)
        of_variant = [] if variant is None else variant.gradients(*grads[3:])
        if ctx.of_documents:
            grads = *map(batch_as_documents if visible else _plain_as_documents, grads[:3]), *grads[3:]
        return *grads[:3], None, None, *of_variant


NO_TENSORS: Any = (None, None, None)  # q, k and v of a call that is stored without them
_attend_directly = pytorch.resolve_apply(_DirectAttention)  # no function transform is active where ``is_plain_eager``


class _OnceDifferentiable(torch.autograd.Function):
    """Gradients that raise when differentiated again. In the graph they depend on everything that they were computed from.
    PyTorch's ``once_differentiable`` marks nothing if the incoming gradient is constant, and its outputs depend on nothing, so a
    second backward pass can silently skip them."""

    @staticmethod
    def forward(ctx, count, *tensors):
        """tensors: ``count`` gradients, then their sources; either may be None."""
        return tensors[:count]

    @staticmethod
    def backward(ctx, *_):
        refuse_second_derivatives()


def refuse_second_derivatives(*_) -> None:
    raise RuntimeError(
        "sparse_flash.attention is differentiable once, and a second backward pass (after create_graph=True) went through its "
        "gradients; detach() them where they may count as constants, else compute this call by scaled_dot_product_attention under "
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
    )


def prepare_upstream(
    dout: torch.Tensor | None, dlse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of out and lse for back ends, after ``refuse_batched``; zeros for the lse of queries that keep nothing."""
    refuse_batched(dlse if dout is None else dout)
    dlse = None if dlse is None else zero_keyless_queries(dlse, lse)
    return torch.zeros_like(out) if dout is None else dout, dlse


def _all_gradients(call: AttentionCall, dout, dlse, out, lse) -> tuple:
    """Returns dq, dk, dv, then the gradient of rel_bias and the gradient of sinks, each if it is learned."""
    grads = backends.get_backend(call.backend).backward(call, dout, dlse, out, lse)
    sinks = call.learned_sinks
    return grads if sinks is None else (*grads[:-1], grads[-1].sum((0, 2)).to(sinks.dtype))


def _restore_call(
    q, k, v, tables, block_size: int, pattern: str, scale, deterministic: bool, backend: str, *packed, precision: str | None = None
) -> AttentionCall:
    """The call from an operator's arguments, in both passes."""
    variant = Variant.unpacked(*packed)
    mask = None
    if len(tables) == 1 and tables[0].dtype == torch.int32:  # bits; a list of q is floating-point
        mask = build_chosen_mask(q, k, ChosenBlocks(tables[0], block_size, pattern))
    elif pattern:
        table = compile_cached(pattern, q.shape[2], k.shape[2], block_size, q.device)
        check_batch_and_heads(table.mask_index.shape, q.shape[0], q.shape[1])
        mask = table.kernel_table(q.is_cuda)
    elif block_size:
        mask = _restore_mask(q.shape[2], k.shape[2], block_size, tables)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    call = AttentionCall(q, k, v, mask, mask, scale, deterministic, backend, variant, precision)
    return prepare(call, call.key if pytorch.is_plain_eager(*call.inputs()) else None, mask)


def build_chosen_mask(q: torch.Tensor, k: torch.Tensor, chosen: ChosenBlocks) -> BlockMask:
    """The mask of blocks that were chosen for q and k."""
    # Plain numbers, not symbolic lengths: in a graph, this mask is for one length.
    grid = BlockGrid(operator.index(q.shape[2]), operator.index(k.shape[2]), chosen.block_size)
    maps = chosen.bits[:-1].view(*q.shape[:2], grid.q_blocks, -1)
    return from_block_maps(maps, resolve_within(chosen.within or None, grid, q.device))


def _restore_mask(q_len: int, kv_len: int, block_size: int, tables: list[torch.Tensor]) -> BlockMask:
    mask = BlockMask.find_by_tensors(q_len, kv_len, block_size, tables)
    if mask.from_host:  # a graph reads derived tables, which may have no other owner
        keep_if_captured(mask, mask.device)
    return mask


# The last arguments of operators: a mask (``_to_operator_args``), numbers, the back end, and ``Variant.packed()``.
_MASK = "Tensor[] tables, SymInt block_size, str pattern"
_CALL = f"{_MASK}, float? scale, bool deterministic, str backend, "
_CALL += "Tensor[] variant_tensors, str variant_names, float dropout_p, float softcap"


def define_operator(name: str, arguments: str, results: str = "(Tensor, Tensor)") -> Callable[[Callable], CustomOpDef]:
    """Makes a function a PyTorch operator."""
    return torch.library.custom_op(operator_name(name), mutates_args=(), schema=f"({arguments}) -> {results}")


@define_operator("attention", f"Tensor q, Tensor k, Tensor v, {_CALL}")
def _forward(q, k, v, *call):
    restored = _restore_call(q, k, v, *call)
    return backends.get_backend(restored.backend).forward(restored)


@_forward.register_fake
def fake_results(q, k, v, *call):
    return empty_out(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=compute_dtype(q))


@define_operator("attention_in_eight_bits", f"Tensor q, Tensor k, Tensor v, {_MASK}, float? scale, str backend")
def _forward_in_eight_bits(q, k, v, tables, block_size, pattern, scale, backend):
    call = tables, block_size, pattern, scale, False, backend, *NO_VARIANT
    restored = _restore_call(q, k, v, *call, precision="fp8")
    return backends.get_backend(restored.backend).forward_in_eight_bits(restored)


_forward_in_eight_bits.register_fake(fake_results)


@define_operator(
    "attention_decode",
    "Tensor q, Tensor k, Tensor v, Tensor[] tables, SymInt tokens, SymInt block_size, Tensor? kv_lens, Tensor? block_table, "
    "bool causal, float? scale, str backend, Tensor? k_scale=None, Tensor? v_scale=None, Tensor? kv_starts=None",
)
def _decode(
    q, k, v, tables, tokens, block_size, kv_lens, block_table, causal, scale, backend, k_scale=None, v_scale=None, kv_starts=None
):
    mask = _restore_mask(tokens, tokens, block_size, tables) if block_size else None
    call = q, k, v, mask, kv_lens, block_table, causal, q.shape[3] ** -0.5 if scale is None else scale
    return backends.get_backend(backend).decode(*call, k_scale, v_scale, kv_starts)


_decode.register_fake(fake_results)


@define_operator(
    "attention_backward", f"Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_CALL}", "Tensor[]"
)
def _backward(dout, dlse, q, k, v, out, lse, *call):
    """[dq, dk, dv], then the gradients of rel_bias and sinks if they are learned."""
    return list(_all_gradients(_restore_call(q, k, v, *call), dout, dlse, out, lse))


@_backward.register_fake
def _(dout, dlse, q, k, v, out, lse, tables, block_size, pattern, scale, deterministic, backend, *packed):
    variant = Variant.unpacked(*packed)
    learned = [] if variant is None else [variant.rel_bias] * variant.learned + [variant.sinks] * variant.learned_sinks
    return [torch.empty_like(t) for t in (q, k, v, *learned)]


def _setup_context(ctx, inputs, output):
    q, k, v, tables, *ctx.options, variant_tensors, variant_names, dropout_p, softcap = inputs
    ctx.tables, ctx.packed = len(tables), (variant_names, dropout_p, softcap)
    ctx.save_for_backward(q, k, v, *output, *tables, *variant_tensors)
    ctx.set_materialize_grads(False)


def _gradients(ctx, dout, dlse):
    q, k, v, out, lse, *rest = ctx.saved_tensors
    tables, variant_tensors = rest[: ctx.tables], rest[ctx.tables :]
    variant = Variant.unpacked(variant_tensors, *ctx.packed)
    grads = [None, None, None]
    if dout is not None or dlse is not None:
        dout, dlse = prepare_upstream(dout, dlse, out, lse)
        grads = _backward(dout, dlse, q, k, v, out, lse, tables, *ctx.options, variant_tensors, *ctx.packed)
    of_variant = (variant and variant.gradients(*grads[3:])) or [None] * len(variant_tensors)
    return (*grads[:3], [None] * len(tables), *(None for _ in ctx.options), of_variant, None, None, None)


torch.library.register_autograd(operator_name("attention"), _gradients, setup_context=_setup_context)
torch.library.register_autograd(operator_name("attention_backward"), refuse_second_derivatives)
