"""The loop: choose cases, measure the missing ones, keep each result, draw."""

import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from sparse_flash.compat.extras import naming_extra

from .measure.noise import MARK, doubts
from .results import Results, environment, has_numbers, why_not
from .workload import FULL_RUN, suites
from .workload.cases import USUAL_SIZES, CallSizes


@dataclass(frozen=True)
class Options:
    """specs: masks to measure instead of the suites' own. sizes: of their calls. imports: files that registered the user's
    patterns, which results depend on. full: see ``suites.choose``. only: parts of case keys; a case with none of them is
    skipped. limit: seconds for each case, None for the device's default. retry: measure cases without numbers, or with doubtful
    ones, again; cases that ran out of time are always tried again."""

    specs: tuple[str, ...] = ()
    suites: tuple[str, ...] = FULL_RUN
    out: Path | None = None
    device: str | None = None
    backend: str = "auto"
    quick: bool = False
    resume: bool = True
    retry: bool = False
    only: tuple[str, ...] = ()
    limit: int | None = None
    sizes: CallSizes = USUAL_SIZES
    imports: tuple[Path, ...] = ()
    full: bool = True


LIMITS = {"cpu": 60, "cuda": 90}


def run(options: Options, console) -> Results:
    """Measures, prints progress to a rich console, and returns the results. An interrupt (KeyboardInterrupt) keeps
    the results so far, and the report is still written."""
    from .report import page  # fails now, not after measuring, where the extra for plots is missing

    device = device_of(options.device)
    chosen = suites.choose(options.suites, device.type, options.quick, options.specs, options.backend, options.sizes, options.full)
    wanted = select_cases(chosen, options.only)
    found = environment(device)
    asked = (*options.specs, *(f"{name} {size}" for name, size in options.sizes.given.items()))
    folder = options.out or default_folder(found["device"] if device.type == "cuda" else "cpu", options.quick, asked)
    results, note = Results.open(folder, found, settings_of(options, device.type), options.resume)
    console.print(f"measuring on {found['device']}; results go to {folder}")
    if not (options.full or options.quick or options.specs or options.sizes.given or options.only):
        minutes = "two to three minutes on two idle cores" if device.type == "cpu" else "some minutes"
        console.print(f"this takes {minutes}; --quick takes seconds, --full measures the peers, short calls and more, in about ten")
    if note:
        console.print(note)
    if device.type == "cpu" and (found["load_at_start"] or 0) > found["cpu_threads"] / 2:
        console.print(f"warning: other programs use this CPU (load average {found['load_at_start']}): times will vary")
    for suite, listed in chosen.items():
        earlier = results.data["suites"].get(suite, [])
        results.data["suites"][suite] = list(dict.fromkeys([*earlier, *(case.key for case in listed)]))
    cases = list(dict.fromkeys(case for _, case in wanted))
    todo = suites.sort_cases(case for case in cases if _needs_measuring(results.get(case.key), options))
    if reused := _describe_reused([entry for case in cases if case not in set(todo) and (entry := results.entry(case.key))]):
        console.print(reused)
    try:
        measure(todo, chosen, results, device, options, console)
    except KeyboardInterrupt:
        console.print(f"interrupted; what was measured is in {results.path}, and the same command goes on from there")
        raise
    finally:
        results.save()
        page.write(results)
    return results


def settings_of(options: Options, kind: str) -> dict:
    """Returns the settings that a results file must share with this run if the run is to add to it. kind: of the device."""
    from .measure.throughput import DTYPES

    dtype = options.sizes.dtype or str(DTYPES[kind]).removeprefix("torch.")
    imports = {path.name: sha256(path.read_bytes()).hexdigest()[:12] for path in options.imports}
    asked = {"specs": list(options.specs), "sizes": options.sizes.given, "imports": imports}
    return {"device": kind, "quick": options.quick, "dtype": dtype} | {name: value for name, value in asked.items() if value}


def device_of(name: str | None):
    """The torch.device of a name; None is a GPU where there is one. Raises ValueError for one that is not measured, or not here."""
    import torch

    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    device_type(name)
    if name != "cpu" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' asked for, but PyTorch finds no GPU here; leave --device out or pass --device cpu")
    return torch.device(name)


def device_type(name: str) -> str:
    """ "cuda" of "cuda:1". Raises ValueError for a device that is not measured."""
    kind = name.partition(":")[0]
    if kind not in LIMITS:
        raise ValueError(f"device must be 'cpu' or 'cuda'; got {name!r}")
    return kind


def select_cases(chosen: dict[str, list], only: Iterable[str]) -> list[tuple[str, Any]]:
    """(suite, case) of the cases whose line contains one of ``only``, or ends with it if that ends in "$"; of all cases without
    ``only``. Raises ValueError if no case does."""
    parts = tuple(only)

    def fits(key: str) -> bool:
        return not parts or any(key.endswith(part[:-1]) if part.endswith("$") else part in key for part in parts)

    found = [(suite, case) for suite, listed in chosen.items() for case in listed if fits(case.key)]
    if parts and not found:
        raise ValueError(f"no case has {' or '.join(map(repr, parts))} in its line; --list without --only prints all lines")
    return found


def _needs_measuring(result: dict | None, options: Options) -> bool:
    if result is None or "over_limit" in result:
        return True
    return options.retry and (not has_numbers(result) or bool(doubts(result)))


def _describe_reused(entries: list[dict]) -> str | None:
    """The cases that are not measured now, and how to measure them."""
    if not entries:
        return None
    first, *_, last = sorted(entry["at"] for entry in (*entries, *entries))
    when = first[:16] if first[:16] == last[:16] else f"{first[:16]} to {last[:16]}"
    text = f"reused: {len(entries)} cases, measured {when.replace('T', ' ')}; --fresh sets them aside and measures anew"
    again = sum(not has_numbers(entry["result"]) or bool(doubts(entry["result"])) for entry in entries)
    return text + (f"; --retry measures the {again} without numbers, or with doubtful ones, again" if again else "")


def measure(todo: list, chosen: dict, results: Results, device, options: Options, console=None) -> None:
    """Measures the cases, in this order, into the results. console: of rich, for the progress; None prints nothing."""
    with naming_extra():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from .measure import throughput
    from .measure.drift import BaselineTimer

    limit, seconds = options.limit or LIMITS[device.type], 0.05 if options.quick else None
    baselines, console = BaselineTimer(device, limit, seconds), console or Console(quiet=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(todo))
        for case in todo:
            bar.update(task, description=case.key[:70])
            with warnings.catch_warnings():
                # Peers warn about what they cannot do before they raise an error, and the error is kept.
                warnings.simplefilter("ignore")
                rivals = suites.find_baselines(case, chosen, results)
                result = baselines.measure(rivals, partial(throughput.run, case, device, limit, seconds))
            results.add(case, result)
            bar.advance(task)
            console.print(f"{case.key}: {_summarize(result)}", highlight=False, markup=False, soft_wrap=True)


def _summarize(result: dict) -> str:
    if not has_numbers(result):
        return why_not(result)
    text = _figures(result)
    return f"{text} {MARK} {'; '.join(why)}" if (why := doubts(result)) else text


def _figures(result: dict) -> str:
    if "compile_s" in result:
        return f"{result['compile_s']:.3f} s, {result['peak_bytes'] / 2**20:.0f} MiB"
    texts = []
    for name in ("forward", "backward", "both"):
        for unit in ("ms", "us"):
            if f"{name}_{unit}" not in result:
                continue
            text = f"{name} {result[f'{name}_{unit}']:.3g} {unit}"
            if result.get(f"{name}_tflops") and result["dtype"] != "float32":
                text += f" ({result[f'{name}_tflops']:.3g} TFLOP/s)"
            if f"{name}_host_us" in result:
                text += f" (host {result[f'{name}_host_us']:.3g} us)"
            texts.append(text)
    return ", ".join(texts if result["correct"] else [*texts, f"WRONG: {result['errors']}"])


def default_folder(device: str, quick: bool, asked: tuple[str, ...] = ()) -> Path:
    """Returns the folder of results by default: a user's own masks and sizes are separate from the suites."""
    own = [f"{'-and-'.join(asked)[:40]}-{sha256(repr(asked).encode()).hexdigest()[:6]}"] if asked else []
    parts = [device, *["quick"] * quick, *own]
    return Path("runs") / "-".join(["bench", *(re.sub(r"[^a-z0-9]+", "-", part.lower()).strip("-") for part in parts)])
