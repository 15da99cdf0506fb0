"""The cost of choosing blocks beside the attention that follows, and of both beside dense attention.

    python -m sparse_flash.benchmarks.choosers --out runs/choosers
    python -m sparse_flash.benchmarks.choosers --drawn --tokens 65536 --block 128
    python -m sparse_flash.benchmarks.choosers --spec "sampled(8, floor=0.02)" --spec "antidiagonal(16, mass=0.9)"
    python -m sparse_flash.benchmarks.choosers --head-dim 128 --block 128 --peer flashprefill --peer minference
    python -m sparse_flash.benchmarks.choosers --drawn --spec "sampled(8, mass=?)" --density 0.1 --peer all

Each chooser is measured as ``causal & (CHOOSER | sinks(64))``, forward. ``choose_ms`` is ``choose_blocks``, ``attend_ms`` attention
under its mask, ``both_ms`` attention under the expression. The speed-up is that of both over the fastest dense causal call whose
result is right. Density is the share of causal blocks that are kept; tables add the lowest and the highest of a head. Inputs are
random, or planted (``--drawn``): see ``workload.planted``. ``loss`` is the relative L2 error of the output against dense causal
attention, at sampled queries.

``--peer`` also times another package that chooses (``baselines.choosing``; ``all``: each), on the same inputs. Its knob is set so
that the package keeps the share ``--density`` of causal blocks, and so is the number of a ``--spec`` that has ``?`` for one: to
compare them, take such specs. ``dense_error`` is a package's error for a short prompt with everything kept: it tells a wrong kernel
from a choice that loses much. Random inputs leave little to choose from: compare losses on planted ones.

A case is first checked at a short length: a CPU chooses by the definition for the same inputs, and blocks that differ are counted.
If their share of causal blocks is over 1 %, the case is not timed, and the command exits with 1; also if a package is missing or
fails. Writes choosers.json after each case.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import groupby, product
from operator import attrgetter
from typing import Any

import numpy as np
import torch

import sparse_flash as sf
from sparse_flash.masks.block_mask import BlockMask
from sparse_flash.masks.chooser import Chooser

from .baselines.choosing import PACKAGES
from .baselines.registry import find_peer
from .measure.accuracy import as_attend, sampled_errors
from .measure.noise import MARK, doubts
from .measure.throughput import DTYPES, Prepared, measure, time_ms, try_measuring
from .program import RowFile, Table, add_device, add_limit, create_parser, print_tables
from .results import environment, has_numbers, why_not
from .workload.cases import OURS, Case, Shape
from .workload.masks import CAUSAL
from .workload.planted import draw_planted
from .workload.problem import Problem, build_problem
from .workload.suites import DENSE_PEERS

TOKENS = (32_768, 65_536, 131_072)
BLOCKS = (128, 64)
HEAD_DIMS = (128, 64)
BY_SCORE = ("sampled(8, keep=0.15)", "antidiagonal(8, keep=0.15)", "antidiagonal(16, keep=0.15)", "pooled(keep=0.15)")
CHOOSERS = (*BY_SCORE, "sampled(8, budget=0.15)", "sampled(8, floor=0.01)", "sampled(8, mass=0.2)")
CHECKED_TOKENS = 4_000  # tokens; the last block is not whole
PACKAGE_CHECKED_TOKENS = 4_096  # tokens; packages want whole blocks
MOST_DIFFERING = 0.01  # bf16 rounds scores, and blocks whose scores are nearly the same change places
_CPU_SECONDS = 0.3
_STEPS, _NEAR = 14, 0.02  # of the search, and how near the density must come, relative
HEADINGS = ("choose", "attend", "both", "choose / attend", "density (of heads)", "dense", "speed-up", "loss", "differing")


@dataclass(frozen=True)
class ChooserCase:
    """chooser: its spec text, to which block is added; ``?`` stands for a rule's number: see ``with_number``. drawn: whether inputs
    are planted."""

    chooser: str
    block: int
    shape: Shape
    drawn: bool

    def with_number(self, number: float) -> ChooserCase:
        """The case with a number for ``?``."""
        return replace(self, chooser=self.chooser.replace("?", f"{number:.5g}"))

    @property
    def parsed(self) -> Chooser:
        chooser = sf.parse(self.chooser)
        if not isinstance(chooser, Chooser):
            raise ValueError(f"--spec must be one chooser, such as {CHOOSERS[0]!r}; got {self.chooser!r}")
        return replace(chooser, block=self.block)

    @property
    def spec(self) -> str:
        return f"causal & ({self.parsed} | sinks(64))"

    @property
    def name(self) -> str:
        return f"{self.chooser}, blocks of {self.block}, {self.shape}"

    @property
    def causal_blocks(self) -> int:
        """How many blocks causal attention of a head visits."""
        rows = -(-self.shape.tokens // self.block)
        return rows * (rows + 1) // 2

    def dense(self, device: torch.device, dtype: torch.dtype) -> Problem:
        """Dense causal attention for the case's inputs."""
        problem = build_problem(Case(self.shape, CAUSAL, OURS), device, dtype, gradients=False)
        if not self.drawn:
            return problem
        q, k = draw_planted(self.shape, device, dtype)
        return replace(problem, q=q, k=k)


def time_dense_calls(problem: Problem, device: torch.device) -> dict[str, dict]:
    """{peer: {"forward_ms", "forward_ms_spread", "errors", "correct"}, or why there are no figures}; each peer's forward pass."""
    names = (OURS, *DENSE_PEERS[device.type], *(("fa3", "fa4") if device.type == "cuda" else ()))
    return {name: try_measuring(partial(_time_dense_call, problem, name)) for name in names}


def _time_dense_call(problem: Problem, name: str) -> dict:
    return measure(Prepared(find_peer(name), problem, backward=False), _CPU_SECONDS)


def find_fastest(dense: dict[str, dict]) -> tuple[str, float] | None:
    """The fastest peer whose result is right, and its milliseconds; None if there is none."""
    right = [(result["forward_ms"], name) for name, result in dense.items() if result.get("correct")]
    return min(right)[::-1] if right else None


@cache
def share_differing(case: ChooserCase, device: torch.device, dtype: torch.dtype) -> float:
    """The share of causal blocks in which the choice on the device differs from the definition's, which a CPU makes."""
    q, k, _ = case.dense(device, dtype).leaves
    ours, exact = (sf.choose_blocks(case.spec, *both).kept_blocks().cpu() for both in ((q, k), (q.cpu(), k.cpu())))
    return int((ours != exact).sum()) / (case.shape.heads * case.causal_blocks)


def densities(case: ChooserCase, mask: BlockMask) -> np.ndarray:
    """(heads,) the share of causal blocks that each head keeps."""
    visited = np.diff(mask.mask_bounds(), prepend=0)[mask.mask_index.cpu().numpy()[0]]
    return np.broadcast_to(visited / case.causal_blocks, case.shape.heads)


def find_setting(density_at: Callable[[float], float], ends: tuple[float, float], wanted: float) -> float:
    """The setting whose density is nearest to the wanted one, by bisection. ends: the sparsest and the densest setting. Nothing is
    compiled by torch.compile meanwhile: it would compile again for some settings, then give up."""
    low, high = ends
    tried: list[tuple[float, float]] = []
    with torch.compiler.set_stance("force_eager"):
        for _ in range(_STEPS):
            setting = (low + high) / 2
            density = density_at(setting)
            tried.append((abs(density - wanted), setting))
            if tried[-1][0] <= _NEAR * wanted:
                break
            low, high = (setting, high) if density < wanted else (low, setting)
    return min(tried)[1]


def tune_to_density(case: ChooserCase, problem: Problem, density: float) -> ChooserCase:
    """The case with the number for ``?`` whose choice has the density most nearly."""
    if "?" not in case.chooser:
        return case
    q, k, _ = problem.leaves
    by_threshold = case.with_number(0.5).parsed.floor is not None

    def density_at(number: float) -> float:
        return float(densities(case, sf.choose_blocks(case.with_number(number).spec, q, k)).mean())

    return case.with_number(find_setting(density_at, (1.0, 0.0) if by_threshold else (0.0, 1.0), density))


def loss(problem: Problem, fn: Callable[[], Any]) -> float:
    """The relative L2 error of what ``fn`` returns against dense causal attention, at sampled queries."""
    return sampled_errors(problem, as_attend(problem.leaves, fn), backward=False)["out"]


def run_package(name: str, problem: Problem, short: Problem, density: float, device: torch.device) -> dict:
    """A package's case as plain data: {"peer", "source", "knob", "wanted", "density", "choose_ms",
    "attend_ms", "both_ms", "loss", "dense_error", "dense_density"}, or {"failed": why} with what was found before.
    problem, short: dense causal attention for its inputs, and for a short prompt."""
    package = PACKAGES[name]
    found: dict = {"peer": name, "source": package.source, "wanted": density}

    @torch.no_grad()
    def measure_package() -> dict:
        brief = package.calls(short)
        with torch.compiler.set_stance("force_eager"):
            everything = brief.choose(package.densest)
            found.update(dense_density=brief.density(everything), dense_error=loss(short, lambda: brief.attend(everything)))
        calls = package.calls(problem)
        knob = find_setting(lambda knob: calls.density(calls.choose(knob)), (package.sparsest, package.densest), density)
        found["knob"] = {package.knob: knob}
        torch.compiler.reset()  # what a package compiles is compiled for these shapes alone
        for _ in range(3):  # it may compile or record what it launches
            choice = calls.choose(knob)
        found["density"] = calls.density(choice)
        # Attention first: the next choice may overwrite the memory of this one.
        for key, call in (
            ("attend_ms", lambda: calls.attend(choice)),
            ("choose_ms", lambda: calls.choose(knob)),
            ("both_ms", lambda: calls.both(knob)),
        ):
            call()
            found.update(time_ms(call, device, _CPU_SECONDS).as_result(key))
        found["loss"] = loss(problem, lambda: calls.both(knob))
        finite = math.isfinite(found["loss"] + found["dense_error"])
        return {} if finite else {"failed": "its output has values that are not finite"}

    return found | try_measuring(measure_package)


def format_package(found: dict) -> list[str]:
    """The figures of a package's case as texts, or why there are none."""
    if not has_numbers(found):
        return [why_not(found)]
    texts = [f"{name} {found[f'{name}_ms']:.2f} ms" for name in ("choose", "attend", "both")]
    shares = [f"density {found['density']:.1%}, wanted {found['wanted']:.1%}", f"loss {found['loss']:.4f}"]
    return [*texts, *shares, f"with everything kept {found['dense_error']:.4f}", str(found["knob"])]


def measure_choice(case: ChooserCase, problem: Problem, device: torch.device) -> dict:
    """{"choose_ms", "attend_ms", "both_ms", each with its spread; "density", "density_of_heads", "loss"}"""
    q, k, v = problem.leaves
    spec = sf.parse(case.spec)
    mask = sf.choose_blocks(spec, q, k)
    calls = {
        "choose_ms": lambda: sf.choose_blocks(spec, q, k),
        "attend_ms": lambda: sf.attention(q, k, v, mask),
        "both_ms": lambda: sf.attention(q, k, v, spec),
    }
    of_heads = densities(case, mask)
    found: dict = {"density": float(of_heads.mean()), "density_of_heads": of_heads.tolist()}
    for name, call in calls.items():
        call()
        found |= time_ms(call, device, _CPU_SECONDS).as_result(name)
    found["loss"] = loss(problem, calls["both_ms"])
    return found


def run(case: ChooserCase, problem: Problem, dense: dict[str, dict], device: torch.device, density: float) -> dict:
    """A case as plain data: {"case", "spec", "checked_tokens", "differing", "dense", "speedup"} and what ``measure_choice``
    returns, or {"failed": why}. problem: of ``case.dense``. dense: of ``time_dense_calls`` for it. density: the wanted one, of a
    case with ``?``, in whose place the returned case has a number."""
    found: dict = {"case": asdict(case), "dense": dense} | ({"wanted": density} if "?" in case.chooser else {})

    @torch.no_grad()
    def measure_tuned() -> dict:
        tuned = tune_to_density(case, problem, density)
        short = replace(tuned, shape=replace(tuned.shape, tokens=min(tuned.shape.tokens, CHECKED_TOKENS)))
        share = share_differing(short, device, problem.q.dtype)
        found.update(case=asdict(tuned), spec=tuned.spec, checked_tokens=short.shape.tokens, differing=share)
        if share > MOST_DIFFERING:
            return {"failed": f"{share:.2%} of blocks differ from the definition's, at most {MOST_DIFFERING:.0%} may"}
        return measure_choice(tuned, problem, device)

    found |= try_measuring(measure_tuned)
    best = find_fastest(dense)
    return found | ({"speedup": best[1] / found["both_ms"]} if best and has_numbers(found) else {})


def cells(found: dict) -> list[str]:
    """Returns the columns of a case: ms of the choice, of attention, of both; choice / attention; density; dense ms; speed-up;
    loss; share of differing blocks."""
    differ = f"{found['differing']:.3%}" if "differing" in found else ""
    if not has_numbers(found):
        return ["failed", *[""] * 7, differ]
    choose, attend, both = (found[f"{name}_ms"] for name in ("choose", "attend", "both"))
    low, high = min(found["density_of_heads"]), max(found["density_of_heads"])
    best, mark = find_fastest(found["dense"]), f" {MARK}" * bool(doubts(found))
    texts = [f"{choose:.2f}", f"{attend:.2f}", f"{both:.2f}{mark}", f"{choose / attend:.2f}"]
    texts += [f"{found['density']:.1%} ({low:.1%} to {high:.1%})", f"{best[1]:.2f} {best[0]}" if best else ""]
    return [*texts, f"{found['speedup']:.2f}" if best else "", f"{found['loss']:.4f}", differ]


def parse_arguments(arguments: list[str] | None) -> tuple[argparse.Namespace, list[ChooserCase]]:
    """Returns the command's options and cases. Ends the program if they do not fit."""
    parser = create_parser("choosers", __doc__)
    parser.add_argument("--spec", action="append", help="a chooser, without block=; ? for a number: see --density (default: seven)")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="(default 32768 65536 131072)")
    parser.add_argument("--block", type=int, nargs="+", default=BLOCKS, help="(default 128 64)")
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8), metavar=("HEADS", "KV_HEADS"), help="(default 32 8)")
    parser.add_argument("--head-dim", type=int, nargs="+", default=HEAD_DIMS, help="(default 128 64)")
    parser.add_argument("--drawn", action="store_true", help="planted inputs, see above")
    parser.add_argument("--peer", action="append", default=[], choices=(*PACKAGES, "all"), help="another package; may be repeated")
    parser.add_argument("--density", type=float, default=0.15, help="share of blocks, for packages and ? (default %(default)s)")
    add_limit(parser)
    add_device(parser)
    options = parser.parse_args(arguments)
    heads, kv_heads = options.heads
    cases = [
        ChooserCase(chooser, block, Shape(1, heads, tokens, head_dim, kv_heads), options.drawn)
        for head_dim, tokens, block, chooser in product(options.head_dim, options.tokens, options.block, options.spec or CHOOSERS)
    ]
    try:
        for case in cases:
            sf.parse(case.with_number(0.5).spec)
    except ValueError as error:
        parser.error(str(error))
    return options, cases


def main(arguments: list[str] | None = None) -> int:
    options, cases = parse_arguments(arguments)
    until, device, dtype = time.monotonic() + options.limit, options.device, DTYPES[options.device.type]
    packages = list(PACKAGES) if "all" in options.peer else list(dict.fromkeys(options.peer))
    facts = {"environment": environment(device), "dtype": str(dtype).removeprefix("torch.")}
    file = RowFile(options.out / "choosers.json", facts, "cases", "peers")
    table = Table("case", *HEADINGS, title="ms, forward" + ", planted inputs" * options.drawn)
    for shape, group in groupby(cases, attrgetter("shape")):
        if time.monotonic() > until:
            break
        of_shape = list(group)
        problem = of_shape[0].dense(device, dtype)
        dense = time_dense_calls(problem, device)
        for case in of_shape:
            if time.monotonic() > until:
                break
            found = run(case, problem, dense, device, options.density)
            name, texts = replace(case, chooser=found["case"]["chooser"]).name, cells(found)
            table.add_row(name, *texts)
            said = [f"{heading} {text}" for heading, text in zip(HEADINGS, texts, strict=True) if text]
            file.add("cases", found, name, *said, why_not(found))
        best = find_fastest(dense)
        short = replace(of_shape[0], shape=replace(shape, tokens=min(shape.tokens, PACKAGE_CHECKED_TOKENS)))
        for name in packages:
            if time.monotonic() > until:
                break
            found = run_package(name, problem, short.dense(device, dtype), options.density, device)
            found |= {"speedup": best[1] / found["both_ms"]} if best and has_numbers(found) else {}
            file.add("peers", {"shape": asdict(shape), "drawn": options.drawn, **found}, name, str(shape), *format_package(found))
    left = len(cases) - len(file.data["cases"])
    if time.monotonic() > until:
        print(f"the time was up: {left} cases were not begun", flush=True)
    print_tables(table, folder=options.out)
    return int(not all(map(has_numbers, file.data["cases"] + file.data["peers"])))


if __name__ == "__main__":
    sys.exit(main())
