"""FlexAttention mask functions as people write them: the kinds in attention-gym, and some more."""

import torch
from torch.nn.attention.flex_attention import and_masks, or_masks

TOKENS, BATCH, HEADS = 300, 2, 3
_index = torch.arange(TOKENS)
_starts = torch.tensor([0, 41, 42, 130, 131, 260])
_document = torch.bucketize(_index, _starts[1:], right=True)
_lengths = torch.tensor([180, 271])
_is_image = (_index % 60 >= 10) & (_index % 60 < 25)
_image = torch.cumsum((_index % 60 == 10).int(), 0)


def causal(b, h, q, kv):
    return q >= kv


def document(b, h, q, kv):
    return _document[q] == _document[kv]


def prefix_in_each_document(b, h, q, kv):
    of_q, of_kv = q - _starts[_document[q]], kv - _starts[_document[kv]]
    return (_document[q] == _document[kv]) & ((of_kv < 9) | (of_q >= of_kv))


def dilated_window(b, h, q, kv):
    return ((q - kv).abs() <= 60) & ((q - kv) % 4 == 0)


def images_before_text(b, h, q, kv):
    within = _is_image[q] & _is_image[kv] & (_image[q] == _image[kv])
    last_image = ~_is_image[q] & _is_image[kv] & (_image[q] == _image[kv])
    return within | last_image | (~_is_image[q] & ~_is_image[kv] & (q >= kv))


def padded_batch(b, h, q, kv):
    return (q < _lengths[b]) & (kv < _lengths[b]) & (q >= kv)


def by_batch_and_head(b, h, q, kv):
    return (q >= kv) & (q - kv < 30 * (h + 1) + 100 * b)


def nobody_listens(b, h, q, kv):
    return (kv > q) & (kv < q)


RULES = causal, document, prefix_in_each_document, dilated_window, images_before_text
RULES += padded_batch, by_batch_and_head, nobody_listens
MODS = {rule.__name__: rule for rule in RULES} | {
    "and_masks": and_masks(causal, document, dilated_window),
    "or_masks": or_masks(dilated_window, and_masks(causal, document)),
}
