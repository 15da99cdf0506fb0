"""Attention in e4m3 (``precision="fp8"``) on one Hopper GPU: errors and times beside bfloat16 and other libraries' FP8.

    python -m sparse_flash.benchmarks.precision --out runs/precision
    python -m sparse_flash.benchmarks.precision --part errors --part rows --row causal

Errors: 64 rows of 65,536 keys against float64 for several statistics of the inputs. ``tests/fuzz.py --of fp8`` checks results.
Rows: medians in ms of the whole call, of rounding q, k and v, and of the kernel alone. TFLOP/s count kept pairs: 4 x pairs x
head_dim x heads. The row "together" also times a choice of blocks with the attention over them. What fails is a result, and the
rest runs. Writes precision.json after every row.

Peers, dense and causal, their inputs rounded beforehand: FlashAttention-3's FP8 from the package fa3-fwd, with one scale a head
(xformers' copy has none compiled in), and cuDNN's from the package nvidia-cudnn-frontend, with one scale a tensor. On Hopper
cuDNN writes e4m3 only, and its errors have that rounding too. Under random blocks, cuDNN's block-sparse attention in FP8.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

import torch

import sparse_flash as sf
from sparse_flash.core.eight_bits import attention_in_eight_bits
from sparse_flash.kernels.common.eight_bits import TOP_EXPONENT

from .baselines.flash import prepare_fa3_forward, quantize
from .baselines.full_blocks import list_kept
from .measure.accuracy import relative_error
from .measure.throughput import time_ms, try_measuring
from .program import RowFile, create_parser
from .results import environment, has_numbers, why_not
from .workload.problem import reorder_memory

STATISTICS = ("normal", "keys and values with a mean", "outlier channels", "uniform values", "sharp")
ROWS_CHECKED, KEYS_CHECKED = 64, 65_536
PARTS = ("errors", "rows")


@dataclass(frozen=True)
class PrecisionRow:
    """density: of random blocks; None: ``spec``. choice: an expression with choosers, beside attention under ``spec``."""

    name: str
    spec: str | None
    density: float | None
    block: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    choice: str | None = None

    def mask(self, device: torch.device) -> sf.BlockMask | None:
        if self.density is None:
            return None if self.spec is None else sf.compile_mask(self.spec, self.tokens, block_size=self.block, device=device)
        count = self.tokens // self.block
        order = torch.rand(count, count, generator=torch.Generator().manual_seed(5)).argsort(1)
        return sf.BlockMask.from_blocks((order < round(self.density * count)).to(device), self.block)


ROWS = [
    PrecisionRow("dense 16K", None, None, 128, 16_384, 16, 16),
    PrecisionRow("causal 16K", "causal", None, 128, 16_384, 16, 16),
    PrecisionRow("dense 64K", None, None, 128, 65_536, 8, 8),
    PrecisionRow("causal 64K, 32/8", "causal", None, 128, 65_536, 32, 8),
    PrecisionRow("random 8%, blocks of 128, 64K, 32/8", None, 0.08, 128, 65_536, 32, 8),
    PrecisionRow("one block of 128 in 8, 64K", None, 1 / 8, 128, 65_536, 16, 16),
    PrecisionRow("random 8%, blocks of 64, 32K", None, 0.08, 64, 32_768, 16, 16),
    PrecisionRow("window 4096, 64K, 32/8", "causal & local(4096)", None, 128, 65_536, 32, 8),
    PrecisionRow("dense 16K, head_dim 64", None, None, 128, 16_384, 32, 32, 64),
    PrecisionRow("causal 16K, head_dim 64", "causal", None, 128, 16_384, 32, 32, 64),
    PrecisionRow("together 128K, 32/8", "causal", None, 128, 131_072, 32, 8, choice="causal & sampled(8, keep=0.15)"),
]


def draw_inputs(statistics: str, shape: tuple[int, int, int, int], name: str, generator: torch.Generator) -> torch.Tensor:
    """bfloat16 numbers of one of ``STATISTICS``. name: "q", "k" or "v"."""
    x = torch.randn(shape, generator=generator, device="cuda")
    if statistics == "keys and values with a mean" and name != "q":
        x = x + 2 * torch.randn(shape[3], generator=generator, device="cuda")
    elif statistics == "outlier channels":
        x[..., ::32] *= 12 if name != "v" else 40
        x = x / 3 if name != "v" else x
    elif statistics == "uniform values" and name == "v":
        x = torch.rand(shape, generator=generator, device="cuda") + 0.5
    elif statistics == "sharp" and name == "q":
        x = x * 4
    return x.bfloat16()


def measure_errors(statistics: str) -> dict:
    """Errors against float64 of ``ROWS_CHECKED`` rows of long dense calls."""
    generator = torch.Generator("cuda").manual_seed(0)
    lengths = ROWS_CHECKED, KEYS_CHECKED, KEYS_CHECKED
    q, k, v = (draw_inputs(statistics, (1, 2, tokens, 128), name, generator) for name, tokens in zip("qkv", lengths))
    exact = torch.softmax(q.double() @ k.double().mT * 128**-0.5, -1) @ v.double()
    calls: dict[str, Callable[[], Any]] = {
        "bf16": partial(sf.attention, q, k, v),
        "fp8": partial(sf.attention, q, k, v, precision="fp8"),
    }
    for name, prepare in PEERS.items():
        calls[name] = partial(lambda prepare: prepare(q, k, v, False)(), prepare)
    found: dict = {"definition": relative_error(attention_in_eight_bits(q, k, v, None, 128**-0.5)[0], exact)}

    def measure(call: Callable[[], Any]) -> dict:
        return {"error": relative_error(read_out(call()), exact)}

    for name, call in calls.items():
        result = try_measuring(partial(measure, call), 120)
        found[name] = result["error"] if has_numbers(result) else why_not(result)
    return found


def prepare_fa3_fp8(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Callable:
    """FlashAttention-3's FP8 call. Query heads that share a key head share a scale."""
    q8, q_scale = quantize(q.reshape(*k.shape[:2], -1, q.shape[3]))
    (k8, k_scale), (v8, v_scale) = quantize(k), quantize(v)
    scales = {"q_descale": q_scale, "k_descale": k_scale, "v_descale": v_scale}
    operands = (reorder_memory(x, (0, 2, 1, 3)) for x in (q8.view(q.shape), k8, v8))
    return prepare_fa3_forward(*operands, **scales, is_causal=causal, num_splits=1)


def prepare_cudnn_fp8(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Callable:
    """cuDNN's FP8 call, which returns (out in e4m3, its scale)."""
    import cudnn

    kind, single = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
    graph = cudnn.pygraph(io_data_type=kind, intermediate_data_type=single, compute_data_type=single)
    rounded = [quantize(x.reshape(1, 1, -1, x.shape[3])) for x in (q, k, v)]
    eight = [reorder_memory(x8.view(x.shape), (0, 2, 1, 3)) for x, (x8, _) in zip((q, k, v), rounded, strict=True)]
    of_q, of_k, of_v = (scale.view(1, 1, 1, 1) for _, scale in rounded)
    of_weights = torch.full_like(of_v, 2.0**-TOP_EXPONENT)  # as in our kernel, and in cuDNN's own tests
    scales = {"descale_q": of_q, "descale_k": of_k, "descale_v": of_v, "descale_s": of_weights, "scale_s": 1 / of_weights}
    scales["scale_o"] = 1 / of_v  # no number of out is larger than the largest of v
    inputs = [graph.tensor(dim=list(x.shape), stride=list(x.stride()), data_type=kind) for x in eight]
    scalars = {name: graph.tensor(dim=[1] * 4, stride=[1] * 4, data_type=single) for name in scales}
    options = {"generate_stats": False, "attn_scale": q.shape[3] ** -0.5, "use_causal_mask": causal}
    out, _, *largest = graph.sdpa_fp8(q=inputs[0], k=inputs[1], v=inputs[2], **scalars, **options)
    result = torch.empty_like(eight[0])
    out.set_output(True).set_dim(list(result.shape)).set_stride(list(result.stride())).set_data_type(kind)
    for tensor in largest:
        tensor.set_output(True).set_dim([1] * 4).set_stride([1] * 4).set_data_type(single)
    graph.build([cudnn.heur_mode.A])
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=q.device)
    # DLPack, through which it reads tensors, has no e4m3.
    pack: dict[Any, Any] = {tensor: x.view(torch.uint8) for tensor, x in zip((*inputs, out), (*eight, result), strict=True)}
    pack |= {scalars[name]: scale for name, scale in scales.items()}
    pack |= {tensor: torch.empty_like(of_v) for tensor in largest}

    def attend():
        graph.execute(pack, workspace)
        return result, of_v

    return attend


def prepare_cudnn_blocks_fp8(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: sf.BlockMask) -> Callable:
    """The whole call of cuDNN's block-sparse attention in FP8, which rounds q, k and v itself. Each row keeps as many blocks."""
    from cudnn.block_sparse_attention.api import block_sparse_attention_fp8_forward

    index, _ = list_kept(mask.kept_blocks().expand(*q.shape[:2], -1, -1))
    return lambda: block_sparse_attention_fp8_forward(q, k, v, index, sparse_block_size=mask.block_size)["o_tensor"]


PEERS: dict[str, Callable[..., Callable]] = {"FlashAttention-3 fp8": prepare_fa3_fp8, "cuDNN fp8": prepare_cudnn_fp8}


def read_out(out: Any) -> torch.Tensor:
    """out as numbers: (numbers in e4m3, their scale), or as it is."""
    return out[0].float() * out[1] if isinstance(out, tuple) else out


@dataclass(frozen=True)
class Contestant:
    """kind: "attention" under the row's mask, "chosen attention" under its choice, "choice" of blocks alone, or "rounding" of q, k
    and v. prepare: returns the call to time."""

    name: str
    kind: str
    prepare: Callable[[], Callable[[], Any]]


def list_contestants(
    row: PrecisionRow, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: sf.BlockMask | None
) -> Iterator[Contestant]:
    """Yields our calls of a row: both precisions, the parts of the second, and a choice with either."""
    scale, choice = row.head_dim**-0.5, row.choice

    def prepare_attention(mask, precision):
        return lambda: sf.attention(q, k, v, mask, precision=precision)

    for name, precision in (("bf16", None), ("fp8", "fp8")):
        yield Contestant(name, "attention", partial(prepare_attention, mask, precision))
        if choice is not None:
            yield Contestant(f"choice and {name}", "chosen attention", partial(prepare_attention, choice, precision))
    if choice is not None:
        yield Contestant("choice", "choice", lambda: partial(sf.choose_blocks, choice, q, k))

    def prepare_rounding():
        from sparse_flash.kernels.hopper.quantization import quantize_operands
        from sparse_flash.kernels.launch.launch import Recording

        return lambda: quantize_operands(q, k, v, scale, Recording())

    @cache
    def round_once():
        return prepare_rounding()()

    def prepare_kernel():
        from sparse_flash.kernels.hopper.forward import attend_to_operands
        from sparse_flash.kernels.launch.launch import Recording

        table = None if mask is None else mask.kernel_table(True)
        out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device=q.device)

        def attend():
            attend_to_operands(round_once(), out, lse, table, scale, Recording())
            return out

        return attend

    yield Contestant("rounding", "rounding", prepare_rounding)
    yield Contestant("kernel", "attention", prepare_kernel)


def measure_row(row: PrecisionRow, limit: int, device: torch.device) -> dict:
    """Times in ms and TFLOP/s of a row's contestants, and the relative difference of their results from bfloat16's."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((1, heads, row.tokens, row.head_dim) for heads in (row.heads, row.kv_heads, row.kv_heads))
    q, k, v = (torch.randn(shape, generator=generator, device=device).bfloat16() for shape in shapes)
    mask = row.mask(device)
    pairs = row.tokens**2 if mask is None else round(mask.density * row.tokens**2)
    flops = 4 * pairs * row.heads * row.head_dim
    expected: dict[str, torch.Tensor] = {}  # by kind: the first result, which is bfloat16's
    contestants = list(list_contestants(row, q, k, v, mask))
    if row.spec in (None, "causal") and row.density is None:
        for name, prepare in PEERS.items():
            contestants.append(Contestant(name, "attention", partial(prepare, q, k, v, row.spec == "causal")))
    elif mask is not None and row.density is not None and row.heads == row.kv_heads:
        contestants.append(Contestant("cuDNN's blocks, fp8", "attention", partial(prepare_cudnn_blocks_fp8, q, k, v, mask)))

    def measure(one: Contestant) -> dict:
        with torch.no_grad():
            call = one.prepare()
            out = call()
            timing = time_ms(call, device, 0.3)
        result = timing.as_result("ms")
        if one.kind == "choice":
            return result | {"density": out.density}
        if one.kind == "rounding":
            return result
        if one.kind == "attention":
            result["tflops"] = flops / timing.median / 1e9
        numbers = read_out(out)
        return result | {"from_bf16": relative_error(numbers, expected.setdefault(one.kind, numbers.clone()).double())}

    results = {one.name: try_measuring(partial(measure, one), limit) for one in contestants}
    for one in contestants:
        if "attention" in one.kind and "ms" in results[one.name] and "ms" in results["bf16"]:
            results[one.name]["speedup"] = results["bf16"]["ms"] / results[one.name]["ms"]
    return {"row": asdict(row), "block_density": 1.0 if mask is None else mask.block_density, "results": results}


def format_result(result: dict) -> str:
    """One line of the table."""
    if "ms" not in result:
        return why_not(result)
    text = f"{result['ms']:8.3f} ms"
    for name, form in {"tflops": "{:6.0f} TFLOP/s", "speedup": "{:5.2f}x", "density": "{:6.3f} density"}.items():
        if name in result:
            text += " " + form.format(result[name])
    return text + (f"  differs from bf16 by {result['from_bf16']:.1e}" if "from_bf16" in result else "")


def main(arguments: list[str] | None = None) -> int:
    parser = create_parser("precision", __doc__)
    parser.add_argument("--row", action="append", default=[], metavar="TEXT", help="only rows with this in their name")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; may be given several times")
    parser.add_argument("--limit", type=int, default=60, help="seconds for a contestant of a row (default %(default)s)")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("it measures on a Hopper GPU; backend='reference' runs the definition anywhere", file=sys.stderr)
        return 1
    device, parts = torch.device("cuda"), options.part or PARTS
    file = RowFile(options.out / "precision.json", {"environment": environment(device)}, *PARTS)
    with torch.no_grad():
        for statistics in STATISTICS if "errors" in parts else ():
            found = try_measuring(partial(measure_errors, statistics))
            texts = (f"{name} {value:.2e}" if isinstance(value, float) else f"{name} {value}" for name, value in found.items())
            file.add("errors", {"statistics": statistics} | found, statistics, *texts)
    for row in ROWS if "rows" in parts else ():
        if options.row and not any(text in row.name for text in options.row):
            continue
        found = try_measuring(partial(measure_row, row, options.limit, device))
        found = found if has_numbers(found) else {"row": asdict(row), "results": {"all": found}}
        file.add("rows", found, row.name)
        for name, result in found["results"].items():
            print(f"  {name:32}{format_result(result)}", flush=True)
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
