"""``patterns``, ``show``, ``gallery`` and ``explain``: inspect masks before running them."""

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from .options import BlockSize, Imports, KvLen, QLen, Spec, dtype_of, output_console, user_errors


def patterns(imports: Imports = None) -> None:
    """Lists the patterns that a spec may name."""
    from sparse_flash.masks.chooser import list_choosers
    from sparse_flash.masks.registry import find_docstring_line, list_patterns, pattern_class

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("name", "for", "keeps", "arguments"):
        table.add_column(heading, no_wrap=heading == "name", overflow="fold", style="bold cyan" if heading == "name" else "")
    for name in list_patterns():
        cls = pattern_class(name)
        arguments = ", ".join(str(p.replace(annotation=p.empty)) for p in inspect.signature(cls).parameters.values())
        paragraph = " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].replace("``", "`").split())
        keeps = paragraph.partition(". ")[0].rstrip(".")
        table.add_row(*map(Text, (name, find_docstring_line(cls, "use"), keeps, arguments)))
    console = output_console()
    console.print(table)
    console.print("\nCombine them with & | ~ and parentheses. Lengths are tokens; block= is the unit of a pattern in tokens.")
    console.print(f"Choosers keep blocks by content, as in causal & sampled(8, keep=0.1): {', '.join(list_choosers())}.")


def show(
    spec: Spec,
    q_len: QLen = None,
    kv_len: KvLen = None,
    block_size: BlockSize = 128,
    level: Annotated[str, typer.Option(help="tokens, blocks, or auto: tokens if all fit.")] = "auto",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write a .png or .svg file too.")] = None,
    imports: Imports = None,
) -> None:
    """Draws a mask: queries downwards, keys to the right."""
    from sparse_flash.tools import draw

    console = output_console()
    with user_errors():
        drawing = draw.draw(spec, out, q_len=q_len, kv_len=kv_len, block_size=block_size, level=level)
        text = Text(str(drawing), no_wrap=True)
        for signs, style in ((draw.SIGNS[:1], "bright_black"), (draw.SIGNS[1:4], "yellow"), (draw.SIGNS[4:], "blue")):
            text.highlight_regex(f"[{signs}]+", style)
        console.print(text, soft_wrap=True)
    if out:
        console.print(f"wrote {out}", markup=False, soft_wrap=True)


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
    q_len: QLen = None,
    block_size: BlockSize = 128,
    imports: Imports = None,
) -> None:
    """Draws the blocks of several masks side by side in one file."""
    from sparse_flash.tools import draw

    with user_errors():
        draw.gallery([draw.draw(spec, q_len=q_len, block_size=block_size) for spec in specs or _GALLERY], out)
    output_console().print(f"wrote {out}", markup=False, soft_wrap=True)


def explain(
    spec: Spec,
    q_len: QLen = None,
    kv_len: KvLen = None,
    block_size: BlockSize = 128,
    heads: Annotated[int, typer.Option(help="Query heads that share the mask.")] = 8,
    head_dim: Annotated[int, typer.Option("--head-dim", help="Elements of a head.")] = 128,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    kv_heads: Annotated[int | None, typer.Option("--kv-heads", help="Heads of keys and values; --heads by default.")] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32; e4m3 of a cache.")] = "bf16",
    imports: Imports = None,
) -> None:
    """Prints what a mask costs, what it saves, and what it can see."""
    import sparse_flash
    from sparse_flash.core.caches import E4M3

    with user_errors():
        sizes: dict[str, Any] = {"batch": batch, "kv_heads": kv_heads, "q_len": q_len, "kv_len": kv_len}
        sizes |= {"dtype": E4M3 if dtype == "e4m3" else dtype_of(dtype), "block_size": block_size}
        found = sparse_flash.explain(spec, heads, head_dim, **sizes)
    output_console().print(str(found), markup=False, soft_wrap=True)
