"""Text becomes tokens in a file, once; batches are read from it by position.

A prepared folder holds

    manifest.json     where the text came from: groups (packages or folders), versions, hashes, what was dropped
    tokenizer.json    byte-level BPE (``tokenizers``), trained on the training text
    train.bin, held_out.bin              tokens, uint16 or uint32, memory-mapped
    train.starts.npy, held_out.starts.npy    (documents, 2) int64: first token of each document, and its group

It is complete once manifest.json is there, which is written last.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .model import Documents

END = "<|end|>"  # after each document
FAR = 8192
_SHINGLE_LINES, _TOO_ALIKE = 5, 0.5
_HELD_OUT_LARGEST = 0.1
_TOKENIZER_BYTES = 64 << 20
_TEXT = {".txt", ".md", ".rst", ".tex", ".json", ".html", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".cu", ".js", ".ts", ".java"}
_TEXT |= {".go", ".rs"}


@dataclass(frozen=True)
class Document:
    """One file. group: its package, or the folder that holds it."""

    group: str
    path: Path
    text: str


def dtype_of(vocabulary: int) -> type[np.unsignedinteger]:
    """Returns the dtype of the numbers in a token file."""
    return np.uint16 if vocabulary <= 1 << 16 else np.uint32


def packages(folder: Path | None = None) -> Iterator[tuple[str, str, list[Path]]]:
    """Yields (name, version, .py files) of Python's standard library and of every installed package; if a folder is given, of the
    packages that ``pip install --target`` put there."""
    if folder is None:
        library = Path(sysconfig.get_paths()["stdlib"])
        skipped = {"site-packages", "dist-packages", "__pycache__"}
        files = sorted(p for p in library.rglob("*.py") if not skipped & set(p.relative_to(library).parts))
        yield "python", platform.python_version(), files
    found = {}
    for distribution in importlib.metadata.distributions(**({} if folder is None else {"path": [str(folder)]})):
        paths = [Path(str(distribution.locate_file(file))) for file in distribution.files or () if file.suffix == ".py"]
        found.setdefault((distribution.metadata["Name"] or "").lower(), (distribution.version, paths))
    for name, (version, paths) in sorted(found.items()):
        if name and paths:
            yield name, version, sorted(paths)


def folder_groups(folder: Path) -> Iterator[tuple[str, str, list[Path]]]:
    """Yields (name, "", text files): a group for each folder directly within ``folder``, and for each file."""
    for entry in sorted(folder.iterdir()):
        files = sorted(p for p in entry.rglob("*") if p.is_file()) if entry.is_dir() else [entry]
        files = [path for path in files if path.suffix.lower() in _TEXT]
        if files:
            yield entry.name, "", files


class Deduplicator:
    """Knows repeated files: of a text that was seen, or with more than half of its shingles (runs of five lines) seen."""

    def __init__(self) -> None:
        self.files: set[bytes] = set()
        self.shingles: set[int] = set()

    def why_dropped(self, text: str) -> str | None:
        """Returns why a text is a repetition. Otherwise remembers it and returns None."""
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        if digest in self.files:
            return "the same file"
        shingles = self.shingles_of(text)
        if len(shingles & self.shingles) > _TOO_ALIKE * len(shingles):
            return "alike by shingles"
        self.files.add(digest)
        self.shingles |= shingles
        return None

    @staticmethod
    def shingles_of(text: str) -> set[int]:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        last = max(1, len(lines) - _SHINGLE_LINES + 1)
        pieces = ("\n".join(lines[first : first + _SHINGLE_LINES]) for first in range(last))
        return {int.from_bytes(hashlib.blake2b(piece.encode(), digest_size=8).digest(), "little") for piece in pieces}


def written_by_hand(text: str) -> bool:
    """Whether source text is code rather than data or generated: no line of more than 1,000 characters, 100 on average at most, and
    a quarter of them letters or digits (StarCoder's filters, arXiv:2305.06161, section 3)."""
    lines = text.splitlines() or [""]
    letters = sum(map(str.isalnum, text))
    return max(map(len, lines)) <= 1000 and len(text) <= 101 * len(lines) and letters >= len(text) / 4


def held_out_groups(sizes: dict[str, int], share: float = 0.05) -> set[str]:
    """Draws whole groups that hold a share of the bytes, by the hash of their names. None is larger than a tenth of all bytes.

    Raises ValueError if there is only one group.
    """
    if len(sizes) < 2:
        raise ValueError(
            f"held-out text comes from whole packages or folders, and there is only {', '.join(sizes) or 'none'}; add another"
        )
    total, taken, chosen = sum(sizes.values()), 0, set()
    order = sorted(sizes, key=lambda name: hashlib.sha256(name.encode()).digest())
    smaller = [name for name in order if sizes[name] <= _HELD_OUT_LARGEST * total] or [min(order, key=lambda name: sizes[name])]
    for name in smaller:
        if taken < share * total:
            chosen.add(name)
            taken += sizes[name]
    return chosen


def prepare(
    folder: Path,
    vocabulary: int,
    source: Path | None = None,
    most_bytes: int | None = None,
    quiet: bool = False,
    installed: Path | None = None,
    held_out_share: float = 0.05,
) -> dict:
    """Makes the folder, or takes it as it is if it was made of this source with this vocabulary; returns its manifest.

    source: a folder of text, or None for the source text of installed packages. installed: a folder of packages, instead of the
    packages that are installed here. most_bytes: about the most text to read; a group gives at most an eighth of it.
    held_out_share: of the bytes. Raises ValueError if there is no text, or if the folder was made from another source.
    """
    if source is not None and installed is not None:
        raise ValueError("pass --text or --packages, not both")
    wanted = {
        "source": str(source.resolve()) if source else f"packages in {installed.resolve()}" if installed else "installed packages",
        "vocabulary": vocabulary,
        "most_bytes": most_bytes,
        "held_out_share": held_out_share,
    }
    manifest_path = folder / "manifest.json"
    if manifest_path.exists():
        manifest = json.loads(manifest_path.read_text())
        given = {name: manifest.get(name) for name in wanted}
        if given != wanted:
            raise ValueError(
                f"{folder} was prepared from {given}; now asked for {wanted}; pass another --data, or remove the folder"
            )
        return manifest
    if not 0 < held_out_share < 1:
        raise ValueError(f"--held-out must be a share of the text, more than 0 and less than 1; got {held_out_share}")
    if source is not None and not source.is_dir():
        raise ValueError(f"--text must be a folder of text; got {source}")
    if installed is not None and next(packages(installed), None) is None:
        raise ValueError(f"--packages must be a folder that pip install --target filled; {installed} has no package")
    with _progress(quiet) as progress:
        documents, about_groups = _read(folder_groups(source) if source else packages(installed), most_bytes, progress)
        if not about_groups:
            raise ValueError(f"{source} holds no text: no file ends in {', '.join(sorted(_TEXT))}")
        if not documents:
            small = "" if most_bytes is None else f" and at most an eighth of --most-bytes, {most_bytes:,}; pass more"
            raise ValueError(f"no file of {wanted['source']} is UTF-8 text that is not empty{small}")
        folder.mkdir(parents=True, exist_ok=True)
        sizes = {name: about["bytes"] for name, about in about_groups.items() if about["bytes"]}
        held_out = held_out_groups(sizes, held_out_share)
        documents, dropped = _deduplicate(documents, held_out, source is None, progress)
        tokenizer = _train_tokenizer([d for d in documents if d.group not in held_out], vocabulary, progress)
        tokenizer.save(str(folder / "tokenizer.json"))
        names = sorted(about_groups)
        counts = {}
        for split in ("train", "held_out"):
            mine = [d for d in documents if (d.group in held_out) == (split == "held_out")]
            counts[split] = _write(folder / split, mine, names, tokenizer, vocabulary, progress)
    for name, about in about_groups.items():
        about["held_out"] = name in held_out
    manifest = {**wanted, "tokens": counts, "dropped": dropped, "groups": {name: about_groups[name] for name in names}}
    partial = manifest_path.with_suffix(".partial")
    partial.write_text(json.dumps(manifest, indent=1))
    os.replace(partial, manifest_path)
    return manifest


def _progress(quiet: bool) -> Progress:
    columns = TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, transient=True, disable=quiet)


def _read(groups, most_bytes: int | None, progress) -> tuple[list[Document], dict[str, dict]]:
    documents, about = [], {}
    total = 0
    bar = progress.add_task("reading", total=None)
    for name, version, paths in groups:
        progress.advance(bar)
        if most_bytes is not None and total >= most_bytes:
            break
        digest, size, files = hashlib.sha256(), 0, 0
        for path in paths:
            if most_bytes is not None and size > most_bytes // 10:  # near its eighth: the next file would hardly fit
                break
            try:
                text = path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue
            encoded = text.encode()
            if text.strip() and (most_bytes is None or size + len(encoded) <= most_bytes // 8):
                documents.append(Document(name, path, text))
                digest.update(encoded)
                size, files = size + len(encoded), files + 1
        about[name] = {"version": version, "sha256": digest.hexdigest(), "files": files, "bytes": size}
        total += size
    progress.update(bar, total=len(about))
    return documents, about


def _deduplicate(documents: list[Document], held_out: set[str], code: bool, progress) -> tuple[list[Document], dict[str, int]]:
    deduplicator, kept, dropped = Deduplicator(), [], {}
    # Held-out groups come first, so text that is held out is in no training file.
    for document in progress.track(sorted(documents, key=lambda d: d.group not in held_out), description="dropping duplicates"):
        generated = code and not written_by_hand(document.text)
        if reason := "data or generated" if generated else deduplicator.why_dropped(document.text):
            dropped[reason] = dropped.get(reason, 0) + 1
        else:
            kept.append(document)
    return kept, dropped


def _train_tokenizer(documents: list[Document], vocabulary: int, progress) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    every = max(1, sum(len(d.text) for d in documents) // _TOKENIZER_BYTES)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocabulary <= len(alphabet):
        raise ValueError(f"vocabulary must be more than the {len(alphabet)} bytes and the end of a document; got {vocabulary}")
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    progress.add_task("training the tokenizer", total=None)
    tokenizer.train_from_iterator((d.text for d in documents[::every]), trainer)
    return tokenizer


def _write(path: Path, documents: list[Document], names: list[str], tokenizer: Tokenizer, vocabulary: int, progress) -> int:
    """Writes the tokens of the documents, in order of their groups; returns the number of tokens."""
    together = 64
    documents = sorted(documents, key=lambda d: (d.group, str(d.path)))
    number, end = {name: i for i, name in enumerate(names)}, tokenizer.token_to_id(END)
    starts, count = [], 0
    bar = progress.add_task(f"tokens of {path.name}", total=len(documents))
    with path.with_suffix(".bin").open("wb") as file:
        for first in range(0, len(documents), together):
            some = documents[first : first + together]
            for document, encoded in zip(some, tokenizer.encode_batch_fast([d.text for d in some]), strict=True):
                starts.append((count, number[document.group]))
                np.array([*encoded.ids, end], dtype_of(vocabulary)).tofile(file)
                count += len(encoded.ids) + 1
            progress.advance(bar, len(some))
    np.save(path.with_suffix(".starts.npy"), np.array(starts, np.int64).reshape(-1, 2))
    return count


def import_tokens(folder: Path, file: Path, vocabulary: int) -> dict:
    """Makes the folder from a .npy file of token numbers, of one dimension. Holds its last twentieth out. Returns the manifest."""
    tokens = np.load(file, mmap_mode="r")
    if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
        raise ValueError(f"--tokens must be a .npy file of one dimension of integers; got {tokens.dtype} of shape {tokens.shape}")
    largest = max((int(tokens[i : i + (1 << 24)].max()) for i in range(0, len(tokens), 1 << 24)), default=0)
    if largest >= vocabulary:
        raise ValueError(f"{file} holds token {largest}, and the vocabulary has {vocabulary}; pass --vocabulary {largest + 1}")
    folder.mkdir(parents=True, exist_ok=True)
    border = len(tokens) - len(tokens) // 20
    for name, piece in (("train", tokens[:border]), ("held_out", tokens[border:])):
        piece.astype(dtype_of(vocabulary)).tofile(folder / f"{name}.bin")
        np.save(folder / f"{name}.starts.npy", np.zeros((1, 2), np.int64))
    manifest = {
        "source": str(file.resolve()),
        "vocabulary": vocabulary,
        "tokens": {"train": border, "held_out": len(tokens) - border},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
    return manifest


class Tokens:
    """One of the two token files of a prepared folder."""

    def __init__(self, folder: Path, split: str, vocabulary: int):
        if not (folder / "manifest.json").exists():
            raise ValueError(f"{folder} holds no prepared tokens; pass the --data folder that the model was trained on")
        self.split = split
        self.tokens = np.memmap(folder / f"{split}.bin", dtype_of(vocabulary), mode="r")
        self.starts = np.load(folder / f"{split}.starts.npy")

    def __len__(self) -> int:
        return len(self.tokens)

    def check_holds(self, length: int) -> None:
        """Raises ValueError if the text is shorter than a sequence of ``length`` and the token after it."""
        if len(self) <= length:
            raise ValueError(
                f"the {self.split.replace('_', '-')} text has {len(self):,} tokens, fewer than one sequence of {length:,}; pass a "
                "shorter --length, or prepare more text"
            )

    def window(self, start: int, length: int) -> torch.Tensor:
        """(length,) int64."""
        return torch.from_numpy(self.tokens[start : start + length].astype(np.int64))

    def documents_within(self, start: int, length: int) -> np.ndarray:
        """Returns the offsets at which documents start within a window, ascending; the first is 0."""
        first, last = np.searchsorted(self.starts[:, 0], (start + 1, start + length))
        return np.concatenate([[0], self.starts[first:last, 0] - start])

    def far_share(self, length: int) -> float:
        """Returns the share of tokens, in windows of ``length``, with text of their own group more than FAR tokens back in it."""
        changes = np.flatnonzero(np.diff(self.starts[:, 1], prepend=-1))
        group_starts = self.starts[changes, 0]
        ends = np.append(group_starts[1:], len(self))
        far = 0
        for start, end in zip(group_starts.tolist(), ends.tolist(), strict=True):
            for window in range(start // length * length, end, length):
                far += max(0, min(end, window + length) - max(start, window) - FAR)
        return far / max(1, len(self))


class Stream:
    """Reads the training text, shuffled in chunks, without end; each epoch has another order. A position counts the tokens that
    were read before it.

    Seed and position alone decide what is read, so runs of different sequence lengths, batches or numbers of GPUs read the same
    tokens in the same order.
    """

    def __init__(self, tokens: Tokens, chunk: int, seed: int):
        self.tokens, self.chunk, self.seed = tokens, chunk, seed
        self.chunks = (len(tokens) - 1) // chunk
        if self.chunks < 1:
            raise ValueError(
                f"the training text has {len(tokens):,} tokens, fewer than one chunk of {chunk:,}; add text, or shorten --chunk "
                "and --length"
            )
        self._order: tuple[int, torch.Tensor] = (-1, torch.empty(0))

    @property
    def epoch_tokens(self) -> int:
        return self.chunks * self.chunk

    def start(self, position: int) -> int:
        """Returns the index in the file of the token at a position."""
        epoch, within = divmod(position, self.epoch_tokens)
        if self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._order = epoch, torch.randperm(self.chunks, generator=generator)
        number, offset = divmod(within, self.chunk)
        return int(self._order[1][number]) * self.chunk + offset

    def batch(self, position: int, sequences: int, length: int) -> Batch:
        """Returns whole sequences from a position on. length divides the chunk."""
        starts = [self.start(position + number * length) for number in range(sequences)]
        return Batch.from_starts(self.tokens, starts, length)


@dataclass(frozen=True)
class Batch:
    """Holds sequences. tokens, labels: (sequences, length) int64; labels are the next tokens. boundaries: where documents start if
    the sequences are laid end to end, and the end of the last document."""

    tokens: torch.Tensor
    labels: torch.Tensor
    boundaries: np.ndarray
    starts: list[int]

    @classmethod
    def from_starts(cls, tokens: Tokens, starts: Iterable[int], length: int) -> Batch:
        starts = list(starts)
        windows = torch.stack([tokens.window(start, length + 1) for start in starts])
        found = [tokens.documents_within(start, length) + number * length for number, start in enumerate(starts)]
        boundaries = np.concatenate([*found, [len(starts) * length]])
        return cls(windows[:, :-1], windows[:, 1:], boundaries, starts)

    def to_device(self, device: torch.device, packed: bool) -> tuple[torch.Tensor, torch.Tensor, Documents | None]:
        """Returns (tokens, labels, documents), as the model takes them. Packed sequences become one, with the documents of all."""
        tokens, labels = (t.to(device, non_blocking=True) for t in (self.tokens, self.labels))
        if not packed:
            return tokens, labels, None
        bounds = self.boundaries.astype(np.int32)
        documents = Documents(torch.from_numpy(bounds).to(device), self.tokens.shape[1])
        return tokens.reshape(1, -1), labels.reshape(1, -1), documents
