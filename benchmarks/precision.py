"""Attention in e4m3 (``precision="fp8"``) on one Hopper GPU: errors first, then times beside bfloat16 and other libraries' FP8.

    python -m sparse_flash.benchmarks.precision --out runs/precision
    python -m sparse_flash.benchmarks.precision --no-checks --row causal --config stages=3 --config overlapped=0,alternating=1

Checks: results against the definition and float64, for a grid of masks, lengths and heads; then 64 rows of 65,536 keys against
float64 for several statistics of the inputs, FlashAttention-3's FP8 (one scale a head) beside ours. Times: medians in ms of the
whole call, of rounding q, k and v, and of the kernel alone, for the built-in config and each ``--config``, fields of
``EightBitConfig`` that change. TFLOP/s count kept pairs: 4 x pairs x head_dim x heads. The row "together" also times a choice of
blocks with the attention over them. What fails is a result, and the rest runs. Writes precision.json after every row.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

import sparse_flash as sf
from sparse_flash.variant.eight_bits import attention_in_eight_bits

from .baselines.flash import why_no_fa3
from .measure.throughput import OverLimit, failure_text, time_limit, time_ms
from .results import environment

# mask, block size, q_len, kv_len, heads, kv_heads, head_dim, v_head_dim
CHECKED_CALLS = [
    (None, 128, 1000, 1000, 4, 4, 128, 128),
    (None, 128, 77, 1333, 4, 1, 64, 64),
    ("causal", 128, 1024, 1024, 8, 2, 128, 128),
    ("causal", 128, 777, 777, 4, 4, 64, 64),
    ("causal", 128, 300, 900, 4, 2, 96, 96),
    ("causal & local(200)", 128, 1500, 1500, 4, 4, 128, 128),
    ("causal & (local(70) | strided(7, block=1))", 128, 900, 900, 2, 2, 128, 128),
    ("causal & documents((0, 33, 40, 700, 1111))", 128, 1111, 1111, 2, 2, 128, 128),
    ("butterfly(block=128)", 128, 2048, 2048, 4, 2, 128, 128),
    ("prefix(70) & ~causal", 128, 600, 500, 2, 2, 64, 64),
    ("local(90)", 64, 1000, 1000, 4, 4, 128, 128),
    ("butterfly(block=64)", 64, 2048, 2048, 4, 4, 64, 64),
    ("causal & local(300)", 256, 1500, 1500, 4, 2, 128, 128),
    ("causal | sinks(130)", 128, 4096, 4096, 2, 1, 128, 128),
    ("causal", 128, 500, 500, 2, 2, 64, 128),
    ("causal", 128, 500, 500, 2, 2, 40, 40),
]
MOST_ERROR = 6e-3  # largest relative error against the definition: of sums, and of weights that round the other way
MOST_LSE_ERROR = 2e-2  # largest difference of lse
STATISTICS = ("normal", "keys and values with a mean", "outlier channels", "uniform values", "sharp")
ROWS_CHECKED, KEYS_CHECKED = 64, 65_536


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
        generator = torch.Generator().manual_seed(5)
        blocks = (torch.rand(count, count, generator=generator) < self.density) | torch.eye(count, dtype=torch.bool)
        return sf.BlockMask.from_blocks(blocks.to(device), self.block)


ROWS = [
    PrecisionRow("dense 16K", None, None, 128, 16_384, 16, 16),
    PrecisionRow("causal 16K", "causal", None, 128, 16_384, 16, 16),
    PrecisionRow("dense 64K", None, None, 128, 65_536, 8, 8),
    PrecisionRow("causal 64K, 32/8", "causal", None, 128, 65_536, 32, 8),
    PrecisionRow("random 8%, blocks of 128, 64K, 32/8", None, 0.08, 128, 65_536, 32, 8),
    PrecisionRow("random 20%, blocks of 128, 64K, 32/8", None, 0.20, 128, 65_536, 32, 8),
    PrecisionRow("random 8%, blocks of 64, 32K", None, 0.08, 64, 32_768, 16, 16),
    PrecisionRow("window 4096, 64K, 32/8", "causal & local(4096)", None, 128, 65_536, 32, 8),
    PrecisionRow("dense 16K, head_dim 64", None, None, 128, 16_384, 32, 32, 64),
    PrecisionRow("causal 16K, head_dim 64", "causal", None, 128, 16_384, 32, 32, 64),
    PrecisionRow("together 128K, 32/8", "causal", None, 128, 131_072, 32, 8, choice="causal & sampled(8, keep=0.15)"),
]


def draw_inputs(kind: str, shape: tuple[int, int, int, int], of: str, generator: torch.Generator) -> torch.Tensor:
    """bfloat16 numbers of one of ``STATISTICS``. of: "q", "k" or "v"."""
    x = torch.randn(shape, generator=generator, device="cuda")
    if kind == "keys and values with a mean" and of != "q":
        x = x + 2 * torch.randn(shape[3], generator=generator, device="cuda")
    elif kind == "outlier channels":
        x[..., ::32] *= 12 if of != "v" else 40
        x = x / 3 if of != "v" else x
    elif kind == "uniform values" and of == "v":
        x = torch.rand(shape, generator=generator, device="cuda") + 0.5
    elif kind == "sharp" and of == "q":
        x = x * 4
    return x.bfloat16()


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def _failure_reason(error: Exception | OverLimit) -> str:
    return "over its time" if isinstance(error, OverLimit) else failure_text(error)


def call_attention(*tensors: Any, **options: Any) -> Any:
    return sf.attention(*tensors, **options)


def check_calls() -> Iterator[dict]:
    """Yields the errors of each call of ``CHECKED_CALLS``."""
    for spec, block, q_len, kv_len, heads, kv_heads, head_dim, v_head_dim in CHECKED_CALLS:
        generator = torch.Generator("cuda").manual_seed(0)
        sizes = (heads, q_len, head_dim), (kv_heads, kv_len, head_dim), (kv_heads, kv_len, v_head_dim)
        q, k, v = (torch.randn((2, *size), generator=generator, device="cuda").bfloat16() for size in sizes)
        k, v = k + 1, v + 0.5
        name = f"{spec or 'dense'}, blocks of {block}, {q_len} x {kv_len}, {heads}/{kv_heads} heads, {head_dim}/{v_head_dim}"
        try:
            with time_limit(120):
                mask = None if spec is None else sf.compile_mask(spec, q_len, kv_len, block, device="cuda")
                exact, exact_lse = call_attention(q.double(), k.double(), v.double(), mask, backend="reference", return_lse=True)
                kept = None if mask is None else mask.to_dense()
                wanted, wanted_lse = attention_in_eight_bits(q, k, v, kept, head_dim**-0.5)
                out, lse = call_attention(q, k, v, mask, precision="fp8", return_lse=True)
                again = call_attention(q, k, v, mask, precision="fp8")
        except (Exception, OverLimit) as error:  # the other calls may still be right
            yield {"call": name, "right": False, "failed": _failure_reason(error)}
            continue
        some = ~exact_lse.isneginf()
        found = {
            "against_definition": relative_error(out, wanted),
            "against_float64": relative_error(out, exact),
            "definition_against_float64": relative_error(wanted, exact),
            "lse": (lse.double() - wanted_lse)[some].abs().max().item(),
            "repeats": torch.equal(out, again),
            "empty_rows": torch.equal(lse.isneginf(), exact_lse.isneginf()) and not out[~some].any().item(),
        }
        right = found["against_definition"] <= MOST_ERROR and found["lse"] <= MOST_LSE_ERROR
        yield {"call": name, "right": right and found["repeats"] and found["empty_rows"]} | found


def measure_errors(kind: str, peers: bool, library: str | None) -> dict:
    """Errors against float64 of ``ROWS_CHECKED`` rows of long dense calls. library: see ``why_no_fa3``."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        draw_inputs(kind, (1, 2, tokens, 128), of, generator) for of, tokens in zip("qkv", (ROWS_CHECKED, *[KEYS_CHECKED] * 2))
    )
    exact = torch.softmax(q.double() @ k.double().mT * 128**-0.5, -1) @ v.double()
    found: dict[str, Any] = {"definition": relative_error(attention_in_eight_bits(q, k, v, None, 128**-0.5)[0], exact)}
    contestants: dict[str, Callable[[], Callable[[], torch.Tensor]]] = {
        "bf16": lambda: partial(call_attention, q, k, v),
        "fp8": lambda: partial(call_attention, q, k, v, precision="fp8"),
    }
    if peers:
        contestants["FlashAttention-3 fp8"] = partial(prepare_fa3_fp8, library, q, k, v, False)
    for name, prepare in contestants.items():
        try:
            with time_limit(120):
                found[name] = relative_error(prepare()(), exact)
        except (Exception, OverLimit) as error:
            found[name] = _failure_reason(error)
    return {"statistics": kind} | found


def quantize_by_head(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(x in e4m3, (batch, heads) float32 scales), one for each head."""
    scales = x.float().abs().amax((2, 3)) / 448
    return (x.float() / scales[..., None, None]).to(torch.float8_e4m3fn), scales


def prepare_fa3_fp8(
    library: str | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> Callable[[], torch.Tensor]:
    """FlashAttention-3's FP8 call, its inputs rounded beforehand. Query heads that share a key head share a scale. library: as for
    ``why_no_fa3``, whose reason a RuntimeError has."""
    if missing := why_no_fa3(library):
        raise RuntimeError(missing)
    group = q.shape[1] // k.shape[1]
    of_q = q.float().unflatten(1, (-1, group)).abs().amax((2, 3, 4)) / 448
    q8 = (q.float() / of_q.repeat_interleave(group, 1)[..., None, None]).to(torch.float8_e4m3fn)
    (k8, of_k), (v8, of_v) = quantize_by_head(k), quantize_by_head(v)
    q8, k8, v8 = (x.transpose(1, 2).contiguous() for x in (q8, k8, v8))
    scales = {"q_descale": of_q, "k_descale": of_k, "v_descale": of_v}
    options = {"softmax_scale": q.shape[3] ** -0.5, "is_causal": causal, "num_splits": 1}
    return lambda: torch.ops.flash_attn_3.fwd(q8, k8, v8, **scales, **options)[0].transpose(1, 2)


def prepare_cudnn_fp8(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Callable[[], torch.Tensor]:
    """cuDNN's FP8 call through its frontend, all scales 1, its inputs rounded beforehand. Only for times."""
    import cudnn

    eight = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    graph = cudnn.pygraph(
        io_data_type=cudnn.data_type.FP8_E4M3,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
    )
    inputs = [graph.tensor(dim=list(x.shape), stride=list(x.stride()), data_type=cudnn.data_type.FP8_E4M3) for x in eight]
    names = "descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o"
    ones = {name: graph.tensor(dim=[1] * 4, stride=[1] * 4, data_type=cudnn.data_type.FLOAT) for name in names}
    options = {"is_inference": True, "attn_scale": q.shape[3] ** -0.5, "use_causal_mask": causal}
    out, _, *largest = graph.sdpa_fp8(q=inputs[0], k=inputs[1], v=inputs[2], **ones, **options)
    out.set_output(True).set_dim(list(q.shape)).set_stride(list(q.stride())).set_data_type(cudnn.data_type.FP8_E4M3)
    for tensor in largest:
        tensor.set_output(True).set_dim([1] * 4).set_stride([1] * 4).set_data_type(cudnn.data_type.FLOAT)
    graph.build([cudnn.heur_mode.A])
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=q.device)
    one = torch.ones(1, 1, 1, 1, device=q.device)
    result = torch.empty_like(eight[0])
    pack: dict[Any, Any] = dict(zip(inputs, (x.view(torch.uint8) for x in eight)))
    pack |= dict.fromkeys(ones.values(), one) | {out: result.view(torch.uint8)}
    pack |= {tensor: torch.empty_like(one) for tensor in largest}

    def attend():
        graph.execute(pack, workspace)
        return result

    return attend


def list_own_calls(row: PrecisionRow, q, k, v, mask, changes: list[dict]) -> Iterator[tuple[str, Callable[[], Callable[[], Any]]]]:
    """Yields (name, what prepares the call): both precisions, the parts of the second, and a choice with either."""
    scale = row.head_dim**-0.5
    for name, precision in (("bf16", None), ("fp8", "fp8")):
        yield name, partial(partial, call_attention, q, k, v, mask, precision=precision)
        if row.choice is not None:
            yield f"choice and {name}", partial(partial, call_attention, q, k, v, row.choice, precision=precision)
    if row.choice is not None:
        yield "choice", partial(partial, sf.choose_blocks, row.choice, q, k)

    def rounding():
        from sparse_flash.kernels.hopper.quantization import quantize_operands
        from sparse_flash.kernels.launch.launch import Recording

        return lambda: quantize_operands(q, k, v, scale, Recording())

    operands = cache(lambda: rounding()())

    def kernel(change):
        from sparse_flash.kernels.hopper.configs import forward_of_eight_bits
        from sparse_flash.kernels.hopper.forward import attend_to_operands
        from sparse_flash.kernels.launch.launch import Recording

        table = None if mask is None else mask.kernel_table(True)
        config = replace(forward_of_eight_bits(row.head_dim, None if table is None else table.block_size), **change)
        out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device=q.device)

        def attend():
            attend_to_operands(operands(), out, lse, table, scale, config, Recording())
            return out

        return attend

    yield "rounding", rounding
    for change in [{}, *changes]:
        yield "kernel" + "".join(f" {field}={int(value)}" for field, value in change.items()), partial(kernel, change)


def measure_row(row: PrecisionRow, changes: list[dict], peers: bool, library: str | None, limit: int, device: torch.device) -> dict:
    """Times in ms and TFLOP/s of a row's contestants, and the relative difference of their results from bfloat16's. library: see
    ``why_no_fa3``."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((1, heads, row.tokens, row.head_dim) for heads in (row.heads, row.kv_heads, row.kv_heads))
    q, k, v = (torch.randn(shape, generator=generator, device=device).bfloat16() for shape in shapes)
    mask = row.mask(device)
    pairs = row.tokens**2 if mask is None else round(mask.density * row.tokens**2)
    flops = 4 * pairs * row.heads * row.head_dim
    results: dict[str, dict] = {}
    expected: dict[bool, torch.Tensor] = {}  # by whether blocks were chosen
    contestants = list(list_own_calls(row, q, k, v, mask, changes))
    if peers and row.spec in (None, "causal") and row.density is None:
        causal = row.spec == "causal"
        contestants.append(("FlashAttention-3 fp8", partial(prepare_fa3_fp8, library, q, k, v, causal)))
        contestants.append(("cuDNN fp8", partial(prepare_cudnn_fp8, q, k, v, causal)))
    for name, prepare in contestants:
        try:
            with time_limit(limit), torch.no_grad():
                attend = prepare()
                found = attend()
                timing = time_ms(attend, device, 0.3)
        except (Exception, OverLimit) as error:
            results[name] = {"failed": _failure_reason(error)}
            continue
        result = results[name] = timing.as_result("ms")
        is_chosen = name.startswith("choice")
        if isinstance(found, torch.Tensor):
            if not is_chosen:
                result["tflops"] = flops / timing.median / 1e9
            if found.dtype == torch.bfloat16:
                wanted = expected.setdefault(is_chosen, found.clone())
                result["from_bf16"] = relative_error(found, wanted.double())
            if "ms" in results["bf16"]:
                result["speedup"] = results["bf16"]["ms"] / result["ms"]
        elif isinstance(found, sf.BlockMask):
            result["density"] = found.density
        else:  # bytes read once in 16 bits, keys twice, and written in 8
            result["tb_per_s"] = (3 * q.numel() + 5 * k.numel() + 3 * v.numel()) / timing.median / 1e9
        del found, attend
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {"row": asdict(row), "block_density": 1.0 if mask is None else mask.block_density, "results": results}


def format_result(result: dict) -> str:
    """One line of the table."""
    if "ms" not in result:
        return next(f"{name} {why}" for name, why in result.items())
    text = f"{result['ms']:8.3f} ms"
    for name, form in (
        ("tflops", "6.0f} TFLOP/s"),
        ("speedup", "5.2f}x"),
        ("tb_per_s", "6.2f} TB/s"),
        ("density", "6.3f} density"),
    ):
        if name in result:
            text += f" {{:{form}".format(result[name])
    return text + (f"  differs from bf16 by {result['from_bf16']:.1e}" if "from_bf16" in result else "")


def parse_changes(text: str) -> dict:
    """Fields of ``EightBitConfig`` to change. Raises ValueError for others."""
    from sparse_flash.kernels.hopper.configs import EightBitConfig

    kinds = {field.name: type(getattr(EightBitConfig(1), field.name)) for field in fields(EightBitConfig)}
    found = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in kinds or not value.isdigit():
            raise ValueError(f"a config is FIELD=NUMBER,... of {', '.join(kinds)}; got {part!r}")
        found[name] = kinds[name](int(value))
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], prog="python -m sparse_flash.benchmarks.precision")
    parser.add_argument("--out", type=Path, default=Path("runs/precision"), help="folder (default %(default)s)")
    parser.add_argument("--row", action="append", default=[], metavar="TEXT", help="only rows with this in their name")
    parser.add_argument("--config", action="append", default=[], metavar="FIELD=NUMBER,...", help="see above")
    parser.add_argument("--no-checks", action="store_true", help="leave errors out")
    parser.add_argument("--no-times", action="store_true", help="leave times out")
    parser.add_argument("--no-peers", action="store_true", help="leave other libraries out")
    parser.add_argument("--fa3", metavar="FILE", help="FlashAttention-3's library, where no package brings it")
    parser.add_argument("--limit", type=int, default=60, help="seconds for a contestant of a row (default %(default)s)")
    options = parser.parse_args(arguments)
    try:
        changes = [parse_changes(text) for text in options.config]
    except ValueError as error:
        parser.error(str(error))
    if not torch.cuda.is_available():
        print("it measures on a Hopper GPU; backend='reference' runs the definition anywhere", file=sys.stderr)
        return 1
    device, peers = torch.device("cuda"), not options.no_peers
    data: dict = {"format": 1, "environment": environment(device), "checks": [], "errors": [], "rows": []}
    options.out.mkdir(parents=True, exist_ok=True)

    def keep(part: str, found: dict) -> None:
        data[part].append(found)
        (options.out / "precision.json").write_text(json.dumps(data, indent=1) + "\n")

    if not options.no_checks:
        with torch.no_grad():
            for found in check_calls():
                keep("checks", found)
                print("right" if found["right"] else "WRONG", _short(found), flush=True)
            for kind in STATISTICS:
                try:
                    found = measure_errors(kind, peers, options.fa3)
                except Exception as error:  # what follows may still run
                    found = {"statistics": kind, "failed": failure_text(error)}
                keep("errors", found)
                print(_short(found), flush=True)
    for row in () if options.no_times else ROWS:
        if options.row and not any(text in row.name for text in options.row):
            continue
        try:
            found = measure_row(row, changes, peers, options.fa3, options.limit, device)
        except Exception as error:  # the other rows may still run
            found = {"row": asdict(row), "results": {"all": {"failed": failure_text(error)}}}
        keep("rows", found)
        print(row.name, flush=True)
        for name, result in found["results"].items():
            print(f"  {name:32}{format_result(result)}", flush=True)
    print(options.out)
    return 0 if all(found["right"] for found in data["checks"]) else 1


def _short(found: dict) -> str:
    return "; ".join(f"{name} {value:.2e}" if isinstance(value, float) else f"{name} {value}" for name, value in found.items())


if __name__ == "__main__":
    sys.exit(main())
