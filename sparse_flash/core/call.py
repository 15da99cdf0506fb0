"""The record of an attention call, and the back end and launches that equal calls share."""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Self

import torch

from ..kernels.common.layout import layouts
from ..kernels.launch.memory import keep, prepared_under
from ..masks.block_mask import BlockMask
from . import backends
from .description import Call
from .variant import Variant, refill_variant


class ChosenBlocks(NamedTuple):
    """A mask of blocks chosen in a compiled graph. The operator makes its table, so one graph serves all lengths.

    bits: (batch * heads * q_blocks * ceil(kv_blocks / 32) + 1,) int32, the kept blocks. The last is unused, as PyTorch would
    specialize a size of 1. block_size: in tokens. within: spec text of the pattern that limits the blocks, or "".
    """

    bits: torch.Tensor
    block_size: int
    within: str


class AttentionCall(NamedTuple):
    """One attention call, checked and resolved. ``api`` makes it; operators, gradients, back ends and launchers read it.

    q: (batch, heads, q_len, head_dim). k: (batch, kv_heads, kv_len, head_dim). v: (batch, kv_heads, kv_len, v_head_dim). All are in
    the dtype that autocast asks for.
    mask: as the caller passed it, or as read from another library's mask. table: what a back end reads; None for dense attention
    and for a selection of blocks; spec text or ChosenBlocks if the operator makes the table. scale: None within torch.compile, for
    1 / sqrt(head_dim). deterministic: True or False, never None. backend: the one that runs the call; "auto" if the operator
    chooses. precision: "fp8" or None. launches: of earlier equal calls, by kernel; None if a compiler, a mode or a transform has to
    see the operator: see ``compat.pytorch.is_plain_eager``.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: object
    table: BlockMask | ChosenBlocks | str | None
    scale: float | None
    deterministic: bool
    backend: str
    variant: Variant | None = None
    precision: str | None = None
    launches: dict[Any, Any] | None = None

    def on(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Self:
        """The same call on other tensors."""
        return type(self)(q, k, v, *self[3:])

    @property
    def key(self) -> Hashable:
        """The key of the inputs and the variant: see ``prepare``."""
        return layouts(self.inputs()), self.variant and self.variant.constants

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """q, k, v, and the tensors of the variant."""
        return self[:3] if self.variant is None else (*self[:3], *self.variant.tensors())

    @property
    def sinks(self) -> torch.Tensor | None:
        return None if self.variant is None else self.variant.sinks

    @property
    def learned_sinks(self) -> torch.Tensor | None:
        """Sinks that need a gradient."""
        return self.sinks if self.variant is not None and self.variant.learned_sinks else None

    @property
    def rest(self) -> Variant | None:
        """The variant without sinks, which are added last: None if it has nothing else."""
        return None if self.variant is None or self.variant.only_sinks else self.variant


class _Prepared(NamedTuple):
    """The values that calls with one key share. variant: without its tensors."""

    backend: str
    launches: dict[Any, Any]
    variant: Variant | None


def _complete_key(call: AttentionCall, key: Hashable) -> tuple[Hashable, ...]:
    table: Any = call.table
    of_table = table and table.block_size
    if table is not None and table.selected_from is not None:  # whose launches many masks share
        of_table = tuple([t.shape for t in table.tensors()])
    return key, of_table, call.scale, call.deterministic, call.backend, call.precision


def prepare(
    call: AttentionCall,
    key: Hashable | None,
    holder: BlockMask | None,
    check: Callable[[BlockMask, torch.Tensor, torch.Tensor], None] | None = None,
) -> AttentionCall:
    """Chooses the back end that runs a call: see ``choose_backend``. If the operator chooses, the call stays as it is: a choice
    that depends on a length would make torch.compile recompile.

    key: of the inputs and the variant, to find the choice and the launches of an earlier call; None if a compiler, a mode or a
    transform has to see the operator. holder: the mask that stores them, of which call.table is the form for kernels; None for
    dense attention. check: further checks of the first such call, which may raise.
    """
    known: dict[Any, Any] | None = None
    if key is not None and not isinstance(call.table, (str, ChosenBlocks)):
        known, key = prepared_under(holder), _complete_key(call, key)
        found = known.get(key)
        if found is not None:
            return call._replace(backend=found.backend, launches=found.launches)
    if check is not None and holder is not None:
        check(holder, call.q, call.k)
    backend = call.backend
    if not (isinstance(call.table, str) or torch.compiler.is_compiling()):
        block_size = None if call.table is None else call.table.block_size
        of_call = Call.from_tensors(*call[:3], block_size, call.variant, call.deterministic, call.precision)
        backend = backends.choose_backend(backend, of_call)
    launches: dict[Any, Any] | None = None
    if known is not None and backend != "auto":  # "auto" stays if a graph breaks within this function
        launches = {}
        keep(known, key, _Prepared(backend, launches, call.variant and call.variant.without_tensors))
    return call._replace(backend=backend, launches=launches)


def repeat(call: AttentionCall, key: Hashable, holder: BlockMask | None, of_variant: dict[str, Any]) -> AttentionCall | None:
    """The call as ``prepare`` returned it for an earlier call with the same key, or None. call: without its variant, of which
    of_variant are the arguments."""
    found = prepared_under(holder).get(_complete_key(call, key))
    if found is None:
        return None
    variant = found.variant and refill_variant(found.variant, call.q, of_variant)
    return AttentionCall(*call[:7], found.backend, variant, call.precision, found.launches)
