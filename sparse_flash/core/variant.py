"""What a call does besides its mask: lengths, dropout, changes of scores. One value, passed from the call to the kernels."""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, NamedTuple, Self, TypeAlias, cast

import torch

from ..compat.captured import check_parameters, learned
from ..compat.constants import constant_in_graphs
from ..compat.pytorch import is_plain_eager

LENGTHS = ("q_starts", "q_lens", "kv_starts", "kv_lens")
# In the order in which they enter an operator.
_NAMED = (*LENGTHS, "alibi_slopes", "rel_bias")  # as arguments of ``attention``
_TENSORS = ("seed", *_NAMED, "sinks")
_ONE_NUMBER = "a number, the same for all heads"
_DROPOUT_STEPS = 1 << 16  # the resolution of a 16-bit draw
# (score, batch, head, q_pos, k_pos, params) -> score
_TorchScore: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]], torch.Tensor
]
_score_functions: dict[str, "ScoreFunction"] = {}


@dataclass(frozen=True, eq=False)
class ScoreFunction:
    """A user's function of scores, for PyTorch and for Triton.

    torch: ``f(score, batch, head, q_pos, k_pos, params) -> score`` in PyTorch operations; a result depends only on its score.
    score: float32 (float64 for float64 inputs); the others: int64, of shapes that broadcast to it; params: the tuple of tensors
    passed to the call. ``torch.func`` computes its derivative. Tensors that it reads get no gradient: a call raises ValueError if
    one requires it.
    triton: the same function under ``@triton.jit``: score is a float32 tile, batch and head are numbers, q_pos and k_pos int32
    tiles that broadcast to it, params a tuple of pointers. Inlined into the kernels. None: only PyTorch back ends run it.
    derivative: under ``@triton.jit``, with the same arguments: the derivative of the result by score, finite everywhere.

    Create it once, not in each call: each object is compiled separately. Query i has position i + kv_len - q_len, key j position j.
    A result of -inf drops the pair; only the mask skips blocks.
    """

    torch: _TorchScore
    triton: Callable[..., Any] | None = None
    derivative: Callable[..., Any] | None = None
    name: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("torch", "triton", "derivative"):
            value = getattr(self, name)
            if not callable(value) and (name == "torch" or value is not None):
                raise TypeError(f"ScoreFunction needs a function as {name}; got {type(value).__name__}")
        names = "score", "batch", "head", "q_pos", "k_pos", "params"
        check_parameters(self.torch, "ScoreFunction", names, "params is the tuple score_params, empty by default")
        if (self.triton is None) != (self.derivative is None):
            raise ValueError("a ScoreFunction has triton and derivative both, or neither; the backward pass needs the derivative")
        # Operators take tensors, numbers and text, so they refer to it by name.
        name = f"{self.torch.__module__}.{getattr(self.torch, '__qualname__', type(self.torch).__qualname__)}"
        namesakes = sum(known.partition("#")[0] == name for known in _score_functions)
        object.__setattr__(self, "name", f"{name}#{namesakes}" if namesakes else name)
        _score_functions[self.name] = self

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self  # immutable, and Triton's functions cannot be copied

    def __reduce__(self) -> tuple[object, ...]:
        return ScoreFunction, (self.torch, self.triton, self.derivative)  # so that graphs find it by name


class Variant(NamedTuple):
    """What a call does besides its mask. ``build_variant`` creates it and checks its values.

    seed: (1,) int64, for dropout; dropout_p: a multiple of 2^-16, 0 without dropout.
    q_starts, q_lens, kv_starts, kv_lens: (batch,) int32; a token exists at or after its start and before its length.
    alibi_slopes: (batch, heads), rel_bias: (heads, 2 * max_distance + 1), both float32, or float64 for float64 inputs.
    learned: whether rel_bias needs a gradient. softcap: 0 for none. score_mod, score_params: the user's function and its tensors.
    sinks: (heads,), a logit of each head that is added to its softmax, after all other changes; every back end supports it.
    learned_sinks: whether sinks need a gradient.
    """

    seed: torch.Tensor | None = None
    q_starts: torch.Tensor | None = None
    q_lens: torch.Tensor | None = None
    kv_starts: torch.Tensor | None = None
    kv_lens: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    rel_bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None  # the last of _TENSORS
    score_params: tuple[torch.Tensor, ...] = ()
    score_mod: ScoreFunction | None = None
    dropout_p: float = 0.0
    softcap: float = 0.0
    learned: bool = False
    learned_sinks: bool = False

    def names(self) -> list[str]:
        """Names the tensors present, except score_params, in the order in which they enter an operator."""
        return [name for name in _TENSORS if getattr(self, name) is not None]

    @property
    def features(self) -> tuple[str, ...]:
        """The arguments of ``attention`` that a back end must support for this call."""
        used = [name for name in self.names() if name in _NAMED]
        used += ["dropout_p"] * (self.seed is not None)
        used += ["softcap"] * (self.softcap != 0) + ["score_mod"] * (self.score_mod is not None) + [LEARNED] * self.learned
        return tuple(used)

    @property
    def scored(self) -> bool:
        """Whether scores are more than scaled products."""
        return bool(self.softcap) or self.alibi_slopes is not None or self.rel_bias is not None or self.score_mod is not None

    def tensors(self) -> list[torch.Tensor]:
        given = cast("tuple[torch.Tensor | None, ...]", self[: len(_TENSORS)])
        return [*[t for t in given if t is not None], *self.score_params]

    @property
    def constants(self) -> tuple[object, ...]:
        """Everything except ``tensors()``, and which tensors are present."""
        return *[t is None for t in self[: len(_TENSORS)]], *self[len(_TENSORS) + 1 :]

    @property
    def without_tensors(self) -> "Variant":
        return Variant._make([*[None] * len(_TENSORS), (), *self[len(_TENSORS) + 1 :]])

    @property
    def only_sinks(self) -> bool:
        return self.softcap == 0 and self.score_mod is None and all(t is None for t in self[: len(_TENSORS) - 1])

    def packed(self) -> tuple[list[torch.Tensor], str, float, float]:
        """The operator's arguments: ``tensors()``, their names, dropout_p, softcap."""
        names = [*self.names(), *[LEARNED] * self.learned, *[_LEARNED_SINKS] * self.learned_sinks]
        if self.score_mod is not None:
            names.append(f"={self.score_mod.name}")
        return self.tensors(), " ".join(names), self.dropout_p, self.softcap

    @classmethod
    def unpacked(cls, tensors: list[torch.Tensor], text: str, dropout_p: float, softcap: float) -> Self | None:
        """The reverse of ``packed()``; None for ``NO_VARIANT``."""
        if not text and not softcap:
            return None
        flags, _, score_mod = text.partition("=")
        words = flags.split()
        names = [name for name in _TENSORS if name in words]
        return cls(
            **dict(zip(names, tensors, strict=False)),
            score_params=tuple(tensors[len(names) :]) if score_mod else (),
            score_mod=_score_functions[score_mod] if score_mod else None,
            dropout_p=dropout_p,
            softcap=softcap,
            learned=LEARNED in words,
            learned_sinks=_LEARNED_SINKS in words,
        )

    def gradients(self, *of_learned: torch.Tensor) -> list[torch.Tensor | None]:
        """The gradient of each of ``tensors()``, or None. of_learned: the gradients of rel_bias and sinks, if they need one."""
        learned = [self.rel_bias] * self.learned + [self.sinks] * self.learned_sinks
        return [next((grad for one, grad in zip(learned, of_learned) if one is t), None) for t in self.tensors()]


NO_VARIANT: tuple[list[torch.Tensor], str, float, float] = [], "", 0.0, 0.0  # as ``packed()``
LEARNED = "gradient-of-rel_bias"
_LEARNED_SINKS = "gradient-of-sinks"


def build_variant(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    dropout_p: float = 0.0,
    softcap: float | None = None,
    score_mod: ScoreFunction | None = None,
    score_params: tuple[torch.Tensor, ...] = (),
    **tensors: torch.Tensor | None,
) -> Variant | None:
    """Checks arguments and returns the variant; None for plain attention. Draws the dropout seed without synchronizing.

    tensors: the other tensors that ``attention`` takes."""
    given = {name: value for name, value in tensors.items() if value is not None}
    for name, value in given.items():
        check, _ = _TENSOR_ARGUMENTS[name]
        check(name, value, q, k)
    if softcap is not None:
        check_number("softcap", softcap, _ONE_NUMBER)
        if not 0 < softcap < math.inf:
            raise ValueError(f"softcap must be positive and finite; got {softcap}; None is for no cap")
    if score_mod is not None:
        _check_score_mod(score_mod)
    check_dropout(dropout_p)
    share = min(round(dropout_p * _DROPOUT_STEPS), _DROPOUT_STEPS - 1)
    variant = Variant(
        score_params=_check_score_params(score_params, score_mod, q),
        score_mod=score_mod,
        dropout_p=share / _DROPOUT_STEPS,
        softcap=float(softcap or 0.0),
        learned="rel_bias" in given and given["rel_bias"].requires_grad,
        learned_sinks="sinks" in given and given["sinks"].requires_grad,
    )
    return refill_variant(variant, q, given) if given or share or softcap or score_mod else None


def describe_variant(arguments: dict[str, Any]) -> Hashable | None:
    """Everything that the checks of ``build_variant`` depend on. None for arguments that must be checked each time: the values of
    lengths on a CPU, and the tensors that a score_mod reads."""
    description: list[Hashable] = []
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and not (name in LENGTHS and value.device.type == "cpu"):
            description.append((name, value.dtype, value.device, value.layout, value.shape, value.stride(), value.requires_grad))
        elif type(value) in (float, int):
            description.append((name, value))
        else:
            return None
    return tuple(description)


def refill_variant(variant: Variant, q: torch.Tensor, arguments: dict[str, Any]) -> Variant:
    """``build_variant`` for arguments with the same description as an earlier call's. variant: the earlier one, without tensors."""
    fields: list[Any] = list(variant)
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            _, convert = _TENSOR_ARGUMENTS[name]
            fields[_TENSORS.index(name)] = convert(value, q)
    if variant.dropout_p:
        fields[_TENSORS.index("seed")] = torch.randint(0, (1 << 63) - 1, (1,), dtype=torch.int64, device=q.device)
    return Variant._make(fields)


_SHAPES = {"alibi_slopes": "(heads,) or (batch, heads)", "rel_bias": "(heads, 2 * max_distance + 1)", "sinks": "(heads,)"}


def _check_of_heads(name: str, value: torch.Tensor, q: torch.Tensor, _: torch.Tensor) -> None:
    """Checks one of _SHAPES."""
    check_same_device(name, value, q, "detach them; a bias that is learned is rel_bias" if name == "alibi_slopes" else None)
    batch, heads = q.shape[:2]
    shape = tuple(value.shape)
    fits = len(shape) == 2 and shape[0] == heads and shape[1] % 2 == 1
    if name != "rel_bias":
        fits = shape == (heads,) or (name == "alibi_slopes" and shape == (batch, heads))
    if not (fits and value.is_floating_point()):
        raise ValueError(
            f"{name} must be of a floating-point type and shape {_SHAPES[name]}, for {heads} heads; got {value.dtype} of shape "
            f"{shape}"
        )


def _expand_slopes(slopes: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """(batch, heads)."""
    return _as_exact(slopes, q).expand(q.shape[:2]).contiguous()


def _as_exact(value: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The tensor in the dtype of sums: float32, or float64 if q is."""
    return value.to(torch.float64 if q.dtype == torch.float64 else torch.float32).contiguous()


def _check_score_mod(score_mod: ScoreFunction) -> None:
    if not isinstance(score_mod, ScoreFunction):
        raise TypeError(
            f"score_mod must be a sparse_flash.ScoreFunction; got {type(score_mod).__name__}; wrap the function in one, "
            "once, outside the call"
        )
    name = _find_learned(score_mod.name) if torch.is_grad_enabled() else None
    if name is not None:
        raise ValueError(
            f"score_mod must read no tensor that requires a gradient, as none is computed; got {score_mod.name}, which reads "
            f"{name}; detach it, or pass it detached among score_params; a bias that is learned is rel_bias"
        )


def _check_score_params(params: Any, score_mod: ScoreFunction | None, q: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if not isinstance(params, (tuple, list)):
        raise TypeError(f"score_params must be a tuple of tensors; got {type(params).__name__}; write (tensor,) for one")
    if params and score_mod is None:
        raise ValueError("score_params are the tensors of a score_mod; pass that too")
    for number, tensor in enumerate(params):
        check_same_device(f"score_params[{number}]", tensor, q, "detach it; a bias that is learned is rel_bias")
    return tuple(tensor.contiguous() for tensor in params)


@constant_in_graphs
def _find_learned(score_mod: str) -> str | None:
    """The name of a tensor that a ScoreFunction reads and that requires a gradient: see ``captured.learned``."""
    return learned(_score_functions[score_mod].torch)


def check_dropout(dropout_p: object) -> None:
    """Raises TypeError or ValueError unless dropout_p is a number in [0, 1)."""
    check_number("dropout_p", dropout_p, _ONE_NUMBER)
    if not 0.0 <= cast(float, dropout_p) < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1); got {dropout_p}")


def check_number(name: str, value: object, what: str = "a number") -> None:
    """Raises TypeError unless value is a number; a bool is not."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        hint = "; use .item()" * hasattr(value, "item")  # a tensor, or a number of numpy
        raise TypeError(f"{name} must be {what}; got {type(value).__name__}{hint}")


def check_counts(**counts: object) -> None:
    """Raises ValueError unless each count is an integer of at least 1. counts: by name."""
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, (Integral, torch.SymInt)) or count < 1:
            raise ValueError(f"{name} must be an integer of at least 1; got {count!r}")


def check_lengths(name: str, value: torch.Tensor, q: torch.Tensor, tokens: int) -> torch.Tensor:
    """Checks lengths or starts of sequences, (batch,), and returns them in int32, clamped to its range. On a CPU, raises ValueError
    for lengths below 0 and for starts above ``tokens``."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a tensor of shape (batch,) on q's device; got {type(value).__name__}")
    if tuple(value.shape) != (q.shape[0],) or value.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{name} must be int32 or int64 of shape (batch,), here ({q.shape[0]},); got {value.dtype} of shape "
            f"{tuple(value.shape)}"
        )
    check_same_device(name, value, q)
    most = tokens if name.endswith("starts") else None
    if value.device.type == "cpu" and is_plain_eager(value):
        wrong = value[value < 0 if most is None else value > most].tolist()
        if wrong:
            bound = "at least 0" if most is None else f"at most {most}, the number of tokens"
            raise ValueError(f"{name} must be {bound}; got {wrong[0]}; a sequence without tokens has {most or 0}")
    return _as_int32(value)


def _as_int32(lengths: torch.Tensor, _: torch.Tensor | None = None) -> torch.Tensor:
    if lengths.dtype == torch.int64:
        ends = torch.iinfo(torch.int32)
        lengths = lengths.clamp(ends.min, ends.max)
    return lengths.to(torch.int32).contiguous()


# A check, (name, argument, q, k), which raises; and a conversion, (argument, q) to the variant's tensor.
_TENSOR_ARGUMENTS: dict[str, tuple[Callable[..., object], Callable[..., torch.Tensor]]] = {
    **dict.fromkeys(("q_starts", "q_lens"), (lambda name, value, q, k: check_lengths(name, value, q, q.shape[2]), _as_int32)),
    **dict.fromkeys(("kv_starts", "kv_lens"), (lambda name, value, q, k: check_lengths(name, value, q, k.shape[2]), _as_int32)),
    "alibi_slopes": (_check_of_heads, _expand_slopes),
    "rel_bias": (_check_of_heads, _as_exact),
    "sinks": (_check_of_heads, lambda sinks, q: sinks.contiguous()),
}


def check_same_device(name: str, value: torch.Tensor, q: torch.Tensor, constant: str | None = None) -> None:
    """Raises unless value is a tensor on q's device. constant: of tensors without gradient, the fix if value requires one."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a tensor on q's device; got {type(value).__name__}")
    if value.device != q.device:
        raise ValueError(f"{name} must be on q's device; q is on {q.device}, {name} on {value.device}")
    if constant and value.requires_grad:
        raise ValueError(f"{name} requires a gradient, and has none; {constant}")
