"""Trains on the same data by ``transformers.Trainer``, which compiles the model: padded or packed, under ``use_sparse_flash``.

python -m examples.train_lm hf-train --mask "causal & local(1024)" --layout packed --length 16384
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from sparse_flash.integrations.transformers import use_sparse_flash

from .data import Batch, Stream, Tokens
from .export import config_of
from .hf_model import SparseLMForCausalLM
from .model import IGNORED
from .settings import Settings, Shape

Layout = Literal["whole", "padded", "packed"]


@dataclass(frozen=True)
class Arm:
    """Names the attention: a mask by spec text, under ``use_sparse_flash``, or a kernel of PyTorch's own causal attention by its
    name in ``SDPBackend``."""

    mask: str | None = None
    kernel: str | None = None


class Windows(Dataset):
    """Sequences of the training text, in the trainer's order."""

    def __init__(self, stream: Stream, length: int, count: int):
        self.stream, self.length, self.count = stream, length, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Batch:
        return self.stream.batch(number * self.length, 1, self.length)


def collate_whole(batches: list[Batch]) -> dict:
    """Returns sequences of one length. Transformers shifts labels itself."""
    tokens = torch.cat([batch.tokens for batch in batches])
    return {"input_ids": tokens, "labels": tokens}


def collate_padded(batches: list[Batch]) -> dict:
    """Keeps between half and all of each sequence; the rest is padding, as in a batch of texts of different lengths."""
    given = collate_whole(batches)
    length = given["input_ids"].shape[1]
    stops = [length - (batch.starts[0] * 7919) % (length // 2) for batch in batches]
    mask = torch.arange(length)[None] < torch.tensor(stops)[:, None]
    return {
        "input_ids": given["input_ids"].where(mask, 0),
        "labels": given["labels"].where(mask, IGNORED),
        "attention_mask": mask.long(),
    }


def collate_packed(batches: list[Batch]) -> dict:
    """Returns all documents of the sequences in one row, as ``DataCollatorWithFlattening`` does. None sees another."""
    given = collate_whole(batches)
    tokens = given["input_ids"].reshape(1, -1)
    length = given["input_ids"].shape[1]
    ends = [np.asarray(batch.boundaries[:-1]) + number * length for number, batch in enumerate(batches)]
    bounds = torch.from_numpy(np.append(np.concatenate(ends), tokens.shape[1])).to(torch.int32)
    position = torch.arange(tokens.shape[1])
    starts = bounds[torch.searchsorted(bounds, position, right=True) - 1]
    labels = tokens.clone()
    labels[0, bounds[:-1].long()] = IGNORED  # nothing predicts the first token of a document
    both = {f"cu_seq_lens_{side}": bounds for side in "qk"} | {f"max_length_{side}": length for side in "qk"}
    return {"input_ids": tokens, "labels": labels, "position_ids": (position - starts)[None], **both}


COLLATE = {"whole": collate_whole, "padded": collate_padded, "packed": collate_packed}


def train_arm(
    arm: Arm,
    shape: Shape,
    data: Path,
    out: Path,
    layout: Layout = "whole",
    length: int = 16_384,
    batch: int = 1,
    steps: int = 50,
    learning_rate: float = 1e-3,
    compiled: bool = True,
    seed: int = 0,
) -> list[float]:
    """Returns the training loss of each step. Raises ValueError for arguments that cannot work."""
    if layout not in get_args(Layout):
        raise ValueError(f"layout must be one of {', '.join(get_args(Layout))}; got {layout!r}")
    if (arm.mask is None) == (arm.kernel is None):
        raise ValueError("pass either --mask or --kernel")
    if arm.kernel is not None and arm.kernel not in SDPBackend.__members__:
        raise ValueError(f"kernel must be one of {', '.join(SDPBackend.__members__)}; got {arm.kernel!r}")
    torch.manual_seed(seed)
    config = config_of(Settings(shape, length=length), ["causal"] * shape.layers)
    config._attn_implementation = "sdpa"
    model = SparseLMForCausalLM(config)
    if arm.mask is not None:
        use_sparse_flash(model, arm.mask)
    on_gpu = torch.cuda.is_available()
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=steps,
        per_device_train_batch_size=batch,
        learning_rate=learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, steps // 10),
        bf16=on_gpu,
        use_cpu=not on_gpu,
        torch_compile=compiled,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        seed=seed,
    )
    stream = Stream(Tokens(data, "train", shape.vocabulary), length, seed)
    trainer = Trainer(model, arguments, data_collator=COLLATE[layout], train_dataset=Windows(stream, length, batch * steps))
    kernel = nullcontext() if arm.kernel is None else sdpa_kernel(SDPBackend.__members__[arm.kernel])
    with kernel:
        trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]
