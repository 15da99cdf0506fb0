"""Texts that every installation of Python and PyTorch has, and needles in them. Tuning texts and test texts are different files or
different topics."""

import ast
import random
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch

_STANDARD, _TORCH = Path(sysconfig.get_paths()["stdlib"]), Path(torch.__file__).parent
_MODULES = ("argparse", "typing", "tarfile", "subprocess", "doctest", "optparse"), ("inspect", "pickle")
_HEADERS = (
    ("c10/core/TensorImpl.h", "ATen/native/Math.h", "ATen/core/ivalue_inl.h", "torch/csrc/utils/pythoncapi_compat.h"),
    ("ATen/core/jit_type.h", "c10/util/SmallVector.h"),
)
_CITIES = ("Paris", "London", "Berlin", "Madrid", "Rome", "Vienna", "Oslo", "Lisbon", "Athens", "Dublin", "Warsaw", "Prague")


class Text(NamedTuple):
    """Token ids, (tokens,) int64."""

    test: torch.Tensor
    tuning: torch.Tensor


def texts(tokenizer: Any, files: Sequence[Path] = ()) -> dict[str, Text]:
    """Returns texts by kind. files: each is a kind with the file's name, and its last quarter is for tuning. Without files:

    english: pydoc's topics in alphabetical order; each fourth is for tuning. python: modules of the standard library. c++: headers
    of PyTorch. docstrings: of torch.nn, and for tuning of torch.optim.
    """
    if files:
        read = [(path.stem, _ids(tokenizer, path.read_text())) for path in files]
        return {name: Text(ids[: -(len(ids) // 4)], ids[-(len(ids) // 4) :]) for name, ids in read}
    ordered = [text for _, text in sorted(topics.items())]
    headers = [[_TORCH / "include" / name for name in names] for names in _HEADERS]
    parts = {
        "english": ([text for number, text in enumerate(ordered) if number % 4], ordered[::4]),
        "python": [[(_STANDARD / f"{name}.py").read_text() for name in names] for names in _MODULES],
        "c++": [[path.read_text() for path in paths if path.exists()] for paths in headers],
        "docstrings": [_docstrings(sorted((_TORCH / folder).glob("*.py"))) for folder in ("nn/modules", "optim")],
    }
    return {kind: Text(*(_ids(tokenizer, "\n\n".join(some)) for some in two)) for kind, two in parts.items() if all(two)}


def _docstrings(files: Iterable[Path]) -> list[str]:
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    found = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    return list(dict.fromkeys(text for text in found if len(text) > 200))


def _ids(tokenizer: Any, text: str) -> torch.Tensor:
    return tokenizer(text, return_tensors="pt", add_special_tokens=False, verbose=False).input_ids[0]


def windows_of(ids: torch.Tensor, length: int, count: int) -> torch.Tensor:
    """(windows, length): at most ``count`` windows, evenly spaced, without overlap."""
    count = min(count, len(ids) // length)
    if not count:
        raise ValueError(f"--length must be at most the {len(ids):,} tokens of a text; got {length:,}. --text takes longer ones")
    firsts = [number * (len(ids) - length) // max(1, count - 1) for number in range(count)]
    return torch.stack([ids[first : first + length] for first in firsts])


class Needles(NamedTuple):
    """Numbers that are stated in a text and asked for at its end. tokens: (needles, length). digits: (needles, last) bool, which of
    the last tokens are digits of the answer."""

    tokens: torch.Tensor
    digits: torch.Tensor


def plant_needles(tokenizer: Any, filler: torch.Tensor, length: int, count: int) -> Needles:
    """Needles at evenly spaced depths, the first near the beginning."""
    drawn = random.Random(length)
    made, digits = [], []
    for number in range(count):
        city, answer = drawn.choice(_CITIES), f" {drawn.randrange(10_000, 100_000)}"
        stated = f"\n\nThe special magic number for {city} is{answer}. Remember it.\n\n"
        asked = f"\n\nQuestion: What is the special magic number for {city}?\nAnswer: The special magic number for {city} is"
        needle, question, last = (_ids(tokenizer, text) for text in (stated, asked, answer))
        room = length - len(needle) - len(question) - len(last)
        if not 0 < room < len(filler):
            raise ValueError(f"--length must leave room for a needle in {len(filler):,} tokens of text; got {length:,}")
        first, at = drawn.randrange(len(filler) - room), int(room * (number + 0.5) / count)
        text = filler[first : first + room]
        made.append(torch.cat([text[:at], needle, text[at:], question, last]))
        digits.append([tokenizer.decode([token]).strip().isdigit() for token in last.tolist()])
    width = max(map(len, digits))
    return Needles(torch.stack(made), torch.tensor([[False] * (width - len(one)) + one for one in digits]))
