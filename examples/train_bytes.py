"""Trains a small byte-level transformer with sparse attention, alongside its dense twin, on Python's own source text.

    python examples/train_bytes.py                # minutes on a CPU; 8,192 tokens of context on a GPU
    python examples/train_bytes.py --quick        # seconds: shows that everything works
    python examples/train_bytes.py --pattern "causal & (local(128) | sinks(64))"

The twins start from the same weights and take the same steps on the same bytes; only the attention differs. The dense twin calls
PyTorch's ``scaled_dot_product_attention``, which a user would otherwise run, so its loss is an independent check and its speed an
honest baseline.

Ctrl-C saves a checkpoint and stops. The same command line resumes the run and, on a CPU, ends bit for bit where the uninterrupted
run ends.
"""

from __future__ import annotations

import hashlib
import math
import os
import signal
import sysconfig
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from torch import nn

import sparse_flash as sf

console = Console()


@dataclass(frozen=True)
class Settings:
    """What a run's result depends on. context, block_size: tokens. batch: sequences per step. eval_windows: sequences of
    ``context`` tokens that each evaluation reads."""

    pattern: str = "causal & (local(256) | power_of_two(block=64))"
    block_size: int = 64
    context: int = 2048
    steps: int = 400
    batch: int = 1
    dim: int = 128
    layers: int = 4
    heads: int = 4
    learning_rate: float = 4e-3
    eval_every: int = 50
    eval_windows: int = 8
    dense: bool = True
    seed: int = 0


ON_CPU = Settings()
ON_GPU = Settings(
    pattern="causal & (local(512) | power_of_two(block=128))",
    block_size=128,
    context=8192,
    steps=600,
    batch=8,
    dim=512,
    layers=6,
    heads=8,
    learning_rate=3e-3,
    eval_every=50,
    eval_windows=16,
)
QUICK = Settings(
    pattern="causal & (local(32) | power_of_two(block=16))",
    block_size=16,
    context=256,
    steps=40,
    batch=4,
    dim=64,
    layers=2,
    heads=2,
    eval_every=10,
    eval_windows=4,
)

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Block(nn.Module):
    """Pre-norm attention and MLP. Takes and returns (batch, tokens, dim)."""

    def __init__(self, dim: int, heads: int, attend: Attend):
        super().__init__()
        self.heads, self.attend = heads, attend
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.project = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim, bias=False), nn.GELU(), nn.Linear(4 * dim, dim, bias=False))
        # Each block starts as the identity, which lets a small model take large steps from the first.
        nn.init.zeros_(self.project.weight)
        nn.init.zeros_(self.mlp[2].weight)

    def forward(self, x, cos, sin):
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        # Attention takes (batch, heads, tokens, head_dim) by stride: these transposes copy nothing.
        q, k, v = rotate(q, cos, sin).transpose(1, 2), rotate(k, cos, sin).transpose(1, 2), v.transpose(1, 2)
        x = x + self.project(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


def rotate(x, cos, sin):
    """Rotary positions (arXiv:2104.09864). x: (batch, tokens, heads, head_dim); cos, sin: (tokens, 1, head_dim / 2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


class ByteModel(nn.Module):
    """Bytes (batch, tokens) int64 -> logits of the next byte (batch, tokens, 256)."""

    def __init__(self, settings: Settings, attend: Attend):
        super().__init__()
        self.embed = nn.Embedding(256, settings.dim)
        self.blocks = nn.ModuleList([Block(settings.dim, settings.heads, attend) for _ in range(settings.layers)])
        self.norm, self.head = nn.RMSNorm(settings.dim), nn.Linear(settings.dim, 256, bias=False)
        nn.init.normal_(self.embed.weight, std=0.5)
        nn.init.zeros_(self.head.weight)
        half = settings.dim // settings.heads // 2
        angle = torch.arange(settings.context)[:, None, None] * 10_000 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]])
        return self.head(self.norm(x))


@dataclass
class Twin:
    """One of the two models under training. seconds: spent in its training steps so far."""

    model: ByteModel
    optimizers: list[torch.optim.Optimizer]
    seconds: float = 0.0


class Corpus:
    """The standard library's .py files as two strings of bytes, for training and for validation.

    A hash of its path decides whether a file is held out: the same files everywhere, whatever else is there.
    """

    def __init__(self):
        root = Path(sysconfig.get_paths()["stdlib"])
        skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
        parts = {True: [], False: []}
        for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
            name = path.relative_to(root)
            if not skipped & set(name.parts):
                held_out = hashlib.sha256(name.as_posix().encode()).digest()[0] < 13  # 13 of 256: one file in twenty
                parts[held_out].append(path.read_bytes())
        train, held = b"\0".join(parts[False]), b"\0".join(parts[True])
        self.digest = hashlib.sha256(train + held).hexdigest()[:16]
        self.train, self.held_out = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (train, held))

    def batch(self, settings: Settings, position: int) -> torch.Tensor:
        """Windows ``position`` .. ``position + batch`` of a shuffled endless text: (batch, context + 1) int64.

        A pure function of its arguments, so a resumed run continues reading exactly where it stopped.
        """
        windows = (len(self.train) - 1) // settings.context
        starts = []
        for number in range(position, position + settings.batch):
            epoch, place = divmod(number, windows)
            order = torch.randperm(windows, generator=torch.Generator().manual_seed(settings.seed * 1_000_003 + epoch))
            starts.append(int(order[place]) * settings.context)
        return torch.stack([self.train[start : start + settings.context + 1] for start in starts]).long()

    def validation(self, settings: Settings) -> torch.Tensor:
        """The windows of every evaluation, evenly spread over the held-out text: (eval_windows, context + 1) int64."""
        starts = torch.linspace(0, len(self.held_out) - settings.context - 1, settings.eval_windows).long().tolist()
        return torch.stack([self.held_out[start : start + settings.context + 1] for start in starts]).long()


class Run:
    """The twins, how far they have come, and their history: rows of {"step", "sparse": {"nats", "seconds"}, "dense": ...}."""

    def __init__(self, settings: Settings, device: torch.device, out: Path):
        self.settings, self.device, self.out = settings, device, out
        self.corpus = Corpus()
        self.mask = sf.compile_mask(settings.pattern, settings.context, block_size=settings.block_size, device=device)
        self.step, self.history = 0, []
        self.twins = {"sparse": self.twin(lambda q, k, v: sf.attention(q, k, v, self.mask))}
        if settings.dense:
            self.twins["dense"] = self.twin(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))

    def twin(self, attend: Attend) -> Twin:
        torch.manual_seed(self.settings.seed)  # the same initial weights for both
        model = ByteModel(self.settings, attend).to(self.device)
        # Muon for the blocks' matrices and AdamW for the rest: in as few steps as a CPU has time for, the loss is 0.2 nats lower
        # than with AdamW alone. Its steps are scaled to AdamW's size (arXiv:2502.16982, sec. 2.2), so one learning rate works for
        # both.
        matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
        rate = self.settings.learning_rate
        muon = torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        return Twin(model, [muon, torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.1)])

    @property
    def data_position(self) -> int:
        """Windows read so far."""
        return self.step * self.settings.batch

    @property
    def checkpoint(self) -> Path:
        return self.out / "checkpoint.pt"

    def autocast(self):
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def loss(self, model: ByteModel, windows: torch.Tensor) -> torch.Tensor:
        """Mean negative log-likelihood of each byte after those before it, in nats."""
        with self.autocast():
            logits = model(windows[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())

    def train_step(self) -> dict[str, float]:
        """One step of each twin on the same bytes. Returns the training losses in nats."""
        windows = self.corpus.batch(self.settings, self.data_position).to(self.device)
        losses = {}
        for name, twin in self.twins.items():
            begin = time.perf_counter()
            loss = self.loss(twin.model, windows)
            loss.backward()
            nn.utils.clip_grad_norm_(twin.model.parameters(), 1.0)
            for optimizer in twin.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = self.settings.learning_rate * self.warmup_and_cosine()
                optimizer.step()
                optimizer.zero_grad()
            losses[name] = loss.item()  # waits for the GPU, so the clock below is honest
            twin.seconds += time.perf_counter() - begin
        self.step += 1
        return losses

    def warmup_and_cosine(self) -> float:
        warmup = max(1, self.settings.steps // 20)
        done = max(0, self.step - warmup) / max(1, self.settings.steps - warmup)
        return min(1.0, (self.step + 1) / warmup) * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))

    @torch.no_grad()
    def evaluate(self) -> dict:
        """Adds a row to the history and returns it."""
        windows = self.corpus.validation(self.settings).to(self.device)
        row = {"step": self.step}
        for name, twin in self.twins.items():
            losses = [self.loss(twin.model, window[None]).item() for window in windows]
            row[name] = {"nats": sum(losses) / len(losses), "seconds": twin.seconds}
        self.history.append(row)
        return row

    def save(self) -> None:
        """Writes the checkpoint atomically: a crash while writing leaves the last one in place."""
        state = {
            "settings": asdict(self.settings) | {"corpus": self.corpus.digest},
            "step": self.step,
            "data_position": self.data_position,
            "history": self.history,
            "twins": {
                name: {
                    "model": twin.model.state_dict(),
                    "optimizers": [optimizer.state_dict() for optimizer in twin.optimizers],
                    "seconds": twin.seconds,
                }
                for name, twin in self.twins.items()
            },
            # Nothing here draws random numbers after initialization; your dropout will.
            "rng": {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []},
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.checkpoint)

    def load(self) -> None:
        """Loads the checkpoint. Raises typer.BadParameter if it is from a run with other settings."""
        try:
            state = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
            theirs = state["settings"]
        except Exception as error:
            raise typer.BadParameter(f"{self.checkpoint} is no checkpoint of this program ({error}); pass --fresh") from error
        ours = asdict(self.settings) | {"corpus": self.corpus.digest}
        differ = [f"{name} is {ours[name]!r} here, {theirs.get(name)!r} there" for name in ours if ours[name] != theirs.get(name)]
        if differ:
            raise typer.BadParameter(
                f"{self.checkpoint} was made with other settings: {'; '.join(differ)}. Give the same ones to go on with it, "
                "--fresh to start over, or another --out"
            )
        self.step, self.history = state["step"], state["history"]
        for name, twin in self.twins.items():
            saved = state["twins"][name]
            twin.model.load_state_dict(saved["model"])
            for optimizer, state_dict in zip(twin.optimizers, saved["optimizers"], strict=True):
                optimizer.load_state_dict(state_dict)
            twin.seconds = saved["seconds"]
        torch.set_rng_state(state["rng"]["cpu"])
        if self.device.type == "cuda" and len(state["rng"]["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["rng"]["cuda"])

    @torch.no_grad()
    def sample(self, count: int) -> tuple[bytes, bytes]:
        """The end of a held-out prompt of ``context`` bytes, and ``count`` bytes that the sparse twin writes after it."""
        generator = torch.Generator().manual_seed(self.settings.seed)
        text = self.corpus.validation(self.settings)[:1, :-1]
        prompt = bytes(text[0, -60:].tolist())
        for _ in range(count):
            with self.autocast():
                logits = self.twins["sparse"].model(text[:, -self.settings.context :].to(self.device))[0, -1]
            probabilities = torch.softmax(logits.float().cpu() / 0.7, dim=-1)
            text = torch.cat([text, torch.multinomial(probabilities, 1, generator=generator)[None]], dim=1)
        return prompt, bytes(text[0, -count:].tolist())

    def plot(self) -> Path:
        """Validation loss against steps and against each twin's own seconds, as OUT/loss.png."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 4), layout="constrained")
        by_step, by_time = figure.subplots(1, 2, sharey=True)
        for name, color in zip(self.twins, ("tab:orange", "tab:blue"), strict=False):
            nats = [row[name]["nats"] for row in self.history]
            by_step.plot([row["step"] for row in self.history], nats, marker=".", color=color, label=name)
            by_time.plot([row[name]["seconds"] for row in self.history], nats, marker=".", color=color, label=name)
        if len(self.history) > 2:
            # The initial drop would flatten everything after it.
            by_step.set_ylim(top=1.05 * max(row[name]["nats"] for row in self.history[1:] for name in self.twins))
        by_step.set(xlabel="step", ylabel="validation loss (nats per byte)")
        by_time.set(xlabel="seconds of training")
        by_step.legend()
        figure.suptitle(f"{self.settings.pattern}, {self.settings.context:,} tokens of context")
        figure.savefig(self.out / "loss.png", dpi=150)
        return self.out / "loss.png"


def train(run: Run) -> bool:
    """Trains to the last step, evaluating and saving on the way. Returns False if Ctrl-C stopped it after a save."""
    stop = False

    def request_stop(*_):
        nonlocal stop
        stop = True
        signal.signal(signal.SIGINT, before)  # a second Ctrl-C stops at once
        console.print("stopping after this step; Ctrl-C again to stop at once without saving")

    before = signal.signal(signal.SIGINT, request_stop)
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[losses]}"))
    try:
        with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
            task = progress.add_task("", total=run.settings.steps, completed=run.step, losses="")
            progress.console.print("validation loss per byte")
            if not run.history:
                progress.console.print(line(run.evaluate()))
            while run.step < run.settings.steps and not stop:
                losses = run.train_step()
                progress.update(task, completed=run.step, losses=", ".join(f"{name} {nats:.3f}" for name, nats in losses.items()))
                if run.step % run.settings.eval_every == 0 or run.step == run.settings.steps:
                    progress.console.print(line(run.evaluate()))
                    run.save()
        run.save()
    finally:
        signal.signal(signal.SIGINT, before)
    return not stop or run.step == run.settings.steps


def line(row: dict) -> str:
    """One evaluation, as text."""
    losses = [f"{name} {row[name]['nats']:.4f} nats {row[name]['nats'] / math.log(2):.4f} bits" for name in row if name != "step"]
    return f"step {row['step']:>5}   " + "   ".join(losses)


def summary(run: Run) -> Table:
    """The run's results, one row per twin."""
    causal_pairs = run.settings.context * (run.settings.context + 1) / 2
    size = f"{run.settings.batch} x {run.settings.context:,}"
    title = f"validation loss per byte at step {run.history[-1]['step']}, of {size} bytes each"
    table = Table(title=title)
    for heading in ("attention", "nats", "bits", "tokens/s", "seconds", "pairs kept", "of causal"):
        table.add_column(heading, justify="left" if heading == "attention" else "right")
    for name, twin in run.twins.items():
        nats = run.history[-1][name]["nats"]
        kept = run.mask.density * run.settings.context**2 if name == "sparse" else causal_pairs
        table.add_row(
            name,
            f"{nats:.4f}",
            f"{nats / math.log(2):.4f}",
            f"{run.data_position * run.settings.context / max(twin.seconds, 1e-9):,.0f}",
            f"{twin.seconds:.1f}",
            f"{kept / run.settings.context**2:.1%}",
            f"{kept / causal_pairs:.1%}",
        )
    return table


def checked(settings: Settings, device: str) -> torch.device:
    """The device to run on. Raises typer.BadParameter for settings that cannot work."""
    for name in ("context", "steps", "batch", "dim", "layers", "heads"):
        if getattr(settings, name) < 1:
            raise typer.BadParameter(f"--{name} must be at least 1; got {getattr(settings, name)}")
    if settings.dim % (2 * settings.heads):
        raise typer.BadParameter(
            f"--dim must be a multiple of 2 x heads, as rotary positions turn pairs; got dim {settings.dim}, heads {settings.heads}"
        )
    try:
        pattern = sf.parse(settings.pattern)
        seen = sf.compile_mask(pattern & ~sf.causal(), settings.context, block_size=settings.block_size)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if seen.density:
        raise typer.BadParameter(f"--pattern {settings.pattern!r} lets bytes see later ones; write 'causal & ({settings.pattern})'")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise typer.BadParameter(f"--device {device!r} cannot be used here: {error}") from error


def main(
    pattern: Annotated[str | None, typer.Option(help="Which earlier bytes each byte sees, as spec text.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Block of the lookup table, in tokens.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens of context. [2,048 on a CPU, 8,192 on a GPU]")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences a step.")] = None,
    dim: Annotated[int | None, typer.Option(help="Width of the model.")] = None,
    layers: Annotated[int | None, typer.Option(help="Transformer blocks.")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the weights and of the order of the text.")] = None,
    dense: Annotated[bool, typer.Option("--dense/--no-dense", help="Train the dense twin too.")] = True,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto takes a GPU where there is one.")] = "auto",
    out: Annotated[Path, typer.Option(help="Folder of the checkpoint and the plot.")] = Path("runs/train_bytes"),
    resume: Annotated[bool, typer.Option("--resume/--fresh", help="Go on from OUT's checkpoint where there is one.")] = True,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny run of seconds.")] = False,
) -> None:
    """Train a byte-level transformer with sparse attention, beside its dense twin."""
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    given = {"pattern": pattern, "block_size": block_size, "context": context, "steps": steps, "batch": batch}
    given |= {"dim": dim, "layers": layers, "heads": heads, "seed": seed, "dense": dense}
    base = QUICK if quick else ON_GPU if device.startswith("cuda") else ON_CPU
    settings = replace(base, **{name: value for name, value in given.items() if value is not None})
    run = Run(settings, checked(settings, device), out)
    out.mkdir(parents=True, exist_ok=True)
    if resume and run.checkpoint.exists():
        run.load()
        console.print(f"going on from step {run.step} of {run.checkpoint} (--fresh starts over)")
    count = sum(p.numel() for p in run.twins["sparse"].model.parameters())
    kept = f"keeps {run.mask.density:.1%} of all pairs"
    console.print(f"{settings.pattern} {kept}; {count:,} parameters; {run.device}", markup=False, highlight=False)
    finished = train(run)
    console.print(summary(run))
    console.print(f"checkpoint {run.checkpoint}, plot {run.plot()}", soft_wrap=True)
    if not finished:
        console.print("stopped early; the same command line goes on from here")
        raise typer.Exit(130)
    prompt, written = (text.decode(errors="replace") for text in run.sample(60 if quick else 160))
    console.print("a held-out file, and how the sparse twin goes on with it:", style="bold")
    console.print(Text(prompt).append(written, style="bold cyan"))


if __name__ == "__main__":
    typer.run(main)
