"""A pool of processes, one for each rank, that run any importable function: a gloo group on the CPU, or with RANKS_DEVICE=cuda an
NCCL group with a GPU for each rank. RANKS_PATIENCE: seconds that a function may take; then each rank writes where it is."""

import faulthandler
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

DEVICE = os.environ.get("RANKS_DEVICE", "cpu")
PATIENCE = float(os.environ.get("RANKS_PATIENCE", 600 if DEVICE == "cuda" else 120))  # on GPUs each rank compiles its kernels


class Pool:
    """Processes that stay until ``close``."""

    def __init__(self, ranks: int, folder: Path):
        self.ranks = ranks
        # Forks of a process that has imported everything start at once.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(
            ["torch._dynamo.testing", "sparse_flash.integrations.transformers", "transformers.models.llama"]
        )
        pipes = [context.Pipe() for _ in range(ranks)]
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(rank, ranks, str(folder / f"rendezvous{ranks}"), theirs), daemon=False)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    def run(self, function: Callable[..., Any], *arguments: object, **options: object) -> list[Any]:
        """Runs an importable function on each rank; returns its results. Raises AssertionError with what a rank raised."""
        for pipe in self._pipes:
            pipe.send((function, arguments, options))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(PATIENCE), f"rank {rank} of {self.ranks} does not answer"
            try:
                answers.append(pipe.recv())
            except EOFError:
                answers.append((None, "the process ended"))
        errors = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(answers) if error]
        assert not errors, "\n".join(errors)
        return [result for result, _ in answers]

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.close()
            process.kill()
            process.join()


def _serve(rank: int, ranks: int, rendezvous: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    torch.set_default_device(DEVICE)
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    while True:
        function, arguments, options = pipe.recv()
        faulthandler.dump_traceback_later(0.9 * PATIENCE)
        try:
            pipe.send((function(*arguments, **options), None))
        except Exception:
            pipe.send((None, traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()
