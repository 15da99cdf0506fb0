"""The held-out windows, the same for all arms: each within one package; and which of their tokens repeat something far."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np
from rich.progress import track
from tokenizers import Tokenizer

from examples.train_lm.data import FAR, Tokens

from .arms import LENGTH

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{3,}")
_NAMES = "windows.json"
Part = Literal["tuning", "reported"]


@dataclass(frozen=True)
class Windows:
    """starts: (windows,) int64, in the held-out text. packages: the name of each window's. far: (windows, LENGTH) bool, whether a
    token belongs to an identifier that was last seen more than FAR tokens before, in the window."""

    starts: np.ndarray
    packages: list[str]
    far: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, count: int) -> Windows:
        """At most ``count`` windows, spread evenly."""
        keep = np.linspace(0, len(self) - 1, min(count, len(self))).round().astype(int)
        return self._select(keep)

    def _select(self, keep: np.ndarray) -> Windows:
        return Windows(self.starts[keep], [self.packages[i] for i in keep], self.far[keep])

    def part(self, name: Part) -> Windows:
        """Returns the windows of a part. Every fourth package is for tuning; the others are reported."""
        order = {package: number for number, package in enumerate(dict.fromkeys(self.packages))}
        tuning = np.array([order[package] % 4 == 0 for package in self.packages])
        return self._select(np.flatnonzero(tuning if name == "tuning" else ~tuning))


def prepare(data: Path, vocabulary: int, count: int, length: int = LENGTH) -> Windows:
    """Chooses the windows of a prepared folder and writes them there.

    Packages give a window each in turn, in the order of their names' hashes, until there are ``count`` windows or no package has
    room for another. No window overlaps another. Raises ValueError if no held-out package has a window's tokens.
    """
    tokens = Tokens(data, "held_out", vocabulary)
    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    names = sorted(json.loads((data / "manifest.json").read_text())["groups"])
    bounds = {name: (start, stop) for name, start, stop in _packages(tokens, names)}
    most = {name: (stop - start - 1) // length for name, (start, stop) in bounds.items()}
    order = sorted((name for name in most if most[name] > 0), key=lambda name: hashlib.sha256(name.encode()).digest())
    if not order:
        raise ValueError(f"no held-out package has {length + 1:,} tokens; prepare more text, or a larger --held-out share")
    taken = dict.fromkeys(order, 0)
    while sum(taken.values()) < count and any(taken[name] < most[name] for name in order):
        for name in order:
            if taken[name] < most[name] and sum(taken.values()) < count:
                taken[name] += 1
    starts, packages = [], []
    for name in order:
        start, stop = bounds[name]
        starts += np.linspace(start, stop - 1 - length, taken[name]).astype(np.int64).tolist() if taken[name] > 1 else [start]
        packages += [name] * taken[name]
    pieces = _token_texts(tokenizer, vocabulary)
    far = [
        _find_far(tokens.tokens[start : start + length + 1], pieces) for start in track(starts, "far identifiers", transient=True)
    ]
    windows = Windows(np.array(starts), packages, np.stack(far))
    (data / _NAMES).write_text(json.dumps({"starts": starts, "packages": packages, "length": length}))
    np.save(data / "windows.far.npy", np.packbits(windows.far, axis=1))
    return windows


def load(data: Path, part: Part) -> Windows:
    """The windows of a part. Raises ValueError if ``prepare`` was not run."""
    if not (data / _NAMES).exists():
        raise ValueError(f"{data} has no windows; run the command prepare first")
    about = json.loads((data / _NAMES).read_text())
    far = np.unpackbits(np.load(data / "windows.far.npy"), axis=1, count=about["length"]).astype(bool)
    return Windows(np.array(about["starts"]), about["packages"], far).part(part)


def _packages(tokens: Tokens, names: list[str]) -> list[tuple[str, int, int]]:
    """(name, first token, last + 1) of each package of a text."""
    changes = np.flatnonzero(np.diff(tokens.starts[:, 1], prepend=-1))
    starts = tokens.starts[changes, 0].tolist()
    groups = tokens.starts[changes, 1].tolist()
    return [(names[group], start, stop) for group, start, stop in zip(groups, starts, [*starts[1:], len(tokens)], strict=True)]


def _token_texts(tokenizer: Tokenizer, vocabulary: int) -> list[str]:
    """The text of each token, a character for each byte; what no identifier holds becomes a dot."""
    pieces = [tokenizer.id_to_token(token) or "." for token in range(vocabulary)]
    return [re.sub(r"[^A-Za-z0-9_]", ".", piece) for piece in pieces]


def _find_far(ids: np.ndarray, pieces: list[str]) -> np.ndarray:
    """(tokens - 1,) bool, for the tokens after the first: the labels of a window."""
    texts = [pieces[token] for token in ids.tolist()]
    stops = np.fromiter(accumulate(map(len, texts)), np.int64, len(texts))
    far, last = np.zeros(len(ids), bool), {}
    text = "".join(texts)
    matches = list(_IDENTIFIER.finditer(text))
    firsts = np.searchsorted(stops, [m.start() for m in matches], side="right").tolist()
    lasts = np.searchsorted(stops, [m.end() - 1 for m in matches], side="right").tolist()
    for match, first, stop in zip(matches, firsts, lasts, strict=True):
        if first - last.get(match[0], first) > FAR:
            far[first : stop + 1] = True
        last[match[0]] = first
    return far[1:]
