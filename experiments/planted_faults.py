"""Plants one fault at a time in a copy of the checkout, and says which test catches it.

    python -m experiments.planted_faults --out before.json --jobs 2
    python -m experiments.planted_faults --out before.json --all               # then survivors, against all tests
    python -m experiments.planted_faults --out trial.json --only "1,17,masks/*"

Results are kept in the file after each fault; faults that it has are not tried again. A fault is caught if a test fails with it and
passes without it. Tests that fail without it, and those that compare hashes of sources, do not count. pytest stops at the first
failure; a run past the time limit is "timeout", which is not caught.

Each job has a copy of the files that git tracks or does not ignore, so the checkout stays as it is. The environment must hold the
checkout as ``pip install -e`` installs it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Annotated, NamedTuple

import typer

from .files import whole_file

ROOT = Path(__file__).resolve().parent.parent
# Tests that start several processes run too. test_the_table_of_chips_... compares hashes of kernels, which any change changes.
PYTEST = ["-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--hypothesis-seed=0", "-m", "not compiles"]
PYTEST += ["-k", "not table_of_chips"]
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?\[.*?\]|\S+)(?: - .*)?$", re.MULTILINE)
# Python runs this at its start, in processes that tests start too: the package is the copy's.
STARTUP = """import sys
for name, finder in list(sys.modules.items()):
    if name.startswith("__editable__") and "sparse_flash" in name:
        finder.MAPPING.update({key: path.replace(%r, %r, 1) for key, path in finder.MAPPING.items()})
"""


class Fault(NamedTuple):
    """tests: folders and files of tests/ that run first. old: text that the file has once. new: what replaces it."""

    number: str
    file: str
    tests: list[str]
    what: str
    old: str
    new: str

    @property
    def path(self) -> Path:
        return Path("" if self.file.startswith("patterns/") else "sparse_flash", f"{self.file}.py")

    def first_tests(self, root: Path) -> list[str]:
        """Returns those that exist, as tests may move; all tests if none does."""
        paths = [Path("tests", name) for name in self.tests]
        paths = [path if (root / path).is_dir() else path.with_suffix(".py") for path in paths]
        return [str(path) for path in paths if (root / path).exists()] or ["tests"]


def read_faults(text: str) -> list[Fault]:
    """Reads two lines a fault: "@ number file | tests | description", then "old text  =>  new text", where \\n is a new line."""
    faults = []
    for entry in text.split("\n@ ")[1:]:
        head, change = entry.rstrip("\n").split("\n")
        place, tests, what = head.split(" | ")
        old, new = change.replace("\\n", "\n").split("  =>  ")
        faults.append(Fault(*place.split(), tests.split(), what, old, new))
    return faults


class Copy:
    """A copy of the checkout, in which Python runs."""

    def __init__(self, folder: Path):
        self.root, startup = folder / "checkout", folder / "startup"
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")[:-1]:
            if (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        startup.mkdir()
        (startup / "sitecustomize.py").write_text(STARTUP % (str(ROOT), str(self.root)))
        self.environment = os.environ | {"PYTHONPATH": str(startup), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}

    def plant(self, faults: list[Fault]) -> None:
        for fault in faults:
            text = (self.root / fault.path).read_text()
            (self.root / fault.path).write_text(text.replace(fault.old, fault.new))

    def restore(self, faults: list[Fault]) -> None:
        for fault in faults:
            shutil.copyfile(ROOT / fault.path, self.root / fault.path)

    def run(self, arguments: list[str], limit: float) -> tuple[int | None, str]:
        """Returns (the exit code, None past the limit of seconds; what Python printed)."""
        shutil.rmtree(self.root / ".hypothesis", ignore_errors=True)  # what failed under other faults
        command, pipe = [sys.executable, *arguments], subprocess.PIPE
        process = subprocess.Popen(
            command, cwd=self.root, env=self.environment, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        try:
            printed, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return None, ""
        return process.returncode, printed

    def check(self, faults: list[Fault]) -> None:
        """Ends the program unless every old text is there once, and all modules import from the copy with all faults planted."""
        found = [(one, self.root / one.path) for one in faults]
        gone = [one for one, path in found if not path.exists() or path.read_text().count(one.old) != 1]
        if gone:
            listed = "\n".join(f"{one.number} {one.path}: {one.old}" for one in gone)
            sys.exit(f"each file must have the old text of its faults once; these have not:\n{listed}")
        self.plant(faults)
        modules = sorted({f"sparse_flash.{fault.file.replace('/', '.')}" for fault in faults})
        program = "import importlib as i, sys\nfor one in sys.argv[2:]: assert sys.argv[1] in i.import_module(one).__file__, one"
        code, printed = self.run(["-c", program, str(self.root), *modules], 600)
        self.restore(faults)
        if code:
            sys.exit(f"faults must leave modules that import; got {printed}")

    def try_fault(self, fault: Fault, tests: list[str], limit: float, broken: list[str]) -> dict:
        """broken: tests that fail without a fault, to which it adds."""
        begin, status, failed = time.monotonic(), None, ""
        while status is None:
            self.plant([fault])
            code, printed = self.run([*PYTEST, *tests, *(f"--deselect={name}" for name in list(broken))], limit)
            self.restore([fault])
            failed = next(iter(FAILED.findall(printed.rpartition("short test summary info")[2])), "")
            if code in (None, 0):
                status = "timeout" if code is None else "survived"
            elif not failed:
                status, failed = ("error" if code in (4, 5) else "caught"), f"exit code {code}: {printed[-500:]}"
            elif self.run([*PYTEST, failed, *["--collect-only"] * ("::" not in failed)], limit)[0] not in (1, 2):
                status = "caught"
            else:
                broken.append(failed)
        return {"status": status, "test": failed, "seconds": round(time.monotonic() - begin), "ran": " ".join(tests)}


def line_of(fault: Fault, entry: dict) -> str:
    return f"{fault.number:>2}  {fault.file}: {fault.what}  {entry['status'].upper()} {entry['test']}  {entry['seconds']} s"


def main(
    out: Annotated[Path, typer.Option(help="The JSON file of results.")],
    only: Annotated[str, typer.Option(help="Numbers of faults and globs of their files, separated by commas.")] = "*",
    jobs: Annotated[int, typer.Option(help="Faults tried at a time.")] = 1,
    all_tests: Annotated[bool, typer.Option("--all", help="Run all tests for faults that survive their first ones.")] = False,
    limit: Annotated[float, typer.Option(help="Seconds of a run; ten times as many with all tests.")] = 1800,
) -> None:
    wanted, lock = only.split(","), Lock()
    faults = read_faults(FAULTS)
    chosen = [one for one in faults if any(one.number == each or fnmatchcase(one.file, each) for each in wanted)]
    results = json.loads(out.read_text()) if out.exists() else {"broken": [], "faults": {}}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    def keep(fault: Fault, entry: dict) -> None:
        with lock, whole_file(out) as partial:
            results["faults"][fault.number] = {"file": fault.file, "what": fault.what, "commit": commit, **entry}
            partial.write_text(json.dumps(results, indent=1) + "\n")
        typer.echo(line_of(fault, entry))

    def work(fault: Fault) -> None:
        copy = copies.get()
        if fault.number not in results["faults"]:
            keep(fault, copy.try_fault(fault, fault.first_tests(ROOT), limit, results["broken"]))
        entry = results["faults"][fault.number]
        if all_tests and entry["status"] == "survived" and entry["ran"] != "tests":
            keep(fault, copy.try_fault(fault, ["tests"], 10 * limit, results["broken"]))
        copies.put(copy)

    with TemporaryDirectory(prefix="planted-faults-") as folder, ThreadPoolExecutor(jobs) as threads:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for number in range(jobs):
            copies.put(Copy(Path(folder, str(number))))
        first = copies.get()
        first.check(faults)
        copies.put(first)
        list(threads.map(work, chosen))
    known = [(fault, results["faults"][fault.number]) for fault in faults if fault.number in results["faults"]]
    typer.echo("\n".join(["", *(line_of(*one) for one in known)]))
    caught = sum(entry["status"] == "caught" for _, entry in known)
    typer.echo(f"{caught} of {len(known)} caught; {len(faults) - len(known)} not tried; fail without a fault: {results['broken']}")


FAULTS = r"""
@ 1 patterns/local | patterns/test_patterns | a window keeps one key more on the left
return q - self.window + 1, q + self.window  =>  return q - self.window, q + self.window
@ 2 patterns/neighborhood | patterns/test_patterns | an even window has its further cell after the query, not before
np.clip(leader - window // 2, 0,  =>  np.clip(leader - (window - 1) // 2, 0,
@ 3 patterns/video_layout | patterns/test_tiles patterns | a window at the last border is cut off instead of shifted inward
start = np.clip(q - window // 2, 0, tiles - window)  =>  start = np.clip(q - window // 2, 0, tiles - 1)
@ 4 masks/compiler | masks/test_compiler masks/test_block_mask | a cut last row of blocks takes the tiles of whole rows
+ (self.grid.heights(rows) < size) * 2 + (self.grid.widths(cols) < size)  =>  + (self.grid.widths(cols) < size)
@ 5 masks/table | masks/test_splits masks/test_block_mask | runs of a split made on the device begin before the split
torch.minimum(torch.maximum(bound, low), high)  =>  torch.minimum(bound, high)
@ 6 masks/spec | masks/test_spec | a tuple of one value is written without its comma
{',' if len(value) == 1 else ''})"  =>  )"
@ 7 masks/cache | masks/test_from_flex | a converted mask stays though data that its function reads changed
if converted is not None and old_state == state and all(  =>  if converted is not None and all(
@ 8 masks/block_mask | masks/test_per_head masks/test_block_mask | masks that differ in their tiles alone count as equal
*self.by_query.in_use()[:5], *self.tiles):  =>  *self.by_query.in_use()[:5]):
@ 9 masks/coarsen | masks/test_block_mask masks/test_compiler masks | a run tile and a bit tile count as one where blocks merge
number = 1 + np.where(kind > 0, 2 * tile + kind, 0)  =>  number = 1 + np.where(kind > 0, tile + kind, 0)
@ 10 choosers/built_in | masks/test_chooser choosers api/test_choose | sampled reduces by the mean by default
default_reduce: ClassVar[str] = "max"  =>  default_reduce: ClassVar[str] = "mean"
@ 11 masks/build | masks/test_block_mask masks/test_per_head | heads with masks are dense if one head keeps everything
keeps_all=all(m.keeps_all for m in masks),  =>  keeps_all=any(m.keeps_all for m in masks),
@ 12 masks/from_maps | masks/test_from_lists test_refusals | negative counts of lists are not refused
bool(((counts < 0) | (counts > len(entry))).any())  =>  bool((counts > len(entry)).any())
@ 13 choosers/rules_torch | choosers/test_rules api/test_choose | a share of 0.07 of 100 blocks keeps 8
.double() - _ROUNDING).long()  =>  .double()).long()
@ 14 choosers/choose | api/test_choose choosers | queries that do not exist take part in a choice
(lengths.kv_starts, lengths.kv_lens, lengths.q_lens)  =>  (lengths.kv_starts, lengths.kv_lens, None)
@ 15 kernels/choosers/rules | choosers/test_rules choosers | blocks kept in any case are dropped if their score is -inf
kept = kept | (is_forced != 0)  =>  kept = kept | ((is_forced != 0) & (ordered > _NEVER))
@ 16 selection/choice | selection/test_choice | a query's own block counts among the best before it
possible = (column < before) & ~scores.isnan()  =>  possible = (column <= before) & ~scores.isnan()
@ 17 selection/torch | test_properties selection/test_selected_attention | picks by query head read the keys of another key head
torch.arange(self.heads, device=q.device) * k.shape[1] // self.heads  =>  torch.arange(self.heads, device=q.device) % k.shape[1]
@ 18 selection/decode | test_properties selection/test_selected_decoding | kv_lens beyond the cache's capacity are taken as they are
kv_lens.long().clamp(max=capacity)  =>  kv_lens.long()
@ 19 kernels/selection/pick_blocks | selection/test_choice | strides before a block count
inside = tl.minimum(step + REACH, PER_BLOCK) - tl.maximum(step, 0)  =>  inside = tl.minimum(step + REACH, PER_BLOCK) - step
@ 20 packed/gather_rows | test_properties api/test_varlen | tokens of no document have lse 0
.masked_fill_((index < 0)[:, None, None], fill)  =>  .masked_fill_((index < 0)[:, None, None], 0.0)
@ 21 packed/repack | test_properties api/test_varlen | a document's last block of keys is taken whole
k_len[d] - cols[piece] * BLOCK, BLOCK)  =>  BLOCK, BLOCK)
@ 22 api/varlen | test_properties api/test_varlen | scale is ignored
options: dict[str, Any] = {"scale": scale, "return_lse": True  =>  options: dict[str, Any] = {"scale": None, "return_lse": True
@ 23 api/arguments | test_refusals api | an error of empty tensors does not say what it got
must not be empty; got shape {tuple(tensor.shape)}")  =>  must not be empty")
@ 24 api/call | test_refusals test_properties | checks of a call are remembered whatever the shape of v
        return layouts((q, k, v))\n    except  =>          return layouts((q, k))\n    except
@ 25 api/layer | api/test_layer | a cache keeps the graph of keys and values that require gradients
in enumerate((k.detach(), v.detach())):  =>  in enumerate((k, v)):
@ 26 api/decoding_arguments | test_properties api/test_decode | scales of keys and values may have different strides
if found[0].stride() != found[1].stride() or found[0].stride(2) != 1:  =>  if found[0].stride(2) != 1:
@ 27 dispatch/operators | test_properties dispatch | a NaN gradient of lse reaches inputs through queries that keep nothing
backends.zero_keyless_queries(dlse, lse)  =>  dlse.contiguous()
@ 28 dispatch/operators | test_properties dispatch api/test_attention | compiled code takes the default scale from v's head_dim
    q.shape[3] ** -0.5 if scale is None else scale\n    call = A  =>  v.shape[3] ** -0.5 if scale is None else scale\n    call = A
@ 29 dispatch/operators | dispatch | forward-mode differentiation is not refused
if in_differentiating_transform() or has_forward_derivative(*tensors):  =>  if in_differentiating_transform():
@ 30 variant/definition | test_properties variant | ALiBi counts queries from the first key where lengths differ
slopes * (pairs.q_pos - pairs.key).abs()  =>  slopes * (pairs.query - pairs.key).abs()
@ 31 variant/definition | test_properties variant | sinks are left out of lse
total = torch.logaddexp(lse, sinks.to(lse.dtype).clamp(min=lowest)[:, None].expand_as(lse))  =>  total = lse.clone()
@ 32 variant/definition | test_properties variant | tokens that do not exist are cleared in the caller's tensors
return x.clone().masked_fill_(~exist[:, None, :, None], 0.0)  =>  return x.masked_fill_(~exist[:, None, :, None], 0.0)
@ 33 variant/variant | test_properties variant dispatch | compiled code gives no gradient of rel_bias
learned=LEARNED in words,  =>  learned=False,
@ 34 backends/torch | test_properties variant backends | the backward pass does not divide by the share that dropout keeps
dscores.div_(rule.kept_share).add_(minus_delta)  =>  dscores.add_(minus_delta)
@ 35 backends/torch | test_properties api/test_attention backends | results do not keep q's memory order
values.dtype == x.dtype and values.stride() == empty_out(x, values.shape[3], "meta").stride()  =>  values.dtype == x.dtype
@ 36 backends/torch | api/test_decode | decoding takes one mask for all heads if the first sequence's heads share one
mask.mask_index[sequence if len(mask.mask_index) > 1 else 0].unique()  =>  mask.mask_index[0].unique()
@ 37 backends/aten_cpu | backends/test_cpu | dQ of a row in several pieces is that of one piece
dq[call.rows] = dq[call.rows] + of_q if call.merges else of_q  =>  dq[call.rows] = of_q
@ 38 backends/triton | backends api test_refusals | a head_dim of v above 256 is not refused
(widest := max(call.head_dim, call.v_head_dim)) > MAX_HEAD_DIM  =>  (widest := call.head_dim) > MAX_HEAD_DIM
@ 39 kernels/portable/forward | test_properties variant api/test_attention | values of keys that do not exist may be NaN
v = tl.where(exists[:, None], v, 0.0)  =>  v = tl.where(exists[:, None], v, v)
@ 40 kernels/portable/backward | kernels/test_one_launch test_properties api/test_attention | the gradient of lse has the wrong sign
delta -= tl.load(dlse + query,  =>  delta += tl.load(dlse + query,
@ 41 kernels/portable/backward | kernels/test_one_launch test_properties masks/test_per_head | dK takes the key head's mask
load_mask_number(rows, batch, head), first //  =>  load_mask_number(rows, batch, kv_head), first //
@ 42 kernels/portable/scores | test_properties variant | steps partly within max_distance take the last element of rel_bias
(first_distance - (sizes.TILE_M - 1) >= REACH)  =>  (first_distance >= REACH)
@ 43 kernels/portable/decode | test_properties api/test_decode | splits past the last one are merged
exists = row < (splits.count - split) * ROWS  =>  exists = row < ROWS
@ 44 kernels/portable/merge | parallel/test_merges | a partial result that is NaN leaves no trace
merges |= theirs != theirs  =>  merges |= theirs > 0.0
@ 45 dispatch/call | kernels/test_replay kernels/test_specialization | calls of other strides repeat a launch
(t.dtype, t.device, t.layout, t.shape, t.stride()) for t in tensors  =>  (t.dtype, t.device, t.layout, t.shape) for t in tensors
@ 46 kernels/launch/launch | masks/test_per_head test_properties | kernels swap the strides of batch and heads in mask_index
return (index, *table[:5], *mask.tiles, *strides)  =>  return (index, *table[:5], *mask.tiles, *reversed([*strides]))
@ 47 kernels/hopper/backward_rows | kernels/test_hopper_on_cpu | delta lacks dropout's share
delta *= share  =>  delta *= 1.0
@ 48 kernels/hopper/scores | kernels/test_hopper_on_cpu | ALiBi's backward pass counts queries from the first key
near, far = column, row + (first_key - first_query - self.offset)  =>  near, far = column, row + (first_key - first_query)
@ 49 kernels/hopper/lengths | kernels/test_hopper_on_cpu | one token past the last that exists is not cleared
exist = ((rows >= first) & (rows < last))[:, None]  =>  exist = ((rows >= first) & (rows <= last))[:, None]
@ 50 parallel/routes | parallel | rows whose queries travel are attended by their owner too
rows = own if shared is None else np.where(shared[own], -1, own)  =>  rows = own
@ 51 parallel/estimates | parallel/test_plans | overlapping an exchange is taken to cost nothing
np.maximum(call, travel) + _COST_OF_HIDING * np.minimum(call, travel)  =>  np.maximum(call, travel)
@ 52 parallel/attend | parallel/test_ranks parallel | every rank takes the sinks of the first rank's heads
(self._ranks, -1))[self._rank]  =>  (self._ranks, -1))[0]
@ 53 integrations/transformers/attend | integrations/test_transformers_runs | padding on the left is not moved by a cache's length
"q_starts": starts - earlier,  =>  "q_starts": starts,
@ 54 integrations/flash_attn | integrations/test_flash_attn | causal does not replace the right end of a window
"right": 0 if causal else right}  =>  "right": 0 if causal and right < 0 else right}
@ 55 integrations/block_sparse_attn | integrations/test_block_sparse_attn | the last blocks of streaming heads round the other way
stop = row + 1 - (q_len - kv_len) // _BLOCK if causal  =>  stop = row + 1 + (kv_len - q_len) // _BLOCK if causal
@ 56 integrations/sdpa | test_refusals integrations/test_sdpa | causal calls with fewer queries than keys are not refused
if q_len != kv_len:  =>  if q_len > kv_len:
@ 57 integrations/diffusers | integrations/test_diffusers | dense steps are sparse where a cache is enabled
if not (dense or self.keeps_all):  =>  if not dense:
@ 58 tools/explain | tools/test_explain | blocks cut off by the end count as partial
int((kept < pairs).sum())  =>  len(partial.rows)
@ 59 cli/masks | cli/test_cli | show ignores --kv-len
"kv_len": kv_len, "block_size": block_size, "layout"  =>  "kv_len": None, "block_size": block_size, "layout"
@ 60 compat/captured | compat/test_captured masks | arrays that change in place are taken for the same data
None if value.dtype.hasobject else zlib.crc32(np.ascontiguousarray(value).tobytes())  =>  None
"""

if __name__ == "__main__":
    typer.run(main)
