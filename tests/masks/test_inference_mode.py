"""Masks and selections made in inference mode are ordinary ones: models train with them. Those of other makers: test_block_mask."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import sparse_flash as sf

N, REMEMBERED = 128, "causal & local(31)"
Q = torch.randn(1, 2, N, 16)


def made():
    """Masks and selections from tensors of inference mode."""
    mask, q = sf.compile_mask("causal & local(50)", N, block_size=32), Q + 0
    picks = sf.topk_blocks(q, q, keep=2, block_size=32, every=1)
    sf.attention(q, q, q, REMEMBERED)
    return {
        "compile_mask": mask,
        "from_blocks": sf.BlockMask.from_blocks(torch.ones(1, 2, 4, 4).bool(), 32, within=REMEMBERED),
        "from_flex": sf.BlockMask.from_flex(create_block_mask(lambda b, h, i, j: i >= j, None, None, N, N, device="cpu")),
        "per_head": sf.BlockMask.per_head([mask, "causal"]),
        "to": mask.to("meta"),
        "choose_blocks": sf.choose_blocks("causal & pooled(keep=1, block=64)", q, q),
        "topk_blocks": sf.topk_blocks(q, q, keep=2, block_size=32),
        "topk_blocks by query": picks,
        "from_picks": sf.BlockSelection.from_picks(torch.zeros(1, 2, N, 2, dtype=torch.int32), 32, always="sinks(3)"),
        "select of a selection": picks.select(),
        "to of a selection": picks.to("meta"),
    }


with torch.inference_mode():
    MADE = made()


@pytest.mark.parametrize("name", MADE)
def test_no_tensor_of_a_mask_made_in_inference_mode_belongs_to_it(name):
    mask = MADE[name]
    tables = [mask.picks, mask.always] if isinstance(mask, sf.BlockSelection) else [mask, mask.coarse]
    for table in tables:
        tensors = table.tensors() if isinstance(table, sf.BlockMask) else [] if table is None else [table]
        assert not any(tensor.is_inference() for tensor in tensors)


@pytest.mark.parametrize("name", ["compile_mask", "from_blocks", "per_head", "choose_blocks", "topk_blocks by query", REMEMBERED])
@pytest.mark.parametrize("way", ["compiled", "selective checkpointing"])
def test_models_train_with_masks_of_inference_mode(name, way):
    def keep_nothing():
        return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)

    def attend(q):
        return sf.attention(q, q, q, MADE.get(name, REMEMBERED))

    def in_this_way(q):
        if way == "compiled":
            return torch.compile(attend, backend="aot_eager")(q)
        return checkpoint(attend, q, use_reentrant=False, context_fn=keep_nothing)

    q = Q.clone().requires_grad_()
    torch.testing.assert_close(*(torch.autograd.grad(call(q).sum(), q) for call in (in_this_way, attend)))
