"""Text: what is dropped, what is held out, and in which order tokens are read."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from examples.train_lm.data import END, Stream, Tokens, import_tokens, prepare

VOCABULARY = 400


def text(name: str, lines: int = 30) -> str:
    return "\n".join(f"def {name}_{i}(value): return value + {i}" for i in range(lines))


@pytest.fixture
def corpus(tmp_path):
    """Twelve folders of text; a file stands twice, and another with one line changed, across folders."""
    for number in range(12):
        folder = tmp_path / "text" / f"package{number}"
        folder.mkdir(parents=True)
        files = {f"file{file}.py": text(f"f{number}_{file}").encode() for file in range(3)}
        files |= {
            "copied.py": text("same").encode(),
            "nearly.py": text("near").replace("near_3(", f"near_{number}_other(").encode(),
        }
        files |= {"picture.png": b"\x89PNG", "broken.py": b"\xff\xfe\xff"}
        for name, content in files.items():
            (folder / name).write_bytes(content)
    return tmp_path / "text"


@pytest.fixture
def prepared(corpus, tmp_path):
    return tmp_path / "data", prepare(tmp_path / "data", VOCABULARY, corpus, quiet=True)


def decoded(folder, split: str) -> list[str]:
    tokenizer, tokens = Tokenizer.from_file(str(folder / "tokenizer.json")), Tokens(folder, split, VOCABULARY)
    pieces = [tokens.tokens[a:b] for a, b in pairwise([*tokens.starts[:, 0].tolist(), len(tokens)])]
    assert all(piece[-1] == tokenizer.token_to_id(END) for piece in pieces)
    return [tokenizer.decode(piece[:-1].tolist()) for piece in pieces]


def test_tokens_are_the_text_without_duplicates_and_without_what_is_held_out(prepared):
    folder, manifest = prepared
    held_out = {name for name, group in manifest["groups"].items() if group["held_out"]}
    train, held = decoded(folder, "train"), decoded(folder, "held_out")
    for name in manifest["groups"]:
        for one in (text(f"f{name[7:]}_{file}") for file in range(3)):
            assert (one in held, one in train) == (name in held_out, name not in held_out)
    assert 1 <= len(held_out) <= 2
    # What is in both halves stays in the held-out one.
    assert (train + held).count(text("same")) == 1 and text("same") in held
    assert sum("near_29(" in one for one in train) == 0 and sum("near_29(" in one for one in held) == 1
    assert manifest["dropped"] == {"the same file": 11, "alike by shingles": 11}
    assert manifest["tokens"] == {split: len(Tokens(folder, split, VOCABULARY)) for split in ("train", "held_out")}


def test_a_prepared_folder_is_taken_as_it_is_and_another_request_is_an_error(prepared, corpus, tmp_path):
    folder, manifest = prepared
    before = (folder / "train.bin").stat().st_mtime_ns
    assert prepare(folder, VOCABULARY, corpus) == json.loads(json.dumps(manifest))
    assert (folder / "train.bin").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="pass another --data"):
        prepare(folder, VOCABULARY + 1, corpus)


def test_installed_packages_are_the_default_and_the_manifest_names_their_versions(tmp_path):
    manifest = prepare(tmp_path / "data", VOCABULARY, most_bytes=1 << 16, quiet=True)
    assert manifest["groups"]["python"]["version"] and len(manifest["groups"]) >= 8
    assert all(group["sha256"] and group["version"] for group in manifest["groups"].values())


def test_packages_of_a_folder_are_read_by_distribution_without_data(tmp_path):
    for name in ("one", "two"):
        files = {
            f"{name}/a.py": text(name),
            f"{name}/table.py": ", ".join(["0x7f"] * 400),
            f"{name}-1.5.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n",
            f"{name}-1.5.dist-info/RECORD": f"{name}/a.py,,\n{name}/table.py,,\n",
        }
        for path, content in files.items():
            (tmp_path / path).parent.mkdir(exist_ok=True)
            (tmp_path / path).write_text(content)
    manifest = prepare(tmp_path / "data", VOCABULARY, quiet=True, installed=tmp_path)
    assert {name: group["version"] for name, group in manifest["groups"].items()} == {"one": "1.5", "two": "1.5"}
    assert manifest["dropped"] == {"data or generated": 2}


@pytest.fixture
def numbered(tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(2000))
    import_tokens(tmp_path / "data", tmp_path / "tokens.npy", 2000)
    return tmp_path / "data"


def test_runs_of_any_length_and_batch_read_the_same_tokens_in_the_same_order(numbered):
    def read(length: int, sequences: int) -> torch.Tensor:
        stream = Stream(Tokens(numbered, "train", 2000), chunk=96, seed=5)
        batches = [stream.batch(position, sequences, length) for position in range(0, 3840, length * sequences)]
        assert all(torch.equal(b.labels, b.tokens + 1) for b in batches)
        return torch.cat([b.tokens.flatten() for b in batches])

    wanted, tokens = read(96, 1), 19 * 96  # of an epoch; the next has another order
    assert torch.equal(read(32, 5), wanted) and torch.equal(read(48, 8), wanted)
    assert wanted[:tokens].tolist() != sorted(wanted[:tokens].tolist()) == list(range(tokens))
    assert not torch.equal(wanted[:tokens], wanted[tokens : 2 * tokens])


def test_boundaries_are_where_documents_start(numbered):
    np.save(numbered / "train.starts.npy", np.array([[0, 0], [10, 0], [40, 1], [96, 1], [100, 2]]))
    tokens = Tokens(numbered, "train", 2000)
    assert tokens.documents_within(0, 96).tolist() == [0, 10, 40]
    assert tokens.documents_within(10, 30).tolist() == [0]
    assert tokens.documents_within(90, 20).tolist() == [0, 6, 10]


@pytest.mark.parametrize(
    "content, said",
    [
        ([0, 5, 60], "holds token 60, and the vocabulary has 50; pass --vocabulary 61"),
        (np.ones((2, 2)), "one dimension of integers"),
        (np.arange(50), "fewer than one chunk"),
    ],
    ids=["vocabulary", "shape", "length"],
)
def test_token_files_that_do_not_fit_or_are_not_there_are_clear_errors(content, said, tmp_path):
    with pytest.raises(ValueError, match="data holds no prepared tokens; pass the --data folder"):
        Tokens(tmp_path / "data", "train", 50)
    np.save(tmp_path / "tokens.npy", content)
    with pytest.raises(ValueError, match=said):
        import_tokens(tmp_path / "data", tmp_path / "tokens.npy", 50)
        Stream(Tokens(tmp_path / "data", "train", 50), 64, 0)
