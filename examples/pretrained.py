"""A pretrained model under masks, without training: what each mask costs in loss, and in what the model recalls.

    pip install -e ".[transformers]"
    python examples/pretrained.py HuggingFaceTB/SmolLM2-135M-Instruct --tokens 2048 --window 512
    python examples/pretrained.py folder --gguf model.gguf "causal & (local(256) | sinks(64))"

Each sequence is English text from Python's documentation. Five sentences in it, from its start to its end, tell the number of a
city; the last lines ask for all five. The loss is that of the text alone, in nats a token. A number is recalled if each of its
tokens is the most likely one. Masks given as arguments are measured too, in all layers.
"""

import argparse
import random
from itertools import pairwise
from pydoc_data.topics import topics


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The arguments of the command line, or those given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder, or a name on the Hugging Face hub")
    parser.add_argument("masks", nargs="*", help="spec text of more masks, for all layers")
    parser.add_argument("--gguf", help="the file in the folder, if it is of this kind; needs the package gguf")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--window", type=int, default=512)
    return parser.parse_intermixed_args(words)


if __name__ == "__main__":
    GIVEN = parse()  # a mistake is reported before the imports below, which take seconds

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

import sparse_flash as sf  # noqa: E402
from sparse_flash.integrations.transformers import use_sparse_flash  # noqa: E402

CITIES = ("Paris", "Tokyo", "Cairo", "Lima", "Oslo")


def make_sequence(text: list[int], encode, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, list[slice]]:
    """(tokens, which of them are text, where the answers are). encode: text -> tokens."""
    chosen = random.Random(seed)
    numbers = {city: str(chosen.randrange(10000, 100000)) for city in CITIES}
    facts = [encode(f"\n\nThe special number of {city} is {numbers[city]}. Remember it.\n\n") for city in CITIES]
    question = "\n\nQuestion: What is the special number of {0}?\nAnswer: The special number of {0} is"
    asked = [(encode(question.format(city)), encode(f" {numbers[city]}")) for city in chosen.sample(CITIES, len(CITIES))]
    left = length - sum(map(len, facts)) - sum(len(question) + len(answer) for question, answer in asked)
    if left < len(CITIES) or len(text) < left:
        raise ValueError(
            f"length must leave room for text, of which there are {len(text)} tokens; got {length}, {left} of them text"
        )
    edges = [left * part // len(CITIES) for part in range(len(CITIES) + 1)]
    tokens, plain, answers = [], [], []
    for part, fact in enumerate(facts):
        piece = text[edges[part] : edges[part + 1]]
        half = len(piece) // 2
        tokens += piece[:half] + fact + piece[half:]
        plain += [True] * half + [False] * len(fact) + [True] * (len(piece) - half)
    for question, answer in asked:
        tokens += question + answer
        answers.append(slice(len(tokens) - len(answer), len(tokens)))
    plain += [False] * (len(tokens) - len(plain))
    return torch.tensor(tokens), torch.tensor(plain), answers


@torch.no_grad()
def measure(model, sequences) -> tuple[float, int]:
    """(loss on the text, numbers recalled)"""
    losses, recalled = [], 0
    for tokens, plain, answers in sequences:
        logits = model(tokens[None], use_cache=False).logits[0].float()
        losses.append(torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="none")[plain[1:]])
        likely = torch.cat([tokens[:1], logits[:-1].argmax(-1)])
        recalled += sum(torch.equal(likely[place], tokens[place]) for place in answers)
    return torch.cat(losses).mean().item(), recalled


def arms(layers: int, window: int) -> dict[str, dict[int, str]]:
    """The masks to measure, by name: a mask for each of some layers. Other layers keep the model's own."""
    near, kept = f"causal & local({window})", f"causal & (local({window}) | sinks(4))"
    edges = [layers * part // 3 for part in range(4)]
    return {
        "the model's own mask": {},
        "a window": dict.fromkeys(range(layers), near),
        "a window and sinks": dict.fromkeys(range(layers), kept),
        **{f"the same, layers {a} to {b - 1}": dict.fromkeys(range(a, b), kept) for a, b in pairwise(edges)},
    }


def compare(model, encode, tokens: int, window: int, count: int = 4, masks: tuple[str, ...] = ()) -> dict[str, tuple[float, int]]:
    """{what was measured: (loss, numbers recalled)} over ``count`` sequences; prints a row for each."""
    layers = len(sf.masks_of(use_sparse_flash(model)))
    text = encode("\n\n".join(topics[name] for name in sorted(topics)))
    sequences = [make_sequence(text[number * tokens :], encode, tokens, number) for number in range(count)]
    causal, found = sf.compile_mask("causal", tokens).density, {}
    print(f"{'mask':<34}{'pairs':>8}{'loss':>8}{'recalled':>10}")
    for name, by_layer in (arms(layers, window) | {mask: dict.fromkeys(range(layers), mask) for mask in masks}).items():
        found[name] = loss, recalled = measure(use_sparse_flash(model, by_layer), sequences)
        saved = sum(1 - sf.compile_mask(mask, tokens).density / causal for mask in by_layer.values())
        print(f"{name:<34}{1 - saved / layers:>8.0%}{loss:>8.3f}{recalled:>4} of {count * len(CITIES)}", flush=True)
    return found


def main(given: argparse.Namespace) -> None:
    files = {} if given.gguf is None else {"gguf_file": given.gguf}
    tokenizer = AutoTokenizer.from_pretrained(given.model, **files)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32, **files).eval()
    compare(
        model, lambda text: tokenizer.encode(text, add_special_tokens=False), given.tokens, given.window, masks=tuple(given.masks)
    )


if __name__ == "__main__":
    main(GIVEN)
