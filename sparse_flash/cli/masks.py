"""``patterns``, ``show``, ``gallery`` and ``explain``: inspect masks before running them."""

from __future__ import annotations

import inspect
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .console import output_console, stages, user_errors
from .options import BlockSize, KvLen, Spec, dtype_of


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
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Memory for gradients that repeat bit for bit.")] = False,
    device: Annotated[
        str | None, typer.Option(help="The GPU whose time is predicted, such as h100 or h200; the current one by default.")
    ] = None,
    density: Annotated[
        float | None, typer.Option(help="The share of the blocks, in (0, 1], that a chooser keeps; not with keep=, budget=.")
    ] = None,
    page_size: Annotated[
        int | None, typer.Option("--page-size", help="Tokens of a page of the cache, a power of two, for up to 64 queries.")
    ] = None,
) -> None:
    """Prints what a mask costs, what it saves, and what it can see."""
    import sparse_flash
    from sparse_flash.backends import E4M3
    from sparse_flash.masks.chooser import has_choosers
    from sparse_flash.tools.explain import DEFAULT_LEN, Explanation
    from sparse_flash.tools.explain import explain as explain_mask
    from sparse_flash.tools.explain_video import explain_video
    from sparse_flash.tools.figures import size_text

    with user_errors(), stages("compiling", "counting") as begin:
        of_dtype = E4M3 if dtype == "e4m3" else dtype_of(dtype)
        call: dict[str, Any] = {"batch": batch, "kv_heads": kv_heads, "v_head_dim": v_head_dim, "dtype": of_dtype}
        call |= {"deterministic": deterministic, "device": device, "density": density, "page_size": page_size}
        begin()
        if has_choosers(spec):
            figures = explain_mask(spec, heads, head_dim, **call, q_len=q_len, kv_len=kv_len, block_size=block_size)
            pattern, compiled = sparse_flash.parse(spec), ""
        else:
            pattern, mask, seconds = _compile_spec(spec, q_len, kv_len, 128 if block_size is None else block_size, DEFAULT_LEN)
            compiled = f", compiled in {seconds:.3f} s"
            begin()
            figures = explain_mask(mask, heads, head_dim, **call)
            assert isinstance(figures, Explanation)  # of a mask
            figures = replace(figures, video=explain_video(pattern, mask))
    console = output_console()
    console.print(Text(str(pattern), "bold"), soft_wrap=True)
    console.print(f"{figures.call}\n")
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    table_line = size_text(figures.table_bytes) + compiled
    for name, line in (figures.lines() | {"table": table_line}).items():
        table.add_row(name, line)
    console.print(table)
    for hint in figures.hints:
        console.print(Text("hint: ", "bold yellow") + Text(hint, "default"))
