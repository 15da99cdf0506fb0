"""The benchmark: cases, peers, checks, resuming, and a report whose numbers are the JSON's."""

import json
import signal
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from problems import errors_of, problem
from rich.console import Console

import sparse_flash as sf
from sparse_flash.benchmarks import workload
from sparse_flash.benchmarks.baselines import cudnn_flex, registry
from sparse_flash.benchmarks.measure import accuracy as check
from sparse_flash.benchmarks.measure import noise, throughput
from sparse_flash.benchmarks.report import page
from sparse_flash.benchmarks.report.tables import tables
from sparse_flash.benchmarks.results import Results, has_numbers, why_not
from sparse_flash.benchmarks.run import Options, run
from sparse_flash.benchmarks.workload import cases, masks, suites
from sparse_flash.benchmarks.workload.problem import build_problem

CPU = torch.device("cpu")
QUIET = Console(quiet=True)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("quick", [True, False])
def test_every_case_names_a_known_peer_and_a_readable_mask(device, quick):
    for chosen in suites.choose(suites.SUITES, device, quick).values():
        keys = [case.key for case in chosen]
        assert keys and len(set(keys)) == len(keys)
        assert all(len(json.dumps(case.as_data())) < 5000 for case in chosen)
        attending = [case for case in chosen if isinstance(case, cases.Case)]
        assert all(registry.find_peer(peer) for peer in {case.peer for case in attending})
        assert all(isinstance(case.mask.spec, str) or len(case.mask.spec) == case.shape.heads for case in attending)
        of_heads = [[case.mask.spec] if isinstance(case.mask.spec, str) else case.mask.spec for case in attending]
        assert all(str(sf.parse(text)) for text in {text for texts in of_heads for text in texts})


REFERENCE = registry.SparseFlash("reference")


@pytest.mark.parametrize(
    "spec", ["full", "causal", "local(9)", "causal & documents([0, 100, 180, 256])", "~causal", "butterfly(block=16)"]
)
def test_sampled_check_accepts_what_is_right_and_notices_what_is_not(spec):
    right = problem(spec)
    errors = errors_of(REFERENCE, right)
    assert set(errors) == {"out", "dq", "dk", "dv"} and max(errors.values()) < 1e-4
    wrong = replace(right, mask=problem("local(50) & sinks(200)").mask)
    assert errors_of(REFERENCE, wrong)["out"] > 0.05


def test_sampled_check_knows_the_mask_of_each_head():
    mixed = problem(("causal", "butterfly(block=32)"), block_size=32)
    assert max(errors_of(REFERENCE, mixed).values()) < 1e-4
    assert errors_of(REFERENCE, replace(mixed, patterns=mixed.patterns[::-1]))["dv"] > 0.05
    assert mixed.kept_pairs == mixed.mask.to_dense().sum()


@pytest.mark.parametrize("peer", ["sparse_flash:torch", "sparse_flash-deterministic:torch", "sdpa-math"])
def test_sampled_check_sums_over_the_heads_that_share_keys(peer):
    assert max(errors_of(registry.find_peer(peer), problem("causal", heads=6, kv_heads=2, batch=2)).values()) < 1e-4


def test_sampled_check_looks_at_the_call_without_gradients_too():
    p = problem("causal")
    attend = check.as_attend(p.leaves, REFERENCE.prepare(p))
    errors = check.sampled_errors(p, lambda dout=None: attend(dout) if dout is not None else (torch.zeros_like(p.q),))
    assert errors["out"] > 0.05
    assert not check.is_right({"out": float("nan")}, torch.float32)


def test_a_case_that_runs_long_is_stopped_and_said_so():
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(throughput.OverLimit), throughput.time_limit(1):
        time.sleep(5)
    assert signal.getsignal(signal.SIGALRM) is before


@pytest.mark.parametrize("error, name", [(ZeroDivisionError, "failed"), (torch.OutOfMemoryError, "out_of_memory")])
def test_an_error_of_a_peer_and_lack_of_memory_are_results(error, name, monkeypatch):
    monkeypatch.setattr(registry.SparseFlash, "prepare", mock.Mock(side_effect=error("by zero")))
    result = throughput.run(cases.Case(cases.Shape(1, 1, 128, 16), masks.FULL, "sparse_flash", "paper"), CPU)
    assert "by zero" in result[name] and not has_numbers(result) and "by zero" in why_not(result)


def run_quick(folder: Path, *only: str, **options) -> Results:
    """Without pictures, which take as long as to measure."""
    with mock.patch.object(page, "write"), mock.patch.object(throughput, "CPU_SECONDS", 0.01):
        return run(Options(out=folder, quick=True, device="cpu", only=only, **options), QUIET)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    only = "N512", "N1024 D64 | causal | ", "N1024 D64 | butterfly | ", ", varlen | sparse", ", sinks | sparse", "function | sparse"
    only += (", ALiBi | sparse", "cap | sparse", "N4096 | causal")
    return run_quick(tmp_path_factory.mktemp("bench"), *only)


def test_a_run_by_default_leaves_out_what_takes_minutes_on_a_cpu_and_a_full_one_adds_to_it():
    brief, full = (suites.choose(names, "cpu", full=full) for names, full in ((workload.DEFAULT, False), (workload.FULL_RUN, True)))
    assert all(set(brief[suite]) < set(full[suite]) for suite in workload.DEFAULT) and set(full) - set(brief) == {"peers"}
    ours = [case for case in brief["speedup"] if suites.is_ours(case)]  # what is left out has no part in what stays
    assert all({*suites.find_rivals(case, "speedup", full["speedup"])} <= {*brief["speedup"]} for case in ours)
    own = suites.choose(["length"], "cpu", specs=["strided(8)"], sizes=cases.CallSizes(tokens=16384), full=False)["length"]
    assert 16384 in {case.tokens for case in own}


def test_a_cell_of_the_paper_has_each_pass_and_memory_or_the_reason_why_not(tmp_path):
    data = run_quick(tmp_path, "plain", "N256 D64 | full", suites=("paper",)).data
    results = {key: entry["result"] for key, entry in data["cases"].items()}
    for result in results.values():
        if has_numbers(result):
            assert result["correct"] and min(result[k] for k in ("forward_ms", "backward_ms", "both_ms", "extra_bytes")) > 0
        else:
            assert len(why_not(result)) > 10
    for how in ("plain", "padded", "dropout 0.1", "dropout 0.1, padded"):
        assert has_numbers(results[f"paper | B2 H2 N256 D64 | full | sdpa-math | {how}"])
    for tokens, end in ((128, {"over_limit": 90}), (256, {"out_of_memory": "of 128 GiB"})):
        data["cases"][f"paper | B2 H2 N{tokens} D64 | full | sdpa-math | plain"]["result"] = end
    (forward,) = (table for table in tables(data) if table.title == "Forward, ms, against tokens, plain (B2 H2 D64)")
    assert forward.columns == ["mask, by", "128", "256", "grows as"] and len(forward.rows) == 4
    assert ["full, sdpa-math", "too long", "out of memory", ""] in forward.rows


def test_results_are_complete_and_correct(quick):
    stored = json.loads(quick.path.read_text())
    assert stored == quick.data and "peers" in stored["suites"]
    assert {"torch", "python", "cpu", "date", "source"} <= set(stored["environment"])
    measured = [entry["result"] for entry in stored["cases"].values() if has_numbers(entry["result"])]
    calls = [result for result in measured if "forward_ms" in result]
    assert len(calls) > 10 and all(r["correct"] and r["backward_ms"] > 0 and r["extra_bytes"] > 0 for r in calls)
    assert ["dsinks" in result["errors"] for result in calls].count(True) == 1
    causal = quick.get("B1 H2 N1024 D64 | causal | sparse_flash")
    assert causal["around"].keys() == {"B1 H2 N1024 D64 | causal | sdpa-flash"}
    flops = 4 * 2 * 64 * (1024 * 1025 // 2)  # of kept pairs
    assert causal["forward_tflops"] == pytest.approx(flops / causal["forward_ms"] / 1e9)
    assert causal["backward_tflops"] == pytest.approx(2.5 * flops / causal["backward_ms"] / 1e9)


@pytest.mark.parametrize("spec", ["full", "causal & local(64)", "causal & (local(51) | sinks(4))", "butterfly(block=128)"])
def test_intervals_of_keys_keep_the_pairs_of_the_mask(spec):
    p = build_problem(cases.Case(cases.Shape(2, 1, 512, 16), cases.Mask.of(spec), "cudnn-flex"), CPU, torch.float32)
    edges = cudnn_flex.list_intervals(p)[0, :, :, None]
    within = (torch.arange(512) >= edges).sum(0) % 2 == 0
    assert torch.equal(within, p.kept(0, 0, torch.arange(512)).repeat(2, 1))


def test_an_interrupt_keeps_what_was_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(throughput, "run", mock.Mock(side_effect=[{"refused": "stub"}, KeyboardInterrupt]))
    with pytest.raises(KeyboardInterrupt):
        run(Options(out=tmp_path, quick=True, device="cpu", suites=("speedup",)), QUIET)
    assert list(Results.read(tmp_path).data["cases"]) == ["B1 H2 N1024 D64 | full | sdpa-flash"]
    assert (tmp_path / "report.html").exists()


def test_the_report_is_one_file_with_the_tables_of_the_json(quick):
    written = page.write(Results.read(quick.folder)).read_text()
    assert written.count("data:image/png;base64,") == 4
    assert "http://" not in written and "https://" not in written and "<script" not in written
    for table in tables(quick.data):
        assert table.title in written
        for row in table.rows:
            assert all(f">{cell}<" in written for cell in row if "&" not in cell and "'" not in cell)


COMMITTED = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*/results.json"))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.parent.name)
def test_committed_results_are_read_and_nothing_in_them_is_doubted(path):
    data = Results.read(path.parent).data
    cells = [cell for table in tables(data) for row in table.rows for cell in row]
    assert len(cells) > 10 and not any(cell.endswith(noise.MARK) for cell in cells)
    assert not any("--retry" in said for _, said in page.headlines(data))
    recorded = any(name.endswith("_spread") for case in data["cases"].values() for name in case["result"])  # the oldest have none
    assert any("spread" in table.columns for table in tables(data)) == recorded


@pytest.mark.parametrize("text, said", [("{", "not JSON"), ('{"format": 99}', "format 99")])
def test_unreadable_results_say_so(text, said, tmp_path):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(ValueError, match=said):
        Results.read(tmp_path)


PLAIN = {"block_size": 64}
REFUSED = [
    ("sdpa-flash", "local(9)", {}, "dense"),
    ("fa3", "local(9)", {}, "window"),
    ("fa4", "local(9)", {}, "window"),
    ("cudnn-blocks", "causal", PLAIN, "full blocks"),
    ("cudnn-blocks", "full", PLAIN, "full blocks"),
    ("cudnn-blocks", "butterfly(block=32)", {"block_size": 32}, "blocks of 32"),
    *(("fastvideo", spec, PLAIN | {"head_dim": 64}, "full blocks") for spec in ("causal", "full", "~local(200)")),
    ("fastvideo", "butterfly(block=64)", PLAIN, "head_dim"),
]


@pytest.mark.parametrize("peer, spec, shape, reason", REFUSED, ids=str)
def test_peers_refuse_with_a_reason(peer, spec, shape, reason):
    assert reason in registry.find_peer(peer).refuses(problem(spec, **shape))


def test_peers_refuse_dtypes_and_dropout_and_unknown_ones_are_errors():
    doubled = replace(problem("local(9)"), q=problem("local(9)").q.double())
    assert registry.find_peer("sparse_flash:triton").refuses(doubled)
    assert registry.find_peer("sparse_flash:torch").refuses(doubled) is None
    dropped = replace(problem("full"), dropout_p=0.1)
    assert all("dropout" in registry.find_peer(name).refuses(dropped) for name in ("flex", "fa4"))
    for name in ("flax", "flex:triton"):
        with pytest.raises(ValueError, match="unknown peer"):
            registry.find_peer(name)
