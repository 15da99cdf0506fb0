"""Changes of scores and weights: each term of sparse_flash.attention in a few lines, under one sparse mask.

    python examples/score_terms.py

On a CPU it takes a few seconds. With a GPU, the user's own function runs inside the Triton kernels.
"""

import torch

import sparse_flash as sf

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


def half_life(score, batch, head, q_pos, k_pos, params):
    """A user's own term: older keys fade, with a half-life in tokens for each head: score - ln 2 * age / half-life."""
    (half_lives,) = params
    return score - 0.6931 * (q_pos - k_pos) / half_lives[head]


if triton:

    @triton.jit
    def half_life_in_triton(score, batch, head, q_pos, k_pos, params):
        return score - 0.6931 * (q_pos - k_pos) / tl.load(params[0] + head)

    @triton.jit
    def half_life_derivative(score, batch, head, q_pos, k_pos, params):
        return 1.0  # by score; q_pos, k_pos and params have no gradient

    HALF_LIFE = sf.ScoreFunction(half_life, half_life_in_triton, half_life_derivative)
else:
    HALF_LIFE = sf.ScoreFunction(half_life)


def main(tokens: int = 2048, heads: int = 4) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (torch.randn(2, heads, tokens, 64, device=device, requires_grad=True) for _ in range(3))
    mask = sf.compile_mask("causal & (local(256) | sinks(4))", tokens, device=device)
    outs = {"plain": sf.attention(q, k, v, mask)}

    # ALiBi: a slope for each head, 2^-8/heads, 2^-16/heads, ... (arXiv:2108.12409).
    slopes = torch.tensor([2 ** (-8 * (head + 1) / heads) for head in range(heads)], device=device)
    outs["alibi"] = sf.attention(q, k, v, mask, alibi_slopes=slopes)

    # A soft cap: no score above 20, no gradient blocked.
    outs["softcap"] = sf.attention(q, k, v, mask, softcap=20.0)

    # A learned bias for each distance up to 128, and one for all beyond.
    rel_bias = torch.zeros(heads, 2 * 128 + 1, device=device, requires_grad=True)
    outs["rel_bias"] = sf.attention(q, k, v, mask, rel_bias=rel_bias)
    (gradient,) = torch.autograd.grad(outs["rel_bias"].square().sum(), rel_bias)
    print(f"gradient of the bias: {tuple(gradient.shape)}, largest at distance {int(gradient.abs().sum(0).argmax()) - 128}")

    # A learned sink for each head, which absorbs weight that no key deserves.
    sinks = torch.full((heads,), 2.0, device=device, requires_grad=True)
    outs["sinks"] = sf.attention(q, k, v, mask, sinks=sinks)

    # Your own function, with the tensors that it reads.
    half_lives = torch.tensor([16.0 * 2**head for head in range(heads)], device=device)
    outs["own function"] = sf.attention(q, k, v, mask, score_mod=HALF_LIFE, score_params=(half_lives,))

    # Two sequences of different lengths, padded on the right, and dropout: all of it combines.
    lens = torch.tensor([tokens, tokens // 3], device=device)
    outs["lengths and dropout"] = sf.attention(q, k, v, mask, q_lens=lens, kv_lens=lens, dropout_p=0.1, alibi_slopes=slopes)

    for name, out in outs.items():
        print(f"{name:>20}: mean square of the results {out.square().mean().item():.4f}")
    return outs


if __name__ == "__main__":
    main()
