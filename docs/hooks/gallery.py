"""Writes the gallery of patterns in place of a page's list, between `<!-- gallery -->` and its end: pictures, formulas, sources and
figures, all from the code."""

import inspect
import io
import re
import sys

from docstrings import as_markdown
from matplotlib.image import imsave
from mkdocs.structure.files import File

import sparse_flash as sf
from sparse_flash import patterns
from sparse_flash.masks.registry import find_docstring_line
from sparse_flash.tools import draw
from sparse_flash.tools.explain import explain, share_text

PLACE = re.compile("<!-- gallery -->.*<!-- end of gallery -->", re.S)
TOKENS, BLOCK = 4096, 64
LAYERS = (1, 2, 4, 8)


def on_files(files, config):
    for name in patterns.__all__:
        files.append(File.generated(config, _picture(name), content=_thumbnail(_mask(name))))
    return files


def on_page_markdown(markdown, page, config, files):
    if not PLACE.search(markdown):
        return markdown
    overview = "\n".join(f"- [![]({_picture(name)})<br>`{name}`](#{name})" for name in patterns.__all__)
    head = f'<div class="gallery" markdown>\n\n{overview}\n\n</div>'
    written = "\n\n".join([head, *map(_section, patterns.__all__)])
    return PLACE.sub(lambda place: written, markdown)


def _mask(name: str, causal: bool = False) -> sf.BlockMask:
    pattern = eval(_specimen(name), vars(patterns))
    if causal:
        pattern = sf.causal() & pattern
    return sf.compile_mask(pattern, TOKENS, block_size=BLOCK)


def _thumbnail(mask: sf.BlockMask) -> bytes:
    """A PNG of the mask's cells, one pixel each."""
    image = io.BytesIO()
    imsave(image, draw.rgb_of(draw.make_picture(mask, 64, 64).shares), format="png")
    return image.getvalue()


def _specimen(name: str) -> str:
    """How a built-in pattern is shown, at a size where its form is seen."""
    return find_docstring_line(getattr(patterns, name), "specimen")


def _picture(name: str) -> str:
    return f"images/patterns/{name}.png"


def _section(name: str) -> str:
    cls = getattr(patterns, name)
    module = inspect.getdoc(sys.modules[cls.__module__])
    summary = module.partition("\n")[0].partition(": ")[2]
    formula, _, condition = find_docstring_line(cls, "formula").partition(", with ")
    lines = [f"**Use**: {find_docstring_line(cls, 'use')}", f"**Formula**: `{formula}`{condition and f', with `{condition}`'}"]
    if source := find_docstring_line(cls, "source"):
        source = re.sub(r"arXiv:(\d+\.\d+)", r"[arXiv:\1](https://arxiv.org/abs/\1)", source)
        lines.append(f"**Source**: {source}")
    mask, causal, below = _mask(name), _mask("causal"), _mask(name, causal=True)
    rows = [_row(f"`{name}`", mask)]
    if not (below.equal(mask) or below.equal(causal)):
        rows.append(_row(f"`causal & {name}`", below))
    layers = " / ".join(map(str, LAYERS))
    head = f"| | keeps of the pairs | visits of the blocks | reach after {layers} layers |\n|---|---|---|---|"
    arguments = ", ".join(_argument(parameter) for parameter in inspect.signature(cls).parameters.values())
    return "\n\n".join(
        [
            f"## {name} {{ #{name} }}",
            f"![{name}]({_picture(name)}){{ .mask }}",
            f"`{name}({arguments})`: {summary}",
            *lines,
            f"Shown: `{_specimen(name)}`",
            "\n".join([head, *rows]),
            as_markdown(inspect.getdoc(cls), set(inspect.signature(cls).parameters)),
        ]
    )


def _argument(parameter: inspect.Parameter) -> str:
    return parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"


def _row(title: str, mask: sf.BlockMask) -> str:
    e = explain(mask)
    reached = " / ".join(share_text(e.reach.shares.get(layers, e.reach.limit)) for layers in LAYERS)
    return f"| {title} | {e.density:.1%} | {e.block_density:.1%} | {reached} |"
