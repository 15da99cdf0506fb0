"""A batch of sequences of different lengths decodes token by token against one paged cache, under a mask.

    python examples/decoding.py

The pages of all sequences are in one tensor, in any order. A table says which page holds which tokens. Lengths are on the device,
where each step increments them. The mask is compiled once, for the longest possible sequence, and a step never synchronizes: on a
GPU it is captured in a CUDA graph and replayed.
"""

import torch

import sparse_flash as sf

PATTERN = "causal & (local(64) | sinks(4))"


def main(lengths=(200, 3, 77), steps: int = 40, heads: int = 8, kv_heads: int = 2, head_dim: int = 64, page_size: int = 16):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch, pages_each = len(lengths), -(-(max(lengths) + steps) // page_size)
    torch.manual_seed(0)
    keys, values = torch.randn(2, batch, kv_heads, max(lengths) + steps, head_dim, device=device)  # what a model would compute
    queries = torch.randn(steps, batch, heads, 1, head_dim, device=device)

    cache = torch.zeros(2, batch * pages_each, kv_heads, page_size, head_dim, device=device)
    block_table = torch.randperm(batch * pages_each, device=device).view(batch, pages_each).int()
    kv_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    sequence = torch.arange(batch, device=device)

    def write(sequence, token):
        """Writes tokens of sequences, given by number, to their pages."""
        page = block_table[sequence, token // page_size].long()
        cache[0, page, :, token % page_size] = keys[sequence, :, token]
        cache[1, page, :, token % page_size] = values[sequence, :, token]

    for number, length in enumerate(lengths):  # the prompts
        tokens = torch.arange(length, device=device)
        write(torch.full_like(tokens, number), tokens)

    q, out = queries[0].clone(), torch.empty_like(queries[0])

    def step():
        write(sequence, kv_lens.long())
        kv_lens.add_(1)
        out.copy_(sf.attention_decode(q, cache[0], cache[1], PATTERN, kv_lens=kv_lens, block_table=block_table))

    run, taken, outputs = step, 0, []
    if device == "cuda":
        step()  # compiles the kernel and the mask
        taken, outputs = 1, [out.clone()]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
    for number in range(taken, steps):
        q.copy_(queries[number])
        run()
        outputs.append(out.clone())

    # The expected result, from whole sequences: query i of the last ``steps`` tokens.
    decoded = torch.cat(outputs, 2)
    for number, length in enumerate(lengths):
        own = slice(number, number + 1), slice(None), slice(0, length + steps)
        whole = sf.attention(queries[:, number, :, 0].transpose(0, 1)[None], keys[own], values[own], PATTERN)
        torch.testing.assert_close(decoded[own[0]], whole, atol=1e-5, rtol=1e-4)
    print(f"{batch} sequences of {list(lengths)} tokens, {steps} more each, in pages of {page_size}: as over the whole sequences")
    return decoded


if __name__ == "__main__":
    main()
