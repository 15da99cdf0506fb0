"""What one call costs: microseconds on the host, until it returns, and on the GPU, in a CUDA graph; and how many times as long
PyTorch's own call takes the host, timed right before it. The first quartile, as other programs on the host only lengthen times.

    python -m sparse_flash.benchmarks.calls [--tokens 1024 16384] [--device cpu]

Rows are calls as a model's layer makes them, with and without gradients; only those without are timed in a graph, too. Packed
documents have 273 tokens on average.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

import sparse_flash as sf

from .measure.noise import time_calls_us
from .program import RowFile, add_device, create_parser
from .results import environment

Call = Callable[[], Any]  # returns a tensor


def calls_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, tuple[Call, tuple[torch.Tensor, ...]]]:
    """Returns the measured calls, and what they differentiate by, by name. q, k, v: (1, heads, tokens, head_dim)."""
    tokens, device = q.shape[2], q.device
    window = sf.compile_mask("causal & local(256)", tokens, device=device)
    sinks, lens = torch.zeros(q.shape[1], device=device), torch.tensor([tokens - 10], device=device, dtype=torch.int32)
    slopes = torch.full((q.shape[1],), 0.1, device=device)
    generator = torch.Generator().manual_seed(0)
    inner = torch.randperm(tokens - 1, generator=generator)[: max(1, tokens // 273) - 1].sort().values + 1
    bounds = torch.cat([torch.tensor([0]), inner, torch.tensor([tokens])]).to(device=device, dtype=torch.int32)
    longest = int(bounds.diff().max())
    packed = rows, keys, values = tuple(t[0].transpose(0, 1).detach().requires_grad_() for t in (q, k, v))
    last = q[:, :, -1:].detach()
    calls: dict[str, Call] = {
        "PyTorch's, causal": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        "dense": lambda: sf.attention(q, k, v),
        "a BlockMask": lambda: sf.attention(q, k, v, window),
        "spec text": lambda: sf.attention(q, k, v, "causal & local(256)"),
        "sinks": lambda: sf.attention(q, k, v, window, sinks=sinks),
        "soft cap": lambda: sf.attention(q, k, v, window, softcap=20.0),
        "ALiBi": lambda: sf.attention(q, k, v, window, alibi_slopes=slopes),
        "lengths": lambda: sf.attention(q, k, v, window, kv_lens=lens),
        "packed documents": lambda: sf.attention_varlen(rows, keys, values, bounds, mask="causal", max_seqlen_q=longest),
        "a chooser": lambda: sf.attention(q, k, v, "causal & sampled(16, mass=0.9, block=64)"),
        "chosen blocks": lambda: sf.attention(q, k, v, sf.topk_blocks(q, k, 4, block_size=64, within="causal")),
        "one query of a cache": lambda: sf.attention_decode(last, k.detach(), v.detach()),
    }
    return {name: (call, packed if name == "packed documents" else (q, k, v)) for name, call in calls.items()}


def measure(call: Call, leaves: tuple[torch.Tensor, ...], gradients: bool, seconds: float) -> dict[str, float]:
    """Returns host_us, and each_us of calls without a pause; without gradients, on a GPU, also graph_us. gradients: both passes."""

    def run() -> object:
        out = call()
        return torch.autograd.grad(out, leaves, torch.ones_like(out)) if gradients else out

    with nullcontext() if gradients else torch.no_grad():
        each, host = time_calls_us(run, leaves[0].device, seconds)
        figures = {"host_us": host.low, "each_us": each.low}
        if leaves[0].is_cuda and not gradients:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            figures["graph_us"] = time_calls_us(graph.replay, leaves[0].device, seconds)[0].median
    return figures


def main(arguments: list[str] | None = None) -> None:
    parser = create_parser("calls", __doc__)
    add_device(parser)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024], help="lengths (default %(default)s)")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=0.3, help="of each figure (default %(default)s)")
    options = parser.parse_args(arguments)
    dtype = torch.bfloat16 if options.device.type == "cuda" else torch.float32
    file = RowFile(options.out / "calls.json", {"environment": environment(options.device)}, "rows")
    for tokens in options.tokens:
        size = 1, options.heads, tokens, options.head_dim
        calls = calls_of(*(torch.randn(size, device=options.device, dtype=dtype, requires_grad=True) for _ in range(3)))
        for name, (call, by) in calls.items():
            for gradients in (False, True)[: 1 if name == "one query of a cache" else 2]:
                of_pytorch = measure(*calls["PyTorch's, causal"], gradients, options.seconds)["host_us"]
                figures = measure(call, by, gradients, options.seconds)
                figures["host_over_pytorch"] = figures["host_us"] / of_pytorch
                row = {"call": name, "tokens": tokens, "heads": size[1], "head_dim": size[3], "gradients": gradients, **figures}
                texts = [f"{key.removesuffix('_us')} {value:.0f} us" for key, value in figures.items() if key.endswith("_us")]
                texts.append(f"host {figures['host_over_pytorch']:.2f} x PyTorch's")
                file.add("rows", row, f"{tokens:>6} {name:20} {'both' if gradients else 'forward'}", *texts)


if __name__ == "__main__":
    main()
