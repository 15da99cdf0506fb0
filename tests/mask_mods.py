"""FlexAttention mask functions as people write them: the kinds in attention-gym, and some more."""

import torch
from torch.nn.attention.flex_attention import and_masks, or_masks

TOKENS, BATCH, HEADS = 300, 2, 3
_index = torch.arange(TOKENS)
_document = torch.bucketize(_index, torch.tensor([41, 42, 130, 131, 260]), right=True)
_starts = torch.tensor([0, 41, 42, 130, 131, 260])
_lengths = torch.tensor([180, 271])
_prefix = torch.tensor([17, 120])
_is_image = (_index % 60 >= 10) & (_index % 60 < 25)
_image = torch.cumsum((_index % 60 == 10).int(), 0)
_reach = torch.tensor([1, 40, 300])
_speaker = torch.randint(0, 3, (BATCH, TOKENS), generator=torch.Generator().manual_seed(0))


def causal(b, h, q, kv):
    return q >= kv


def sliding_window(b, h, q, kv):
    return (q >= kv) & (q - kv <= 64)


def symmetric_window(b, h, q, kv):
    return (q - kv).abs() <= 33


def prefix_lm(b, h, q, kv):
    return (kv < 50) | (q >= kv)


def prefix_by_batch(b, h, q, kv):
    return (kv < _prefix[b]) | (q >= kv)


def document(b, h, q, kv):
    return _document[q] == _document[kv]


def document_causal(b, h, q, kv):
    return (_document[q] == _document[kv]) & (q >= kv)


def prefix_in_each_document(b, h, q, kv):
    of_q, of_kv = q - _starts[_document[q]], kv - _starts[_document[kv]]
    return (_document[q] == _document[kv]) & ((of_kv < 9) | (of_q >= of_kv))


def dilated_window(b, h, q, kv):
    return ((q - kv).abs() <= 60) & ((q - kv) % 4 == 0)


def images_before_text(b, h, q, kv):
    within = _is_image[q] & _is_image[kv] & (_image[q] == _image[kv])
    last_image = ~_is_image[q] & _is_image[kv] & (_image[q] == _image[kv])
    return within | last_image | (~_is_image[q] & ~_is_image[kv] & (q >= kv))


def _natten(width, kernel):
    def neighbourhood(b, h, q, kv):
        half = kernel // 2
        row, col = (q // width).clamp(half, TOKENS // width - 1 - half), (q % width).clamp(half, width - 1 - half)
        return ((row - kv // width).abs() <= half) & ((col - kv % width).abs() <= half)

    return neighbourhood


def _tiled_natten(width, kernel, tile):
    def place(i):
        tile_number, inside = i // (tile * tile), i % (tile * tile)
        across = width // tile
        return tile_number // across * tile + inside // tile, tile_number % across * tile + inside % tile

    def neighbourhood_in_tiles(b, h, q, kv):
        (q_row, q_col), (row, col) = place(q), place(kv)
        half = kernel // 2
        return ((q_row - row).abs() <= half) & ((q_col.clamp(half, width - 1 - half) - col).abs() <= half)

    return neighbourhood_in_tiles


def _morton(kernel):
    def place(i):
        row, col = torch.zeros_like(i), torch.zeros_like(i)
        for bit in range(5):
            col = col | ((i >> (2 * bit)) & 1) << bit
            row = row | ((i >> (2 * bit + 1)) & 1) << bit
        return row, col

    def neighbourhood_in_z_order(b, h, q, kv):
        (q_row, q_col), (row, col) = place(q), place(kv)
        return ((q_row - row).abs() <= kernel // 2) & ((q_col - col).abs() <= kernel // 2)

    return neighbourhood_in_z_order


def sinks_and_window(b, h, q, kv):
    return (q >= kv) & ((q - kv <= 48) | (kv < 4))


def _sliding_tiles(canvas, tile, kernel):
    def place(i):
        inside = tile[0] * tile[1] * tile[2]
        number, across = i // inside, [extent // side for extent, side in zip(canvas, tile)]
        return number // (across[1] * across[2]), number // across[2] % across[1], number % across[2]

    def sliding_tiles(b, h, q, kv):
        kept = q >= 0
        for axis, (at, key) in enumerate(zip(place(q), place(kv))):
            last, half = canvas[axis] // tile[axis] - 1, kernel[axis] // 2
            kept = kept & ((torch.clamp(at, half, max(half, last - half)) - key).abs() <= half)
        return kept

    return sliding_tiles


def video_within_frames(b, h, q, kv):
    frame = 50
    return (q // frame - kv // frame).abs() <= 1


def video_across_frames(b, h, q, kv):
    frame = 50
    return ((q % frame - kv % frame).abs() <= 5) | (kv < frame)


def padded_batch(b, h, q, kv):
    return (q < _lengths[b]) & (kv < _lengths[b]) & (q >= kv)


def window_by_head(b, h, q, kv):
    return (q >= kv) & (q - kv < _reach[h])


def by_batch_and_head(b, h, q, kv):
    return (q >= kv) & (q - kv < 30 * (h + 1) + 100 * b)


def shared_prefix(b, h, q, kv):
    question, answer = 60, 80
    same = (q - question) // answer == (kv - question) // answer
    return (q >= kv) & ((kv < question) | same)


def chunks(b, h, q, kv):
    return (q // 70 == kv // 70) & (q >= kv)


def nobody_listens(b, h, q, kv):
    return (kv > q) & (kv < q)


def speaker(b, h, q, kv):
    return _speaker[b, q] == _speaker[b, kv]


MODS = {
    function.__name__: function
    for function in (
        causal,
        sliding_window,
        symmetric_window,
        prefix_lm,
        prefix_by_batch,
        document,
        document_causal,
        prefix_in_each_document,
        dilated_window,
        images_before_text,
        _natten(20, 7),
        _tiled_natten(20, 9, 5),
        _morton(5),
        sinks_and_window,
        _sliding_tiles((6, 10, 5), (2, 5, 5), (1, 2, 1)),
        video_within_frames,
        video_across_frames,
        padded_batch,
        window_by_head,
        by_batch_and_head,
        shared_prefix,
        chunks,
        nobody_listens,
        speaker,
    )
} | {
    "and_masks": and_masks(causal, document, sinks_and_window),
    "or_masks": or_masks(symmetric_window, and_masks(causal, shared_prefix)),
}
