"""Trains decoders, dense or sparse, and evaluates, exports and compares them.

\b
python -m examples.train_lm train --preset 150M --mask "causal & (local(1024) | power_of_two(block=128))"
torchrun --nproc-per-node 4 -m examples.train_lm train --preset 1B --parallel fsdp --length 65536
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table
from tokenizers import Tokenizer

from . import checkpoint, data, memory, parallel, report
from .evaluate import by_position, load_decoder, losses
from .report import console
from .settings import PRESETS, Parallel, Settings, check_settings, every_nth_dense
from .settings import preset as preset_of
from .train import NotFinite, Run

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, rich_markup_mode=None)
SPARSE = "causal & (local(1024) | power_of_two(block=128))"

Out = Annotated[Path, typer.Option(help="Folder of the run: checkpoints, logs, plot.")]
Data = Annotated[Path, typer.Option("--data", help="Folder of prepared tokens; train makes it if it is missing.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto takes a GPU if there is one.")]


@contextmanager
def user_errors() -> Iterator[None]:
    """Ends the program with the sentence of an error of input."""
    try:
        yield
    except (ValueError, OSError, NotFinite) as error:
        console.print(f"error: {error}", style="bold red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from error


def _parallel(name: str) -> Parallel:
    if name not in ("ddp", "fsdp"):
        raise ValueError(f"--parallel must be ddp or fsdp; got {name!r}")
    return name  # type: ignore[return-value]


@app.command()
def train(
    preset: Annotated[str, typer.Option(help=f"The model: {', '.join(PRESETS)}.")] = "30M",
    mask: Annotated[
        list[str] | None,
        typer.Option(help="Spec text, or topk_blocks(16, block=128); several are given to the layers in turn. sdpa: PyTorch's."),
    ] = None,
    dense_every: Annotated[int, typer.Option(min=0, help="4: every fourth layer is dense; 0: none.")] = 0,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 65_536,
    step_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a step over all GPUs. [the length, at least 65,536]")
    ] = None,
    micro_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens that a GPU, or the GPUs of a sequence, compute at a time. [a step's share]"),
    ] = None,
    chunk: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the pieces in which text is shuffled. [the length, at least 65,536]")
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 0,
    minutes: Annotated[float, typer.Option(help="Instead of steps: their number follows from 50 timed steps.")] = 0.0,
    warmup: Annotated[int, typer.Option(min=0, help="Steps until the learning rate is at its peak.")] = 100,
    learning_rate: Annotated[float, typer.Option(help="Its peak.")] = 1e-3,
    extend_to: Annotated[int, typer.Option(help="Tokens of a sequence from step --extend-at on.")] = 0,
    extend_at: Annotated[int, typer.Option(help="The step at which sequences become longer.")] = 0,
    log_length: Annotated[
        bool, typer.Option("--log-length", help="Scores grow with the log of the keys: arXiv:2501.19399.")
    ] = False,
    vocabulary: Annotated[int | None, typer.Option(min=1, help="Tokens that the model knows. [the preset's]")] = None,
    packed: Annotated[bool, typer.Option("--packed", help="Documents do not see each other.")] = False,
    recompute: Annotated[str, typer.Option(help="Activations computed again: none, selective or full.")] = "none",
    offload: Annotated[int, typer.Option(help="With --recompute full: how many blocks keep their input in the host's memory.")] = 0,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="torch.compile, by block.")] = True,
    sharding: Annotated[str, typer.Option("--parallel", help="Under torchrun: ddp or fsdp.")] = "ddp",
    context: Annotated[int, typer.Option(help="Under torchrun: how many GPUs share a sequence.")] = 1,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="A killed run resumes bit for bit.")] = False,
    seed: Annotated[int, typer.Option(help="Of the weights and of the order of the text.")] = 0,
    text: Annotated[Path | None, typer.Option(help="A folder of text. [source text of installed packages]")] = None,
    packages: Annotated[Path | None, typer.Option(help="Packages that pip install --target put in a folder.")] = None,
    held_out: Annotated[float, typer.Option(help="Share of the text that is held out.")] = 0.05,
    tokens: Annotated[Path | None, typer.Option(help="A .npy file of token numbers.")] = None,
    most_bytes: Annotated[int | None, typer.Option(min=1, help="Read no more text than this.")] = None,
    folder: Data = Path("runs/train_lm/data"),
    out: Out = Path("runs/train_lm/run"),
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 500,
    evaluate_every: Annotated[int, typer.Option(min=1, help="Steps between evaluations.")] = 250,
    windows: Annotated[int, typer.Option(min=1, help="Held-out sequences of an evaluation.")] = 16,
    start: Annotated[
        Path | None, typer.Option(help="A run or checkpoint whose parameters are the first: from dense to sparse.")
    ] = None,
    device: Device = "auto",
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over; without it, go on from OUT's last checkpoint.")] = False,
) -> None:
    """Train a decoder, dense or sparse, on one GPU or, under torchrun, on several."""
    options = locals()
    with user_errors(), parallel.join_world(device, context) as world:
        kind = _parallel(sharding)
        shape = preset_of(preset)
        shape = replace(shape, vocabulary=vocabulary or shape.vocabulary)
        masks = tuple(mask or [SPARSE])
        if dense_every and len(masks) > 1:
            raise ValueError("--dense-every goes with one --mask; with several, write the dense ones among them: --mask causal")
        longest = max(length, extend_to)
        step_tokens = step_tokens or max(65_536, longest)
        same_names = {field.name: options[field.name] for field in fields(Settings) if field.name in options}
        changed = {
            "shape": shape,
            "masks": every_nth_dense(masks[0], dense_every) if dense_every else masks,
            "step_tokens": step_tokens,
            "micro_tokens": micro_tokens or max(longest, step_tokens // world.replicas),
            "chunk": chunk or max(65_536, longest),
        }
        settings = check_settings(Settings(**same_names | changed), world.size)
        said = memory.check(settings, world, kind)
        with world.first_goes_first():
            if tokens is not None:
                if not (folder / "manifest.json").exists():
                    data.import_tokens(folder, tokens, shape.vocabulary)
            else:
                quiet = not world.is_first
                data.prepare(folder, shape.vocabulary, text, most_bytes, quiet, packages, held_out)
        run = Run(settings, out, folder, world, kind, fresh, start and checkpoint.resolve_checkpoint(start))
        if world.is_first:
            out.mkdir(parents=True, exist_ok=True)
            _introduce(run, said)
        finished = run.train(save_every, evaluate_every, windows)
        if world.is_first:
            console.print(f"{checkpoint.latest(out)}; plot {out / 'loss.png'}", soft_wrap=True, markup=False)
            if not finished:
                console.print("stopped early; the same command goes on from here")
        if not finished:
            raise typer.Exit(130)


def _introduce(run: Run, memory_line: str) -> None:
    settings, stream = run.settings, run.stream
    pairs = memory.kept_pairs(settings, settings.length) / (settings.length * (settings.length + 1) / 2)
    masks = ", ".join(settings.masks)
    console.print(f"{settings.shape.parameters / 1e6:.1f}M parameters; {masks}: {pairs:.1%} of causal pairs", markup=False)
    length = settings.last_length
    far = stream.tokens.far_share(length)
    epochs = f" ({settings.steps * settings.step_tokens / stream.epoch_tokens:.2f} epochs)" if settings.steps else ""
    console.print(
        f"{len(stream.tokens):,} training tokens{epochs}, "
        f"{len(run.held_out):,} held out; in sequences of {length:,}, {far:.0%} of tokens have text of their own package "
        f"more than {data.FAR:,} tokens back"
    )
    console.print(memory_line)
    if run.resumed:
        console.print(f"going on from {run.resumed} (--fresh starts over)", soft_wrap=True, markup=False)


@app.command()
def compare(
    out: Out = Path("runs/train_lm/compare"),
    mask: Annotated[str, typer.Option(help="The sparse arm's.")] = "causal & (local(128) | power_of_two(block=32))",
    preset: Annotated[str, typer.Option(help=f"The model: {', '.join(PRESETS)}.")] = "tiny",
    length: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 1024,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each arm.")] = 150,
    most_bytes: Annotated[int, typer.Option(min=1, help="Bytes of text to read.")] = 6 << 20,
    device: Device = "auto",
) -> None:
    """Train dense and sparse, one after the other, on the same tokens: does everything work here?"""
    with user_errors(), parallel.join_world(device) as world:
        shape = preset_of(preset)
        folder = out / "data"
        table = Table(
            title=f"{shape.parameters / 1e6:.1f}M parameters, {steps} steps of {2 * length:,} tokens, sequences of {length:,}"
        )
        for heading in ("attention", "held-out loss", "tokens/s", "of causal pairs"):
            table.add_column(heading, justify="left" if heading == "attention" else "right")
        base = Settings(shape, ("causal",), length, 2 * length, 2 * length, length, steps, warmup=steps // 10, learning_rate=4e-3)
        base = replace(base, compiled=world.device.type == "cuda")
        # Both are checked before one is trained.
        arms = {name: check_settings(replace(base, masks=(one,))) for name, one in (("dense", "causal"), ("sparse", mask))}
        data.prepare(folder, shape.vocabulary, None, most_bytes)
        runs = {}
        for name, settings in arms.items():
            runs[name] = out / name
            run = Run(settings, runs[name], folder, world, fresh=True)
            runs[name].mkdir(parents=True, exist_ok=True)
            run.train(save_every=steps, evaluate_every=max(1, steps // 5), windows=8)
            nats = float(report.read(runs[name] / "evaluations.csv")[-1]["loss"])
            pairs = memory.kept_pairs(settings, length) / (length * (length + 1) / 2)
            table.add_row(
                f"{name}: {settings.masks[0]}",
                f"{nats:.3f}",
                f"{run.progress.position / run.progress.seconds:,.0f}",
                f"{pairs:.0%}",
            )
        console.print(table)
        console.print(f"plot {report.plot(runs, out / 'compare.png')}", soft_wrap=True, markup=False)
        console.print(
            "This shows that data, training, evaluation and saving work here, and that both learn. It does not show which is "
            "better: the model is tiny, the run short, and at this length attention is a small part of a step. What GPUs "
            "show is in docs/guides/train-lm.md."
        )


@app.command()
def cost(
    preset: Annotated[str, typer.Option(help=f"The model: {', '.join(PRESETS)}.")] = "150M",
    mask: Annotated[list[str] | None, typer.Option(help="Spec text; each is measured in all layers. sdpa: PyTorch's.")] = None,
    dense_every: Annotated[int, typer.Option(min=0, help="4: every fourth layer is dense; 0: none.")] = 0,
    length: Annotated[list[int] | None, typer.Option(min=1, help="Tokens of a sequence; several are measured in turn.")] = None,
    step_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a step, at every length.")] = 262_144,
    most_micro_tokens: Annotated[int, typer.Option(min=1, help="Tokens at a time, at most; the rest is accumulated.")] = 262_144,
    recompute: Annotated[str, typer.Option(help="Activations computed again: none, selective or full.")] = "none",
    offload: Annotated[int, typer.Option(help="With --recompute full: how many blocks keep their input in the host's memory.")] = 0,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="torch.compile, by block.")] = True,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps.")] = 5,
    warm: Annotated[int, typer.Option(min=0, help="Steps between the first, which compiles, and the timed ones.")] = 2,
    sharding: Annotated[str, typer.Option("--parallel", help="Under torchrun: ddp or fsdp.")] = "ddp",
    context: Annotated[int, typer.Option(help="Under torchrun: how many GPUs share a sequence.")] = 1,
    out: Annotated[Path | None, typer.Option(help="A JSON file for the numbers.")] = None,
    device: Device = "auto",
) -> None:
    """Time training steps on random tokens, by mask and length: what would a run cost here?"""
    from . import cost as costing

    with user_errors(), parallel.join_world(device, context) as world:
        kind = _parallel(sharding)
        base = Settings(
            preset_of(preset), step_tokens=step_tokens, recompute=recompute, offload=offload, compiled=compiled, context=context
        )
        if out and world.is_first:
            out.parent.mkdir(parents=True, exist_ok=True)  # an error here costs no measurement
        lengths, costs = length or [65_536], []
        # All are checked before one is measured.
        every = [
            costing.change_length(replace(base, masks=every_nth_dense(one, dense_every)), tokens, most_micro_tokens, world.replicas)
            for one in mask or ["sdpa", SPARSE]
            for tokens in lengths
        ]
        for settings in [check_settings(one, world.size) for one in every]:
            name = f"{', '.join(settings.masks)} at {settings.length:,}"
            try:
                costs.append(costing.measure(settings, world, steps, kind, warm))
            except torch.OutOfMemoryError as error:
                if world.size > 1:
                    raise  # the other ranks wait for this one
                console.print(f"{name}: out of memory: {str(error).splitlines()[0]}", markup=False)
                costing.free()
                continue
            if not world.is_first:
                continue
            found = costs[-1]
            used = f", MFU {found.mfu:.1%}" if found.mfu else ""
            said = f"{found.seconds:.3f} s a step, {found.tokens_per_second:,.0f} tokens/s{used}"
            memory_of = "" if found.gib is None else f", {found.gib:.1f} GiB a GPU (estimated {found.estimated:.1f})"
            rest = f"{memory_of}; the first step took {found.first:.1f} s"
            console.print(f"{name}: {said}{rest}", markup=False, soft_wrap=True)
            if out:
                costing.save(costs, out, world, settings)


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run's folder, or one checkpoint.")],
    length: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens of a sequence; several are evaluated in turn. [the trained one]")
    ] = None,
    windows: Annotated[int, typer.Option(min=1, help="Held-out sequences.")] = 16,
    folder: Data = Path("runs/train_lm/data"),
    device: Device = "auto",
) -> None:
    """Held-out loss by position, also at lengths beyond the trained one."""
    with user_errors(), parallel.join_world(device) as world:
        model = load_decoder(run, world.device)
        settings, _ = checkpoint.read(checkpoint.resolve_checkpoint(run))
        text = data.Tokens(folder, "held_out", settings.shape.vocabulary)
        for one in length or [settings.length]:
            table = Table(title=f"nats a token, {windows} held-out sequences of {one:,} (trained at {settings.length:,})")
            table.add_column("positions")
            table.add_column("loss", justify="right")
            nats = losses(model, text, one, windows, world.device)
            for part in by_position(nats):
                table.add_row(f"{part.first:,} to {part.last - 1:,}", f"{part.nats:.4f}")
            table.add_row("all", f"{nats.mean():.4f}", style="bold")
            console.print(table)


@app.command()
def generate(
    run: Annotated[Path, typer.Argument(help="A run's folder, or one checkpoint.")],
    prompt: Annotated[str, typer.Option(help="Text to go on with.")] = "def main(",
    count: Annotated[int, typer.Option(min=0, help="Tokens to write.")] = 100,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.0,
    folder: Data = Path("runs/train_lm/data"),
    device: Device = "auto",
) -> None:
    """Write text with a checkpoint."""
    from .generate import generate as tokens_of

    with user_errors(), parallel.join_world(device) as world:
        model = load_decoder(run, world.device)
        path = folder / "tokenizer.json"
        if not path.exists():
            raise ValueError(f"{path} is missing; pass the --data folder that the model was trained on")
        tokenizer = Tokenizer.from_file(str(path))
        ids = tokenizer.encode(prompt).ids
        written = list(tokens_of(model, ids, count, temperature))
        print(tokenizer.decode(ids + written))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run's folder, or one checkpoint.")],
    target: Annotated[Path, typer.Argument(help="A new folder.")],
    folder: Data = Path("runs/train_lm/data"),
) -> None:
    """Write a Hugging Face model: weights, config, tokenizer, and the file that defines it."""
    from .export import export as write_model

    with user_errors():
        model = load_decoder(run, torch.device("cpu"))
        settings, _ = checkpoint.read(checkpoint.resolve_checkpoint(run))
        if not (tokenizer := folder / "tokenizer.json").exists():
            console.print(f"{tokenizer} is missing, so the model has no tokenizer; --data names its folder", markup=False)
        write_model(model, settings, tokenizer, target)
        console.print(
            f"{target}: AutoModelForCausalLM.from_pretrained({str(target)!r}, trust_remote_code=True)", soft_wrap=True, markup=False
        )


@app.command()
def plot(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    target: Annotated[Path, typer.Option(help="The picture.")] = Path("loss.png"),
) -> None:
    """Loss of several runs against tokens and seconds, in one picture."""
    with user_errors():
        for run in runs:
            if not (run / "steps.csv").exists():
                raise ValueError(f"{run} holds no steps.csv; pass folders that train --out wrote")
        print(report.plot({run.name: run for run in runs}, target))


@app.command()
def plot_costs(
    source: Annotated[Path, typer.Argument(help="A file that cost --out wrote.")],
    target: Annotated[Path, typer.Option(help="The picture.")] = Path("costs.png"),
) -> None:
    """Seconds of a step against length, from measured costs: a light and a dark picture."""
    with user_errors():
        print(report.plot_costs(source, target))
