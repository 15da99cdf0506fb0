"""sparse_flash: block-sparse attention whose cost is proportional to what the mask keeps. ``names`` lists most public names."""

import sys as _sys
from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from pathlib import PurePath as _PurePath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .benchmarks.rows import BenchRow as BenchRow
    from .benchmarks.rows import bench as bench
    from .parallel import ContextPlan as ContextPlan
    from .parallel import context_parallel as context_parallel
    from .patterns import *  # noqa: F403  (their names, for tools that do not run ``names``)

__version__ = "0.1.0"

if not _find_spec(".patterns", __name__):  # a top-level folder of the checkout, which only an installation knows by this name
    _checkout = _PurePath(__file__).parent.parent
    raise ModuleNotFoundError(
        f"sparse_flash must be installed; got its checkout on the path, {_checkout}; run pip install -e {_checkout}",
        name=f"{__name__}.patterns",
    )

# PyTorch takes seconds to load. ``sparse-flash --help`` and ``python -m sparse_flash --help`` do without: in their process
# ``__getattr__`` finds the names. (A program that -m names is called "-m" until its module is found.)
_program = _sys.argv[0] if _sys.argv else ""
_command = _sys.orig_argv[-len(_sys.argv)] if _program == "-m" else _PurePath(_program).stem
if TYPE_CHECKING or _command not in ("sparse-flash", "sparse_flash"):
    from .compat.extras import naming_extra as _naming_extra

    with _naming_extra():
        from .names import *  # noqa: F403

# Imported at their first use: most programs need neither groups of processes nor the benchmark.
_LATE = dict.fromkeys(("ContextPlan", "context_parallel"), "parallel")
if _find_spec(".benchmarks", __name__):  # `make hub` leaves the benchmark out
    _LATE |= dict.fromkeys(("BenchRow", "bench"), "benchmarks.rows")
# Transformers looks for this name, and for flash_attn_forward, in a kernel that it loads by name.
supports_flash_attn = True


def __getattr__(name: str) -> object:
    names = _import_module(".names", __name__)
    if name == "__all__":
        return sorted((*names.__all__, *_LATE))
    if name in ("flash_attn_forward", "use_sparse_flash"):  # a loaded kernel has no submodules by name
        return getattr(_import_module(".integrations.transformers", __name__), name)
    if name == "flash_attn_func" and (loaded := _sys.modules.get(f"{__name__}.integrations.transformers")):
        loaded.register_masks()  # Transformers looks for this name, too, once it has registered flash_attn_forward
    if name not in (*names.__all__, *_LATE):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_import_module(f".{_LATE.get(name, 'names')}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*filter(lambda name: name.startswith("__"), globals()), "integrations", *__getattr__("__all__")})  # type: ignore[misc]
