"""The current GPU and stream as numbers, which the host looks up at every launch. PyTorch's public calls create a stream object and
take 3 us longer. None in a PyTorch without CUDA."""

from contextlib import nullcontext

import torch

# () -> the index of the current GPU
current_gpu = getattr(torch._C, "_cuda_getDevice", None)
# (index of a GPU) -> the address of its current stream
raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)

_AS_IT_IS = nullcontext()


def current_device(device: torch.device):
    """Context that makes the tensors' GPU current, on which Triton launches."""
    if device.type != "cuda" or device.index == current_gpu():  # type: ignore[misc]  # None only in builds without GPUs
        return _AS_IT_IS
    return torch.cuda.device(device)
