"""``fit``: picks a mask for each head of a model, from measurements on a text, and writes them to a file."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import sparse_flash

from .console import error_console, output_console, user_errors


def fit(
    model: Annotated[str, typer.Argument(help="A causal language model of Transformers: a folder, or a name.")],
    text: Annotated[Path, typer.Option(help="A text such as the model's prompts, UTF-8.")],
    budget: Annotated[float, typer.Option(help="The share of the causal blocks that each head, or each layer, keeps.")] = 0.15,
    out: Annotated[Path, typer.Option("--out", "-o", help="The JSON file to write.")] = Path("masks.json"),
    tokens: Annotated[
        int | None,
        typer.Option("--tokens", "-n", min=1, help="Tokens of each part; as many as the text has, up to 8192, by default."),
    ] = None,
    windows: Annotated[int, typer.Option(min=1, help="Parts of the text to measure, one after the other.")] = 1,
    block: Annotated[int, typer.Option(help="Tokens on a side of a block: 64 or 128.")] = 128,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU by default where there is one.")] = None,
    picture: Annotated[Path | None, typer.Option(help="A .png or .svg file: what each head got, and errors by layer.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the files if they exist.")] = False,
) -> None:
    """Fits masks to a model: measures choosers and a window on your text, and picks the best for each head within the budget."""
    with user_errors():
        for path in filter(None, (out, picture)):
            if path.exists() and not force:
                raise ValueError(f"{path} exists; pass --force to replace it, or another path")
        if out.suffix != ".json":
            raise ValueError(f"--out must be a .json file, as use_sparse_flash tells files from specs by that; got {out}")
        content = text.read_text(encoding="utf-8")
        from sparse_flash.tools import draw

        if picture:
            draw.check_path(picture)
        fitting = _import_fit()
        import torch

        from sparse_flash.benchmarks.run import device_type

        fitting.check_budget(budget, block)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if device_type(device) == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device must be one that PyTorch finds here; got {device!r}; pass cpu")
        out.parent.mkdir(parents=True, exist_ok=True)
        loaded, tokenizer = fitting.load(model, device)
        config = loaded.config.get_text_config()
        most = getattr(config, "max_position_embeddings", None)
        ids = fitting.tokenize_windows(tokenizer, content, tokens, windows, block, most)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=error_console(), transient=True, disable=not sys.stderr.isatty()) as progress:
            bar = progress.add_task("measuring layers", total=len(ids) * config.num_hidden_layers)
            fitted = fitting.fit(loaded, ids, budget, block, lambda: progress.advance(bar))
        made_by = {"model": model, "budget": budget, "block": block, "windows": len(ids)}
        fitting.write_fit(out, fitted, ids.shape[1], content, sparse_flash.__version__, **made_by)
        if picture:
            lines = {"fit": [layer.error if layer.candidate_errors else None for layer in fitted.values()]}
            for kind in (fitting.BUDGET, fitting.WINDOW):
                lines[kind] = [layer.candidate_errors.get(kind) for layer in fitted.values()]
            draw.draw_choices([layer.kinds for layer in fitted.values()], lines, picture)
    console = output_console()
    kept = fitting.kept_shares(ids.shape[1], budget, block)
    console.print(_table(fitted, fitting.mean_errors(fitted), kept))
    measured = f"measured on {len(ids)} x {ids.shape[1]} tokens"
    console.print(f"\n{measured}; kept: of the causal blocks at this length; errors are relative L2, means over layers")
    for path in filter(None, (out, picture)):
        console.print(f"wrote {path}", markup=False, soft_wrap=True)
    console.print(f'use_sparse_flash(model, "{out}") reads the masks', markup=False, highlight=False, soft_wrap=True)


def _import_fit():
    try:
        from sparse_flash.integrations.transformers import fit
    except ImportError as error:
        raise ValueError(f"fit needs Transformers: {error}; pip install 'sparse-flash[transformers]'") from None
    return fit


def _table(fitted, mean: dict[str, float], kept: dict[str, float]) -> Table:
    heads = Counter(kind for layer in fitted.values() for kind in layer.kinds)
    best = min((kind for kind in mean if kind != "fit"), key=mean.__getitem__)
    total = sum(heads.values())
    chosen = [kind for kind in kept if heads[kind]]
    of_all = sum(kept[kind] * heads[kind] for kind in chosen) / sum(heads[kind] for kind in chosen)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("kind", "heads", "share", "kept", "error if in all heads", ""):
        table.add_column(name, justify="left" if name in ("kind", "") else "right", no_wrap=True)
    for kind, error in mean.items():
        if kind != "fit":
            count = str(heads[kind]), f"{heads[kind] / total:.0%}"
            table.add_row(kind, *count, f"{kept[kind]:.1%}", f"{error:.4f}", "best of one kind" if kind == best else "")
    if heads["own"]:
        table.add_row("own", str(heads["own"]), f"{heads['own'] / total:.0%}", "", "", "not measured: the model's own windows")
    table.add_row("fit", str(total), "100%", f"{of_all:.1%}", f"{mean['fit']:.4f}", "as written", style="bold")
    return table
