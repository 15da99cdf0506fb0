"""One process or several (``torchrun``): groups, DDP and FSDP2, sums over ranks, sequences over several ranks."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import sparse_flash as sf

from .data import Batch
from .settings import Parallel, Settings


@dataclass(frozen=True)
class World:
    """Describes this process among its peers. mesh: of all processes; None for a process alone. context: the mesh of the ranks that
    share its sequences; None if it shares none."""

    device: torch.device
    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    context: DeviceMesh | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def sharing(self) -> int:
        """Returns how many ranks share a sequence."""
        return self.context.size() if self.context else 1

    @property
    def replicas(self) -> int:
        """Returns how many such groups there are, each with sequences of its own."""
        return self.size // self.sharing

    @property
    def replica(self) -> int:
        return self.rank // self.sharing

    def sum(self, number: torch.Tensor) -> torch.Tensor:
        """Returns the sum over all ranks, in float64."""
        total = number.detach().double()
        if self.mesh is not None:
            dist.all_reduce(total)
        return total

    def agreed(self, number: float) -> float:
        """Returns the first rank's number."""
        tensor = torch.tensor([number], dtype=torch.float64, device=self.device)
        if self.mesh is not None:
            dist.broadcast(tensor, 0)
        return tensor.item()

    def wait(self) -> None:
        if self.mesh is not None:
            dist.barrier()

    @contextmanager
    def first_goes_first(self):
        """The first rank runs the block alone, then the others do."""
        if not self.is_first:
            self.wait()
        yield
        if self.is_first:
            self.wait()


@contextmanager
def join_world(device: str, context: int = 1) -> Iterator[World]:
    """Yields the World of this process, in a process group if torchrun started it. device: cpu, cuda, cuda:1 or auto. context: how
    many ranks share a sequence. Raises ValueError if that does not divide the ranks, and for a device that is not there."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu, cuda, cuda:1, ... or auto; got {device!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {device} needs a GPU, and PyTorch sees none; pass --device cpu")
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if context < 1 or size % context:
        raise ValueError(f"--context, the GPUs that share a sequence, must divide the {size} that torchrun started; got {context}")
    if "RANK" not in os.environ:
        try:
            found = torch.empty(0, device=device).device
        except RuntimeError as error:
            raise ValueError(f"--device {device} is not there: {str(error).splitlines()[0]}; pass cpu or cuda") from error
        yield World(found)
        return
    if device.startswith("cuda"):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    found = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    try:
        yield build_world(found, size, context)
        dist.barrier()  # Gloo's threads drop what they exchanged a little later, which ends a process that is already exiting
    finally:
        dist.destroy_process_group()


def build_world(device: torch.device, size: int, context: int) -> World:
    """The World of a process in the default group, or in one that this makes. Parameters are sharded, and gradients averaged, over
    all ranks, also over ranks that share a sequence: each has the gradients of its own tokens."""
    mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("ranks",))
    both = init_device_mesh(device.type, (size // context, context), mesh_dim_names=("dp", "cp"))
    return World(device, dist.get_rank(), size, mesh, both["cp"] if context > 1 else None)


class ContextPlanner:
    """Plans how the ranks of a context share the tokens of batches. Plans of whole sequences are made once for each length, plans
    of packed documents for each batch. All ranks plan together."""

    def __init__(self, settings: Settings, context: DeviceMesh):
        shape = settings.shape
        self.context, self.packed = context, settings.packed
        self.masks = [settings.mask_of(layer) for layer in range(shape.layers)]
        self.heads = {"heads": shape.heads, "kv_heads": shape.kv_heads}
        self.plans: dict[int, list[sf.ContextPlan]] = {}  # by length

    def plans_of(self, batch: Batch) -> list[sf.ContextPlan]:
        """Returns the plan of each layer."""
        if self.packed:
            documents = sf.documents(batch.boundaries)
            masks = [sf.parse(mask) & documents for mask in self.masks]
            return sf.context_parallel(masks, batch.tokens.numel(), self.context, **self.heads)
        length = batch.tokens.shape[1]
        if length not in self.plans:
            self.plans[length] = sf.context_parallel(self.masks, length, self.context, **self.heads)
        return self.plans[length]


def distribute_model(model: nn.Module, world: World, kind: Parallel) -> nn.Module:
    """The model over all ranks. FSDP2 shards each block and keeps bfloat16 copies for the passes on a GPU."""
    if world.mesh is None:
        return model
    if kind == "ddp":
        devices = [world.device.index] if world.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices)
    # Positions stay in float32: casting what comes into a block would round them.
    dtype = torch.bfloat16 if world.device.type == "cuda" else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        fully_shard(block, mesh=world.mesh, mp_policy=policy)
    return fully_shard(model, mesh=world.mesh, mp_policy=policy)


def mixed_precision(model: nn.Module, world: World):
    """bfloat16 autocast on a GPU, except where FSDP2 casts parameters itself."""
    if world.device.type != "cuda" or isinstance(model, FSDPModule):
        return nullcontext()
    return torch.autocast("cuda", torch.bfloat16)


@contextmanager
def sync_gradients(model: nn.Module, now: bool):
    """Gradients go to the other ranks with the last pass of a step alone."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)
        yield
    elif isinstance(model, DistributedDataParallel) and not now:
        with model.no_sync():
            yield
    else:
        yield


def unwrap_ddp(model: nn.Module) -> nn.Module:
    """The model within DDP's wrapper."""
    return model.module if isinstance(model, DistributedDataParallel) else model
