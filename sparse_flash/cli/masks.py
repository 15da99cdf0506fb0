"""``patterns``, ``show``, ``explain`` and ``design``: inspect and find masks before running them."""

from __future__ import annotations

import inspect
import json as json_module
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.columns import Columns
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .console import output_console, stages, user_errors
from .options import BlockSize, KvLen, Spec, dtype_of

if TYPE_CHECKING:
    from sparse_flash.tools.design import Design

_MOST_SHARES = 6  # of a design's reach by layer, in a table
_SMALL = 16  # lines of a small picture, at most


def _q_len_option(default: int) -> Any:
    """The option ``--q-len``. default: the tokens where neither it nor the pattern names any."""
    return typer.Option("--q-len", "-n", help=f"Queries, in tokens; as many as the pattern names, otherwise {default:,}.")


def patterns() -> None:
    """Lists the patterns that a spec may name."""
    from sparse_flash.masks.chooser import list_choosers
    from sparse_flash.masks.registry import find_docstring_line, list_patterns, pattern_class

    rows = []
    for name in list_patterns():
        cls = pattern_class(name)
        arguments = ", ".join(_argument(p) for p in inspect.signature(cls).parameters.values())
        owner = "" if cls.__module__.startswith("sparse_flash.") else cls.__module__
        rows.append((name, find_docstring_line(cls, "use"), _first_sentence(cls), arguments, owner))
    headings = ["name", "for", "keeps", "arguments", *["from"] * any(owner for *_, owner in rows)]  # all are built in, mostly
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, no_wrap=heading == "name", overflow="fold", style="bold cyan" if heading == "name" else "")
    for row in rows:
        table.add_row(*map(Text, row[: len(headings)]))
    output_console().print(table)
    output_console().print(
        "\nCombine them with & | ~ and parentheses. Lengths are tokens; block= is the unit of a pattern in tokens."
    )
    choosers = ", ".join(list_choosers())
    output_console().print(f"Choosers keep blocks by content, as in causal & sampled(8, keep=0.1): {choosers}.", highlight=False)


def _first_sentence(cls: type) -> str:
    paragraph = " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].replace("``", "`").split())
    return paragraph.partition(". ")[0].rstrip(".")


def _argument(parameter: inspect.Parameter) -> str:
    return parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"


def _compile_spec(spec: str, q_len: int | None, kv_len: int | None, block_size: int, default_len: int):
    """(pattern, mask, seconds)."""
    import sparse_flash
    from sparse_flash.masks.fit import named_len
    from sparse_flash.tools.subject import require_one_head

    pattern = require_one_head(sparse_flash.parse(spec))
    q_len = named_len(pattern, default_len) if q_len is None else q_len
    begin = time.perf_counter()
    # Without the compiler's own bar, which cannot be shown inside that of the stages.
    mask = sparse_flash.compile_mask(pattern, q_len, kv_len, block_size, progress=False)
    return pattern, mask, time.perf_counter() - begin


def show(
    spec: Spec,
    q_len: Annotated[int | None, _q_len_option(4096)] = None,
    kv_len: KvLen = None,
    block_size: BlockSize = 128,
    level: Annotated[str, typer.Option(help="tokens, blocks, or auto: tokens where they all fit the picture.")] = "auto",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write a .png or .svg file too, or a .html page to zoom.")] = None,
    query: Annotated[
        tuple[int, int, int] | None,
        typer.Option(metavar="FRAME ROW COLUMN", help="Of a video_layout: the file shows its frames, and what this token sees."),
    ] = None,
) -> None:
    """Draws a mask: queries downwards, keys to the right."""
    from sparse_flash.masks.pattern import layout_of
    from sparse_flash.tools import draw, interactive
    from sparse_flash.tools.paths import FORMATS, PAGE, check_path

    with user_errors():
        if out:
            check_path(out, FORMATS if query else (*FORMATS, PAGE))
        if query and not out:
            raise ValueError("--query must come with --out, the file that shows the frames; add --out frames.png")
    console = output_console()
    colour, unicode = _picture_style(console)
    columns, lines = draw.picture_size()
    half_blocks = colour and unicode
    width, height = (columns, 2 * lines) if half_blocks else (columns // 2, lines)
    # Square cells for square masks; a pipe or a file has no last line to stay above.
    side = min(width, height) if console.is_terminal else width
    with user_errors(), stages("compiling", "counting") as begin:
        begin()
        pattern, mask, _ = _compile_spec(spec, q_len, kv_len, block_size, draw.DEFAULT_LEN)
        if query and (layout := layout_of(pattern)) is None:
            raise ValueError(f"--query must come with a pattern over one video_layout; got {pattern}; leave it out")
        begin()
        picture = draw.make_picture(mask, side, side if mask.q_len == mask.kv_len else width, level)
        density, block_density = mask.density, mask.block_density
    console.print(Text(str(pattern), "bold"), soft_wrap=True)
    console.print(draw.caption(mask, picture) + "\n")
    console.print(draw.render_terminal(picture.shares, colour, unicode), soft_wrap=True, end="")
    console.print(draw.legend(colour, unicode))
    console.print(f"keeps {density:.3%} of the pairs, visits {block_density:.3%} of the blocks of {block_size}")
    if out:
        with user_errors():
            if query:
                try:
                    draw.frames(mask, layout, query, out, title=str(pattern))
                except IndexError as error:
                    raise ValueError(f"--query: {error}") from None
            elif out.suffix.lower() == PAGE:
                interactive.page_of(mask, str(pattern)).save(out)
            else:
                draw.save(mask, out, str(pattern), level)
        console.print(f"wrote {out}", markup=False, soft_wrap=True)


def _picture_style(console: Console) -> tuple[bool, bool]:
    """(whether pictures are coloured, whether they are made of block characters)"""
    from sparse_flash.tools import draw

    # 16 colours cannot show the shares. NO_COLOR drops the colours but leaves the console its color_system.
    return console.color_system in ("256", "truecolor") and not console.no_color, draw.can_draw("▀█▓▒░·")


# The picture in the README: kinds of masks, each at a size that shows its form.
_GALLERY = (
    "causal & local(512)",
    "causal & (sinks(128) | local(384))",
    "longformer(384, tokens=128)",
    "bigbird(density=0.06)",
    "strided(6)",
    "butterfly",
    "causal & power_of_two",
    "causal & documents([0, 900, 2600, 4096])",
)


def gallery(
    specs: Annotated[list[str] | None, typer.Argument(metavar="[SPEC]...", help="Eight kinds of masks by default.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="A .png or .svg file.")] = Path("patterns.png"),
    q_len: Annotated[int | None, _q_len_option(4096)] = None,
    block_size: BlockSize = 128,
) -> None:
    """Draws the blocks of several masks side by side in one file."""
    from sparse_flash.tools import draw

    chosen, compiled = specs or _GALLERY, []
    with user_errors(), stages(*(f"compiling {spec}" for spec in chosen), "drawing") as begin:
        draw.check_path(out)
        for spec in chosen:
            begin()
            compiled.append((spec, _compile_spec(spec, q_len, None, block_size, draw.DEFAULT_LEN)[1]))
        begin()
        draw.gallery(compiled, out)
    output_console().print(f"wrote {out}", markup=False, soft_wrap=True)


def explain(
    spec: Spec,
    q_len: Annotated[int | None, _q_len_option(65536)] = None,
    kv_len: KvLen = None,
    block_size: Annotated[
        int | None, typer.Option("--block-size", help="Tokens on a side of a block: 128 by default, or the chooser's own.")
    ] = None,
    heads: Annotated[int, typer.Option(help="Query heads that share the mask.")] = 8,
    head_dim: Annotated[int, typer.Option("--head-dim", help="Elements of a head.")] = 128,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    kv_heads: Annotated[int | None, typer.Option("--kv-heads", help="Heads of keys and values; --heads by default.")] = None,
    v_head_dim: Annotated[int | None, typer.Option("--v-head-dim", help="Of v and the result; --head-dim by default.")] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32; e4m3 of a cache.")] = "bf16",
    device: Annotated[str | None, typer.Option(help="The GPU of the rough time: h100 or h200.")] = None,
    density: Annotated[
        float | None, typer.Option(help="The share of the blocks, in (0, 1], that a chooser keeps; not with keep=, budget=.")
    ] = None,
) -> None:
    """Prints what a mask costs, what it saves, and what it can see."""
    import sparse_flash
    from sparse_flash.backends import E4M3

    with user_errors(), stages("compiling and counting") as begin:
        call: dict[str, Any] = {"batch": batch, "kv_heads": kv_heads, "v_head_dim": v_head_dim, "q_len": q_len, "kv_len": kv_len}
        call |= {"dtype": E4M3 if dtype == "e4m3" else dtype_of(dtype), "block_size": block_size, "density": density}
        begin()
        found = sparse_flash.explain(sparse_flash.parse(spec), heads, head_dim, **call, device=device)
    console = output_console()
    console.print(Text(found.head[0], "bold"), soft_wrap=True)
    console.print(f"{found.head[1]}\n")
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, line in found.lines.items():
        table.add_row(name, line)
    console.print(table)
    for hint in found.hints:
        console.print(Text("hint: ", "bold yellow") + Text(hint, "default"))


def design(
    q_len: Annotated[int, typer.Option("--q-len", "-n", help="Tokens of the sequence.")] = 65536,
    budget: Annotated[
        str, typer.Option(help="The share of the causal pairs that a mask may keep, or of the time, such as 10%.")
    ] = "10%",
    of: Annotated[
        str, typer.Option(help="What the budget is a share of: pairs, or time, dense attention's as predicted.")
    ] = "pairs",
    connected_in: Annotated[
        int | None,
        typer.Option("--connected-in", help="Layers after which every query must have received from every earlier token."),
    ] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads of the model, which may then differ.")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of the model, of which the first may then be dense.")] = None,
    keep: Annotated[str | None, typer.Option(metavar="SPEC", help="What every head keeps, such as 'local(512)'.")] = None,
    causal: Annotated[bool, typer.Option("--causal/--all-pairs", help="Whether queries see earlier tokens alone.")] = True,
    block_size: BlockSize = 128,
    count: Annotated[int, typer.Option(help="How many designs at most.")] = 5,
    json: Annotated[bool, typer.Option("--json", help="Print the designs as JSON, with the spec text of each layer.")] = False,
) -> None:
    """Finds masks within a budget of pairs, or of time, that connect all tokens in few layers."""
    from sparse_flash.tools.design import design as find_designs
    from sparse_flash.tools.figures import share_text

    with user_errors():
        # fmt: off
        found = find_designs(q_len, budget, of=of, connected_in=connected_in, heads=heads, layers=layers, keep=keep,
                             causal=causal, block_size=block_size, count=count, progress=sys.stderr.isatty())
        # fmt: on
    console = output_console()
    if json:
        fields = ("layers", "kept_pairs", "density", "time", "connected_in", "reach", "unit", "q_len", "block_size")
        print(json_module.dumps([{name: getattr(one, name) for name in fields} for one in found], indent=2))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("", "keeps", "takes", "connected in", "reach by layer", "mask"):
        table.add_column(heading, justify="left" if heading == "mask" else "right", overflow="fold")
    for number, one in enumerate(found, 1):
        reach = " ".join(map(share_text, one.reach[:_MOST_SHARES])) + " ..." * (len(one.reach) > _MOST_SHARES)
        connected = f"{one.connected_in} layer{'s' * (one.connected_in > 1)}" if one.connected_in else "not seen"
        table.add_row(str(number), f"{one.density:.2%}", f"{one.time:.1%}", connected, reach, Text(one.summary))
    console.print(table)
    pairs = "causal pairs" if causal else "pairs"
    at_least = f", in units of {one.unit} tokens, so at least" if one.unit > 1 else ""
    of_what = f"of the {pairs} and of dense attention's predicted time, mean over heads and layers"
    console.print(f"\n{q_len:,} tokens; shares: {of_what}; reach: by positions{at_least}")
    _print_pictures(console, found)


def _print_pictures(console: Console, found: Sequence[Design]) -> None:
    """A small picture of each pattern of each design."""
    import sparse_flash
    from sparse_flash.tools import draw

    colour, unicode = _picture_style(console)
    side = _SMALL * (1 + (colour and unicode))
    for number, one in enumerate(found, 1):
        pictures = []
        for head in dict.fromkeys(head for layer in one.patterns for head in getattr(layer, "patterns", (layer,))):
            mask = sparse_flash.compile_mask(head, one.q_len, block_size=one.block_size, progress=False)
            pictures.append(draw.render_terminal(draw.make_picture(mask, side, side).shares, colour, unicode).append(str(head)))
        console.print(Text(f"\n{number}", "bold"))
        console.print(Columns(pictures, padding=(0, 3)))
    console.print(draw.legend(colour, unicode))
