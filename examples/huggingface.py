"""A Hugging Face model under a mask: train it, generate with it.

    pip install -e ".[transformers]"
    python examples/huggingface.py

A small Llama with random weights learns to copy: each sequence is a random piece, repeated. Its first layer sees the last 48 tokens
and the first one. Its second layer also reaches back exactly one piece, by a strided pattern.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import sparse_flash as sf
from sparse_flash.integrations.transformers import use_sparse_flash

PIECE = 64  # tokens


def batch(size: int, words: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(1, words, (size, PIECE), generator=generator).repeat(1, 3)


def main(steps: int = 150, words: int = 50) -> tuple[float, float]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=words,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=None,  # every number is a word
    )
    near = sf.causal() & (sf.local(48) | sf.sinks(1))
    far = sf.causal() & (sf.local(48) | sf.strided(PIECE, block=1))
    model = use_sparse_flash(LlamaForCausalLM(config), per_layer=[near, far])

    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        x = batch(8, words, generator)
        loss = model(x, labels=x).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 0 or step == steps - 1:
            print(f"step {step:>4}: loss {loss.item():.2f}")
    model.eval()
    x = batch(4, words, generator)
    made = model.generate(
        x[:, : 2 * PIECE], max_new_tokens=PIECE, do_sample=False, attention_mask=torch.ones_like(x[:, : 2 * PIECE])
    )
    right = (made[:, 2 * PIECE :] == x[:, 2 * PIECE :]).float().mean().item()
    print(f"{right:.0%} of the generated tokens copy the piece ({1 / (words - 1):.0%} by chance)")
    return loss.item(), right


if __name__ == "__main__":
    main()
