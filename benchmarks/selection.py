"""Attention over key blocks that each query picked, beside a library that trains it, and dense attention.

    python -m sparse_flash.benchmarks.selection --out runs/selection
    python -m sparse_flash.benchmarks.selection --heads 64 4 --block 64 --alike 0.8 --peer sparse_flash
    python -m sparse_flash.benchmarks.selection --indexer --heads 64 4 --block 128 --tokens 65536 --tokens 262144 --limit 300

Picks are random: a query keeps each pick of the query before with probability ``--alike``, else draws another, and always keeps
its own block. docs/performance/selection.md compares times of drawn picks and of a trained model's. Times include tables of picks.
With ``--indexer``, random vectors choose, as in MiniMax-M3: a query vector for each key head, one key vector for all, and the
largest product with a key of a block. ``choose_ms`` is the time of the choice.
Each result is compared with float64 attention at sampled queries, gradients too. TFLOP/s count kept pairs: 4 x pairs x head_dim x
heads, backward 2.5 times that. Writes selection.json.
"""

import sys
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product

import torch

from sparse_flash import BlockSelection, topk_blocks

from .baselines.selection import DENSE, PEERS, SelectionProblem
from .measure.throughput import DTYPES, Prepared, measure, time_ms, try_measuring
from .program import RowFile, Table, add_device, create_parser, print_tables
from .results import environment, has_numbers, why_not
from .workload.cases import OURS, Case, Shape
from .workload.masks import CAUSAL
from .workload.problem import build_problem

HEADS = ((32, 8), (64, 4))
BLOCKS = (128, 64)
ALIKE = (0.0, 0.8)
_CPU_SECONDS = 0.3


@dataclass(frozen=True)
class PicksCase:
    """alike: the probability that a query keeps a pick of the query before; None: an indexer chooses."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    picks: int
    alike: float | None

    @property
    def name(self) -> str:
        alike = "by an indexer" if self.alike is None else f"{self.alike:.0%} alike" if self.alike else "independent"
        return f"{self.heads}/{self.kv_heads} {self.picks} of {self.block_size} {alike}, {self.tokens} tokens"


def choose(case: PicksCase, device: torch.device, dtype: torch.dtype) -> tuple[BlockSelection, dict[str, float]]:
    """A case's picks, and the time that an indexer took, {} if there is none."""
    if case.alike is not None:
        return BlockSelection.from_picks(draw_picks(case, device), case.block_size), {}
    generator = torch.Generator(device).manual_seed(0)
    q, k = (torch.randn(1, n, case.tokens, 128, generator=generator, device=device, dtype=dtype) for n in (case.kv_heads, 1))
    by_product = partial(topk_blocks, q, k, case.picks, every=1, block_size=case.block_size, score="max")
    return by_product(), time_ms(by_product, device, _CPU_SECONDS).as_result("choose_ms")


def draw_picks(case: PicksCase, device: torch.device) -> torch.Tensor:
    """(1, kv_heads, tokens, picks) int32, -1 for none: own blocks, and earlier ones that change from query to query."""
    assert case.alike is not None
    generator = torch.Generator(device).manual_seed(0)
    query = torch.arange(case.tokens, device=device)[:, None]
    own, few = query // case.block_size, torch.arange(case.picks - 1, device=device)
    heads = []
    for _ in range(case.kv_heads):
        # A query that can pick every earlier block does; the first of a block draws as soon as it has a choice.
        every = own < case.picks
        is_new = torch.rand((case.tokens, case.picks - 1), generator=generator, device=device) >= case.alike
        is_new |= every & (query % case.block_size == 0)
        is_new[0] = True
        since = torch.where(is_new, query, 0).cummax(0).values
        chosen = (torch.rand((case.tokens, case.picks - 1), generator=generator, device=device) * own).gather(0, since).int()
        chosen = torch.where(every, few.int(), chosen)
        heads.append(torch.cat([torch.where(chosen < own, chosen, -1), own.int()], 1))
    return torch.stack(heads)[None]


def kept_pairs(case: PicksCase, selection: BlockSelection) -> int:
    """Over query heads."""
    return sum(selection.kept_pairs(head) for head in range(case.kv_heads)) * (case.heads // case.kv_heads)


def run(case: PicksCase, names: list[str], device: torch.device, dtype: torch.dtype, limit: int | None = None) -> dict:
    """A case as plain data: {"case", "name", "tflop", "results": {peer: result}} and, of an indexer, "choose_ms".
    limit: seconds for a peer."""
    selection, found = choose(case, device, dtype)
    flops = 4 * kept_pairs(case, selection) * case.head_dim
    shape = Shape(1, case.heads, case.tokens, case.head_dim, case.kv_heads)
    problem = SelectionProblem(**vars(build_problem(Case(shape, CAUSAL, OURS), device, dtype)), selection=selection)

    def measure_peer(name: str) -> dict:
        of_passes = (flops, 5 * flops // 2) if name not in DENSE else ()  # whose pairs and results are others
        return measure(Prepared(PEERS[name], problem), _CPU_SECONDS, of_passes, checked=name not in DENSE)

    results = {name: try_measuring(partial(measure_peer, name), limit) for name in names}
    return {"case": asdict(case), "name": case.name, "tflop": flops / 1e12, "results": results} | found


def format_result(result: dict) -> str:
    """One cell of the table: forward / backward ms and TFLOP/s, or why there are none."""
    if "forward_ms" not in result:
        return next(iter(result))
    text = f"{result['forward_ms']:.2f} / {result['backward_ms']:.2f}"
    if "forward_tflops" in result:
        text += f" ({result['forward_tflops']:.0f} / {result['backward_tflops']:.0f})"
    return text if result.get("correct", True) else f"{text} wrong"


def main(arguments: list[str] | None = None) -> int:
    parser = create_parser("selection", __doc__)
    parser.add_argument("--tokens", type=int, action="append", help="(default 65536)")
    parser.add_argument("--heads", type=int, nargs=2, action="append", metavar=("HEADS", "KV_HEADS"), help="(default 32 8, 64 4)")
    parser.add_argument("--head-dim", type=int, default=128, help="(default %(default)s)")
    parser.add_argument("--block", type=int, action="append", help="tokens of a picked block (default 128, 64)")
    parser.add_argument("--picks", type=int, default=16, help="blocks of a query, its own included (default %(default)s)")
    parser.add_argument("--alike", type=float, action="append", help="see above, 0 to 1 (default 0, 0.8)")
    parser.add_argument("--indexer", action="store_true", help="an indexer chooses, see above")
    parser.add_argument("--peer", action="append", choices=PEERS, help="(default: all)")
    parser.add_argument("--limit", type=int, default=120, help="seconds for a peer and a case (default %(default)s)")
    add_device(parser)
    options = parser.parse_args(arguments)
    device, dtype, names = options.device, DTYPES[options.device.type], options.peer or list(PEERS)
    kinds = [None] if options.indexer else options.alike or ALIKE
    sizes = product(options.tokens or [65_536], options.heads or HEADS, options.block or BLOCKS, kinds)
    cases = [PicksCase(n, q, kv, options.head_dim, block, options.picks, alike) for n, (q, kv), block, alike in sizes]
    facts = {"environment": environment(device), "dtype": str(dtype).removeprefix("torch.")}
    file = RowFile(options.out / "selection.json", facts, "cases")
    table = Table("picks", *names, "choice, ms", title="forward / backward, ms (TFLOP/s)")
    for case in cases:
        found = run(case, names, device, dtype, options.limit)
        cells = [format_result(found["results"][name]) for name in names]
        table.add_row(case.name, *cells, f"{found['choose_ms']:.2f}" if "choose_ms" in found else "")
        file.add("cases", found, case.name, *(f"{name} {cell}" for name, cell in zip(names, cells, strict=True)))
        for name, result in found["results"].items():
            if not has_numbers(result):
                print(f"  {name}: {why_not(result)}", file=sys.stderr, flush=True)
    print_tables(table, folder=options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
