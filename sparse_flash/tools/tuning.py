"""Measures candidate configs of the portable kernels for one GPU and one class of shapes, and stores the faster choices.

The built-in configs need no tuning; this is for GPUs and shapes on which they were not measured. A candidate is chosen if it agrees
with the built-in config's result and is at least LEAST_GAIN faster in a second, alternating measurement. Candidates of a backward
kernel are timed with the whole backward pass, because that is what a caller waits for.
"""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache

import torch

from .. import backends
from ..backends import hopper
from ..backends import triton as triton_backend
from ..kernels.common.layout import as_addressable
from ..kernels.launch import tuned
from ..kernels.portable import configs
from ..masks.compiler import compile_mask

LEAST_GAIN = 0.02
# Largest relative error of a row, by dtype: a few times the error of another summation order.
_TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 1e-3}
_LSE_TOLERANCE = 1e-3
_CONFIRMATIONS = 3


class GpuLost(RuntimeError):
    """A candidate left the GPU in a state in which this process cannot continue."""


@dataclass(frozen=True)
class TuningProblem:
    """Lengths are tokens. pattern: spec text; dense attention of the same shape is also tuned. v_head_dim: of v; by default that of
    q and k."""

    pattern: str = "causal & local(1024)"
    tokens: int = 16384
    heads: int = 16
    head_dim: int = 128
    block_size: int = 128
    dtype: torch.dtype = torch.bfloat16
    v_head_dim: int | None = None

    @property
    def head_dims(self) -> tuple[int, int]:
        """Returns head_dim of q and k, and of v."""
        return self.head_dim, self.v_head_dim or self.head_dim


@dataclass(frozen=True)
class Task:
    """One kernel under one mask. mask: spec text, or "dense". candidates: the built-in config first. run: launches with a config
    and returns the results by name. left_out: how many more do not fit this GPU's shared memory."""

    key: tuned.Key
    problem: TuningProblem
    mask: str
    candidates: tuple
    run: Callable[[object], dict[str, torch.Tensor]]
    left_out: int = 0


@dataclass(frozen=True)
class Trial:
    """milliseconds: the median of a launch, or None if the candidate was skipped. reason: why. fits: whether a multiprocessor of
    this GPU has enough memory for it; if not, Triton reports that before anything runs."""

    config: object
    milliseconds: float | None
    reason: str | None = None
    fits: bool = True


@dataclass(frozen=True)
class Result:
    """trials: in the order of the task's candidates. unreached: candidates for which there was no time. gain: how much faster the
    chosen config is than the built-in one, 0.02 for 2 %; 0 if the built-in one was chosen."""

    task: Task
    trials: tuple[Trial, ...]
    unreached: int
    chosen: object
    gain: float

    @property
    def left_out(self) -> int:
        """Candidates that do not fit this GPU's shared memory."""
        return self.task.left_out + sum(not trial.fits for trial in self.trials)


def unavailable() -> str | None:
    """Why nothing can be tuned on this machine, or None."""
    if not torch.cuda.is_available():
        return "there is no GPU; tuning chooses tile sizes of GPU kernels, and the built-in ones work without it"
    return triton_backend.why_unavailable()


def describe_tile_sizes(device: torch.device) -> str:
    """Says how the tile sizes of the portable kernels on this GPU were chosen."""
    if reason := triton_backend.why_unavailable() or configs.refusal(device):
        return f"none: {reason}"
    return configs.provenance(configs.detect_gpu(device))


def cache_state() -> str | None:
    """A line about the file of choices; None if there is no file."""
    path = tuned.cache_file()
    try:
        count = tuned.count_choices(path)
        return f"{count} tuned config{'' if count == 1 else 's'} in {path}"
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{path} cannot be read ({type(error).__name__}: {error}), and the built-in configs are used; delete it"


def make_tasks(problem: TuningProblem, device: torch.device, backend: str = "auto") -> list[Task]:
    """Returns a task for each portable kernel that ``attention`` would use with this back end, under the pattern and dense.

    Hopper's kernels have no tasks. Kernels with a single candidate are left out. Raises ValueError for shapes that no kernel runs.
    """
    generator = torch.Generator(device).manual_seed(0)
    of_keys, of_values = problem.head_dims
    sparse = compile_mask(problem.pattern, problem.tokens, block_size=problem.block_size, device=device)
    q, k, v, dout = (
        torch.randn((1, problem.heads, problem.tokens, width), generator=generator, device=device).to(problem.dtype)
        for width in (of_keys, of_keys, of_values, of_values)
    )
    inputs = [as_addressable(t) for t in (q, k, v, dout)]
    dim, dim_v = map(configs.padded_head_dim, problem.head_dims)
    shared = configs.detect_gpu(device).shared
    found = []
    for name, mask in ((problem.pattern, sparse), ("dense", None)):
        if mask is not None and mask.keeps_all:
            continue  # attention runs it dense
        block_size = None if mask is None else mask.block_size
        chosen = backends.choose_backend(backend, backends.Call.from_tensors(q, k, v, block_size))
        if chosen not in ("triton", "hopper"):
            raise ValueError(f"back end {chosen!r}, which runs this call, has no configs to tune; tune 'triton'")
        for kernel, run in _kernel_runs(problem, mask, *inputs).items():
            if chosen == "hopper" and (kernel == "forward" or hopper.has_backward(*problem.head_dims)):
                continue  # Hopper's kernels have one config for each shape
            key = tuned.key_of(kernel, problem.dtype, dim, block_size, device, dim_v)
            candidates = configs.candidates(kernel, problem.dtype, of_keys, block_size, of_values, configs.detect_gpu(device))
            fitting = tuple(c for c in candidates if not configs.cannot_fit(c, kernel, problem.dtype, (dim, dim_v), shared))
            if key is not None and len(fitting) > 1:  # None without a GPU to tune for
                found.append(Task(key, problem, name, fitting, run, len(candidates) - len(fitting)))
    return found


def _kernel_runs(problem, mask, q, k, v, dout) -> dict[str, Callable[[object], dict[str, torch.Tensor]]]:
    """Returns ``Task.run`` of each kernel, by name."""
    from ..kernels.portable.backward import attention_backward
    from ..kernels.portable.forward import attention_forward

    scale = problem.head_dim**-0.5
    forward = cache(lambda: attention_forward(q, k, v, mask, scale))

    def backward(**chosen):
        return _name_results("dq dk dv", attention_backward(dout, None, q, k, v, *forward(), mask, scale, **chosen))

    return {
        "forward": lambda config: _name_results("out lse", attention_forward(q, k, v, mask, scale, config=config)),
        "grad_q": lambda config: backward(q_config=config),
        "grad_kv": lambda config: backward(kv_config=config),
    }


def _name_results(names: str, values) -> dict[str, torch.Tensor]:
    return dict(zip(names.split(), values, strict=True))


class Clock:
    """Times launches on the current GPU. hang_seconds: a launch that takes longer counts as hung."""

    def __init__(self, hang_seconds: float = 60.0):
        self.hang_seconds = hang_seconds
        # More than any GPU's L2 cache: a launch starts with a cold cache, as after other layers of a model.
        self.flushed = torch.empty(256 << 20, dtype=torch.int8, device="cuda")

    def finish(self) -> None:
        """Waits for the GPU. Not by synchronize(), which would never return from a hung kernel."""
        event = torch.cuda.Event()
        event.record()
        end = time.monotonic() + self.hang_seconds
        while not event.query():
            if time.monotonic() > end:
                raise GpuLost(f"a launch did not end within {self.hang_seconds:.0f} s")
            time.sleep(1e-4)

    def milliseconds(self, launch: Callable[[], object]) -> float:
        """The median over about a tenth of a second of launches; ``launch`` has run before."""
        first = statistics.median(self._times(launch, 3))
        return statistics.median(self._times(launch, int(min(100, max(5, 100 / max(first, 1e-3))))))

    def _times(self, launch, count: int) -> list[float]:
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        for begin, end in events:
            self.flushed.zero_()
            begin.record()
            launch()
            end.record()
        self.finish()
        return [begin.elapsed_time(end) for begin, end in events]


def tune(
    tasks: list[Task], limit: float, clock: Clock | None = None, advance: Callable[[Task, Trial | None], None] = lambda *_: None
) -> Iterator[Result]:
    """The results, each stored at once. limit: seconds in total; a candidate running at that time is finished, and the built-in
    configs are always measured. advance: called after each candidate, with None for one not reached.

    Raises OSError, before any work, if choices cannot be stored; GpuLost if a candidate leaves the GPU unusable.
    """
    tuned.check_writable()
    clock = clock or Clock()
    end = time.monotonic() + limit
    for index, task in enumerate(tasks):
        now = time.monotonic()
        # A share of the remaining time, so the last task also gets some.
        result = _tune_task(task, clock, now + max(0.0, end - now) / (len(tasks) - index), advance)
        _store(result)
        yield result


def _tune_task(task: Task, clock: Clock, end: float, advance) -> Result:
    builtin = task.candidates[0]
    # Kept alive: otherwise a candidate's result could reuse this memory, with the right values already in it.
    wanted: dict[str, torch.Tensor] = {}
    trials: list[Trial] = []
    for config in task.candidates:
        if trials and (trials[0].milliseconds is None or time.monotonic() >= end):
            advance(task, None)
            continue
        trials.append(_try_config(task, config, wanted, clock))
        advance(task, trials[-1])
    measured = [(trial.milliseconds, trial) for trial in trials if trial.milliseconds is not None]
    chosen, gain = builtin, 0.0
    if measured:
        best = min(measured, key=lambda pair: pair[0])[1].config
        if best != builtin:
            gain = _gain(task, best, clock)
            chosen, gain = (best, gain) if gain >= LEAST_GAIN else (builtin, 0.0)
    return Result(task, tuple(trials), len(task.candidates) - len(trials), chosen, gain)


def _try_config(task: Task, config, wanted: dict, clock: Clock) -> Trial:
    """wanted: the built-in config's results, filled in by its own trial."""
    try:
        for tensor in wanted.values():
            torch.full_like(tensor, float("nan"))  # freed at once: elements that a candidate does not write are then NaN
        got = task.run(config)
        clock.finish()
        reason = disagreement(got, wanted or got)
        if reason:
            return Trial(config, None, f"wrong result: {reason}")
        wanted.update({} if wanted else got)
        return Trial(config, clock.milliseconds(lambda: task.run(config)))
    except GpuLost as error:
        raise GpuLost(f"{describe(config)} for {task.key.kernel}: {error}") from None
    except Exception as error:
        # Whatever a compiler or driver raises, only this candidate is out; the others may still run.
        from ..kernels.launch.launch import OutOfResources

        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0][:120]
        try:
            clock.finish()
        except Exception:
            raise GpuLost(f"{describe(config)} for {task.key.kernel}: {reason}") from None
        return Trial(config, None, reason, fits=not isinstance(error, OutOfResources))


def _gain(task: Task, config, clock: Clock) -> float:
    """Alternates the two, because the fastest of many is partly the luckiest, and clocks drift."""
    ours, theirs = [], []
    for _ in range(_CONFIRMATIONS):
        theirs.append(clock.milliseconds(lambda: task.run(task.candidates[0])))
        ours.append(clock.milliseconds(lambda: task.run(config)))
    return statistics.median(theirs) / statistics.median(ours) - 1


def disagreement(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> str | None:
    """The difference, if it is more than rounding, otherwise None. Compares row by row: one wrong row among thousands shows."""
    for name, right in wanted.items():
        mine, right = got[name].float(), right.float()
        if name == "lse":
            if not torch.allclose(mine, right, rtol=1e-4, atol=_LSE_TOLERANCE):
                return "lse differs"
            continue
        size = right.norm(dim=-1)
        # Rows near zero are mostly rounding errors of cancelled terms.
        error = ((mine - right).norm(dim=-1) / (size + 0.1 * size.mean()).clamp(min=1e-30)).max().item()
        if not error <= _TOLERANCE[wanted[name].dtype]:
            return f"{name} differs by {error:.2g} of a row"
    return None


def describe(config) -> str:
    """In words: tile_m 64, tile_n 128, num_warps 4, num_stages 3."""
    return ", ".join(f"{name} {value}" for name, value in asdict(config).items())


def _store(result: Result) -> None:
    task, problem = result.task, result.task.problem
    times = {trial.config: trial.milliseconds for trial in result.trials}
    if times[task.candidates[0]] is None:
        return  # nothing was learned
    measured = {
        "mask": task.mask,
        "tokens": problem.tokens,
        "heads": problem.heads,
        "head_dim": problem.head_dim,
        "v_head_dim": problem.head_dims[1],
        "milliseconds": times[result.chosen],
        "gain": round(result.gain, 4),
        "date": datetime.date.today().isoformat(),
    }
    tuned.store_choice(task.key, result.chosen, task.candidates[0], measured)
