"""Compiles the kernels for sm_90 as their launchers ask for them, without a GPU, and prints the outcome of each as a JSON object.
Compare its lines before and after a change that should not affect the compiled code.

    python tests/sm90.py [GROUP ...]     attention, decoding, selections, choices, choosers, merges, packed; all by default
"""

import contextlib
import io
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from unittest import mock

import launches
import torch
from launches import Launch, Shape, variant_of
from oracle import heavy_rows_split, tiles
from triton import knobs

import sparse_flash as sf
from sparse_flash.choosers.built_in import Antidiagonal, Sampled
from sparse_flash.choosers.kernels import hopper_log_sums, log_sums
from sparse_flash.kernels.launch.replay import parameter_sizes, parameter_types
from sparse_flash.selection import hopper as selection_hopper
from sparse_flash.selection.kernels import pick_blocks

TOKENS = 1024
EVERY_TERM = "lengths dropout alibi softcap own"


@cache
def mask_of(spec: str | None, block: int, split: bool = False) -> sf.BlockMask | None:
    if spec is None:
        return None
    with heavy_rows_split() if split else contextlib.nullcontext():
        return sf.compile_mask("causal | sinks(130)" if split else spec, TOKENS, block_size=block)


# Each group yields (what follows a kernel's name, head_dim, what tests know a case by, the call), once for each case.
Cases = Iterator[tuple[str, int, tuple, Callable[[], None]]]


def attention() -> Cases:
    yield from portable()
    for dim in (64, 128):
        yield from hopper_to_128(dim)
    # Products over 80 and 96 of 128 columns.
    yield hopper("", 80, passes=("forward",))
    yield hopper("", 80, "causal", split=True)
    yield hopper("", 96, "causal", deterministic=True)
    yield from wide_hopper()


def portable() -> Cases:
    def case(suffix, dim, spec=None, dim_v=0, block=128, adds="", passes=("forward", "two")):
        shape, variant = Shape(dim=dim, dim_v=dim_v, q_len=TOKENS, kv_len=TOKENS), variant_of(adds)
        return suffix, dim, (), partial(launches.portable_attention, shape, mask_of(spec, block), variant, False, passes)

    for dim in (64, 128):
        yield case("", dim)
        yield case("", dim, "causal", passes=("forward", "two", "one"))
    for dim in (128, 256):  # which spilled thousands of bytes before their tiles followed head_dim
        yield case("of_small_blocks", dim, "causal", block=32)
    yield case("of_192_and_128", 192, "causal", dim_v=128)  # as in DeepSeek's models
    yield case("of_dropout", 64, adds="dropout")
    yield case("of_sinks", 64, "causal", adds="sinks", passes=("forward", "two", "one"))
    yield case("of_terms", 64, adds=f"{EVERY_TERM} bias")
    yield case("of_terms", 64, "causal", adds=f"{EVERY_TERM} frozen_bias", passes=("one",))


def hopper(
    suffix, dim, spec=None, *, dim_v=0, block=128, adds="", split=False, deterministic=False, kv_heads=2, ragged=False,
    passes=("forward", "backward"), **of_tiles,
):  # fmt: skip
    """ragged: the last tile has fewer keys. of_tiles: options of ``oracle.tiles``."""
    shape = Shape(kv_heads=kv_heads, dim=dim, dim_v=dim_v, q_len=TOKENS, kv_len=TOKENS - 24 * ragged)

    def call():
        with tiles(**of_tiles):
            # A new mask, as which tables it has is decided at their first use.
            mask = (mask_of.__wrapped__ if of_tiles else mask_of)(spec, block, split)
            launches.hopper_attention(shape, mask, variant_of(adds), deterministic, passes)

    return suffix, dim, (), call


def hopper_to_128(dim: int) -> Cases:
    case, forward, backward = partial(hopper, dim=dim), ("forward",), ("backward",)
    yield case("")
    yield case("", ragged=True, passes=backward)
    yield case("", spec="causal")
    yield case("", spec="causal", split=True)
    yield case("", spec="causal", kv_heads=1, passes=backward)
    yield case("", spec="causal", deterministic=True, passes=backward)
    yield case("of_sinks", spec="causal", split=True, adds="sinks")
    yield case("of_dropout", adds="dropout")
    documents = {"spec": "causal & documents((0, 33, 40, 200, 1024))", "by_document": True}
    yield case("of_documents", **documents)
    yield case("of_documents", **documents, deterministic=True, passes=backward)
    for spec in (None, "causal"):
        yield case("of_short", spec=spec, passes=forward, short=True)
        yield case("of_eight_bits", spec=spec, split=spec is not None, passes=("eight bits",))
        if dim == 64:
            yield case("of_192", spec=spec, passes=forward, tall=True)
            yield case("of_eight_bits_of_192", spec=spec, passes=("eight bits",), tall=True)
    yield case("of_eight_bits_of_64", spec="causal", block=64, passes=("eight bits",))
    yield case("of_64", spec="causal", block=64, split=True)
    yield case("of_64", spec="causal", block=64, deterministic=True, passes=backward)
    yield case("of_lengths", spec="causal", adds="lengths")
    yield case("of_own", spec="causal", adds="own")
    if dim == 128:
        yield case("of_heads_together", **documents, kv_heads=1, passes=backward, together=True)
        yield case("of_softcap", spec="causal", adds="softcap")
        yield case("of_alibi", spec="causal", adds="alibi")
        for adds in ("lengths", "own"):
            yield case(f"of_{adds}_of_64", spec="causal", block=64, adds=adds)


def wide_hopper() -> Cases:
    for dim, dim_v in ((256, 256), (192, 192), (192, 128)):
        case = partial(hopper, dim=dim, dim_v=dim_v)
        of = "" if dim == dim_v else f"of_{dim}_and_{dim_v}"
        yield case(of)
        yield case(of, spec="causal", split=True)
        if dim_v != 192:
            yield case(of, ragged=True, passes=("backward",))
            yield case(of, spec="causal", kv_heads=1, passes=("backward",))
            yield case(of, spec="causal", deterministic=True, passes=("backward",))
            yield case(f"{of}_of_64".strip("_"), spec="causal", block=64, split=True)
            for adds in ("dropout", "alibi", "lengths"):
                passes = ("forward", "backward") if dim_v == 256 else ("forward",)
                yield case(f"{of}_of_{adds}".strip("_"), spec="causal", adds=adds, passes=passes)
    yield hopper("of_own", 256, "causal", adds="own", passes=("backward",))


def decoding() -> Cases:
    # spec, group of heads, queries, tokens of a page, scales
    layouts = [(None, 4, 1, 0, ""), ("causal", 4, 1, 0, ""), ("causal", 4, 1, 16, ""), ("causal", 2, 16, 128, "")]
    layouts += [(None, 4, 1, 0, "of heads"), ("causal", 4, 1, 0, "of tokens"), ("causal", 4, 1, 16, "of tokens")]
    layouts += [("causal", 2, 16, 128, "of heads")]
    lens = torch.zeros(1, dtype=torch.int32)
    for dim in (64, 128):
        for spec, group, queries, page, scales in layouts:
            shape = Shape(heads=group, kv_heads=1, q_len=queries, kv_len=TOKENS, dim=dim)
            options = {"kv_lens": lens, "causal": queries > 1 and spec is None, "splits": 2} | ({} if page else {"kv_starts": lens})
            call = partial(launches.decoding, shape, mask_of(spec, 128), page, scales, **options)
            yield "of_e4m3" if scales else "", dim, (), call


def selections() -> Cases:
    # heads, key heads, head_dim, block, always
    cases = [(16, 4, dim, block, None) for dim, block in ((64, 64), (128, 64), (128, 128))]
    cases += [(16, 4, 128, 256, None), (16, 4, 128, 64, "sinks(4) | local(128)")]
    for case in cases:
        heads, kv_heads, dim, block, always = case
        shape = Shape(1, heads, kv_heads, TOKENS, TOKENS, dim)
        of_hopper = (False, True) if block in selection_hopper.BLOCK_SIZES else (False,)
        always = mask_of(always, min(block, 256))
        call = partial(launches.selected_attention, shape, 16, block, always, of_hopper, always is None)
        yield "", dim, case, call
        for page in (0, 64):
            yield "", dim, case, partial(launches.selected_decoding, shape._replace(q_len=1), 16, block, page)


def choices() -> Cases:
    # kind, query heads that share a choice, block, whether of packed documents
    cases = [(kind, *case, False) for kind in ("mean", "max", "softmax") for case in ((4 if kind == "mean" else 1, 128), (16, 64))]
    cases += [("given", 1, 128, False), ("mean", 4, 128, True), ("given", 1, 128, True), ("max", 1, 64, True)]
    for case in cases:
        kind, shared, block, bounded = case
        shape = Shape(1, shared, 1, TOKENS, TOKENS, 128)
        bounds = torch.empty(TOKENS, 2, dtype=torch.int32) if bounded else None

        def call(shape=shape, kind=kind, block=block, bounds=bounds):
            with mock.patch.object(pick_blocks, "_precision", lambda source: "tf32"):  # as on a GPU
                launches.choice(shape, kind, block, 16, bounds, TOKENS // 16)

        yield "", 128, case, call


def choosers() -> Cases:
    cases = [(chooser, dim) for chooser in (Sampled(8, floor=0.1), Sampled(8, floor=0.1, block=64)) for dim in (64, 128)]
    for chooser, dim in [*cases, (Antidiagonal(8, floor=0.1), 128), (Antidiagonal(16, floor=0.1, block=64), 64)]:

        def call(chooser=chooser, dim=dim):
            features, grid = launches.features_of(Shape(1, 32, 8, TOKENS, TOKENS, dim), chooser, True)
            for by in (log_sums, hopper_log_sums):
                log_sums.scores_of_blocks(features, grid.kv_blocks, 0, grid.q_blocks, by)

        yield "", dim, (chooser, dim), call


def merges() -> Cases:
    cases = [(torch.bfloat16, 128), (torch.float16, 64), (torch.float32, 256), (torch.bfloat16, 40), (torch.float16, 32)]
    for dtype, dim in [*cases, (torch.float64, 128)]:
        yield "", dim, (dtype, dim), partial(launches.merges, dtype, dim, dtype != torch.float64)


def packed() -> Cases:
    yield "", 0, (), partial(launches.packed, 512, 1000, 8)


GROUPS = {group.__name__: group for group in (attention, decoding, selections, choices, choosers, merges, packed)}


# Outcomes.


def dumped(binary: bytes, option: str) -> str:
    """Returns what cuobjdump prints about a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resources(binary: bytes) -> dict[str, int]:
    """Returns registers per thread ("reg") and bytes of stack per thread ("stack")."""
    text = dumped(binary, "--dump-resource-usage")
    return {name.lower(): int(value) for name, value in re.findall(r"\b(REG|STACK):(\d+)", text)}


def spills_in_full_blocks(binary: bytes) -> int:
    """Returns how many instructions access the stack in the loop over full blocks. It is the innermost loop with products that
    loads least from global memory, as the others load masks."""
    code = [(int(address, 16), text) for address, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", dumped(binary, "-sass"))]
    jumps = ((re.match(r"@\S+ BRA\S*.*?0x([0-9a-f]+)", text), end) for end, text in code)
    loops = [(int(to[1], 16), end) for to, end in jumps if to and int(to[1], 16) <= end]

    def count(loop: tuple[int, int], names: str) -> int:
        begin, end = loop
        return sum(begin <= address <= end and re.search(rf"\b({names})\b", text) is not None for address, text in code)

    loops = [loop for loop in loops if count(loop, "HGMMA|QGMMA|HMMA")]
    innermost = [(a, b) for a, b in loops if not any((a, b) != (c, d) and a <= c and d <= b for c, d in loops)]
    loads = [count(loop, "LDG|LDGSTS") for loop in innermost]
    return max((count(loop, "LDL|STL") for loop, n in zip(innermost, loads, strict=True) if n == min(loads)), default=0)


# What is counted in the code of a kernel.
INSTRUCTIONS = {
    "wgmma": r"wgmma\.mma_async",
    "e4m3": r"wgmma\.mma_async\S*\.e4m3\.e4m3",
    "mma": r"\bmma\.sync",
    "tma": r"cp\.async\.bulk\.tensor",
    "async": r"cp\.async\.cg\.shared\.global",
}


def outcome(launch: Launch) -> dict:
    # ptxas reports C7510 to C7518 if it has to serialize products; Triton drops its log on success.
    with knobs.nvidia.scope(), contextlib.redirect_stdout(io.StringIO()) as log:
        knobs.nvidia.dump_ptxas_log = True
        result = launch.compiled()
    ptx = result.asm["ptx"]
    row = {"shared": result.metadata.shared, "warps": result.metadata.num_warps}
    row |= {name: len(re.findall(pattern, ptx)) for name, pattern in INSTRUCTIONS.items()}
    types = parameter_types(result.src.signature, parameter_sizes(ptx))
    row["repeatable"] = types is not None and types.count("map") == len(result.metadata.tensordesc_meta or ())
    if launch.name == "merge":  # whether all have read what the first store may change
        row["waits"] = "bar.sync" in ptx[ptx.rindex("ld.global.b", 0, ptx.index("st.global")) : ptx.index("st.global")]
    row |= {"serialized": sorted(set(re.findall(r"C75\d\d", log.getvalue()))), "log": len(log.getvalue())}
    row |= resources(result.asm["cubin"])
    return row | {"in_full_blocks": spills_in_full_blocks(result.asm["cubin"]) if row["stack"] else 0}


# Kernels without products, compiled for plain calls and, as some read them, for sinks.
NEXT_TO_PRODUCTS = {"hopper_prepare", "hopper_finish", "hopper_combine", "hopper_quantize_values"}


_found: list[tuple[dict, Launch]] = []  # what is known of a kernel before it is compiled


def find(groups: list[str]) -> None:
    """Appends to ``_found``, each code once."""
    known, backend = set(), launches.make_backend(launches.SM90)
    for group in groups:
        for suffix, dim, case, call in GROUPS[group]():
            for launch in launches.launches_of(call):
                key = launch.kernel.fn, *map(str, launch.code(backend))
                if key in known or (suffix not in ("", "of_sinks") and launch.name in NEXT_TO_PRODUCTS):
                    continue
                known.add(key)
                name = f"{launch.name}_{suffix}".rstrip("_")
                _found.append(({"group": group, "kernel": name, "dim": dim, "case": list(map(str, case))}, launch))


def _outcome(number: int) -> dict:
    known, launch = _found[number]
    return known | outcome(launch)


def main() -> None:
    find(sys.argv[1:] or list(GROUPS))
    knobs.compilation.always_compile = True  # a result from Triton's cache has no log
    with multiprocessing.get_context("fork").Pool() as pool:
        for row in pool.imap(_outcome, range(len(_found))):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
