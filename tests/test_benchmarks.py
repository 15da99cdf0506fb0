"""The benchmark: cases, peers, checks, resuming, and a report whose numbers are the JSON's."""

import json
import signal
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

import sparse_flash as sf
from sparse_flash.benchmarks import cases, check, measure, peers, report
from sparse_flash.benchmarks.results import Results, finished
from sparse_flash.benchmarks.run import Options, run
from sparse_flash.benchmarks.tables import tables

CPU = torch.device("cpu")
QUIET = Console(quiet=True)


def problem(spec, tokens=256, block=128, heads=2, head_dim=16):
    generator = torch.Generator().manual_seed(1)
    pattern = sf.parse(spec)
    leaves = [torch.randn(1, heads, tokens, head_dim, generator=generator).requires_grad_() for _ in range(3)]
    return peers.Problem(pattern, sf.compile_mask(pattern, tokens, block_size=block), *leaves)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("quick", [True, False])
def test_every_case_names_a_known_peer_and_a_readable_mask(device, quick):
    for chosen in cases.choose(cases.SUITES, device, quick).values():
        keys = [case.key for case in chosen]
        assert keys and len(set(keys)) == len(keys)
        for case in chosen:
            assert str(sf.parse(case.spec)) and json.dumps(case.as_data())
            if isinstance(case, cases.Case):
                assert peers.peer(case.peer)


@pytest.mark.parametrize("shape", cases.PEER_SHAPES, ids=str)
def test_documents_of_the_peer_rows_are_token_over_length(shape):
    masks = {mask.label: mask.spec for mask in cases.peer_masks(shape)}
    if "causal in 7 documents" in masks:
        documents = sf.parse(masks["causal in 7 documents"].removeprefix("causal & "))
        document = np.arange(shape.tokens) // (shape.tokens // 7)
        starts = np.flatnonzero(np.diff(document, prepend=-1))
        assert documents.cu_seqlens == (*starts, shape.tokens)


def test_the_peer_rows_hold_every_mask_of_the_main_shape():
    labels = {mask.label for mask in cases.peer_masks(cases.Shape(1, 16, 16384, 128))}
    assert labels == {"full", "causal", "causal & window 1024", "butterfly", "strided", "causal in 7 documents"}


@pytest.mark.parametrize(
    "spec", ["full", "causal", "local(9)", "causal & documents([0, 100, 180, 256])", "~causal", "butterfly(block=16)"]
)
def test_sampled_check_accepts_what_is_right_and_notices_what_is_not(spec):
    right = problem(spec)
    errors = check.sampled_errors(right, peers.SparseFlash("reference").prepare(right))
    assert set(errors) == {"out", "dq", "dk", "dv"} and max(errors.values()) < 1e-4
    wrong = replace(right, mask=problem("local(50) & sinks(200)").mask)
    assert check.sampled_errors(right, peers.SparseFlash("reference").prepare(wrong))["out"] > 0.05


@pytest.mark.parametrize(
    "spec", ["causal & local(40)", "documents([0, 70, 256])", "butterfly(block=32)", "strided(3, block=7)", "random(0.4, block=64)"]
)
def test_flex_gets_the_same_pairs(spec):
    p = problem(spec, block=32)
    block_mask = peers.flex_block_mask(p.mask, p.pattern)
    q, kv = torch.meshgrid(torch.arange(256), torch.arange(256), indexing="ij")
    kept = block_mask.mask_mod(0, 0, q, kv)
    blocks = block_mask.to_dense()[0, 0].bool().repeat_interleave(32, 0).repeat_interleave(32, 1)
    # Outside partial blocks FlexAttention does not ask the rule, so that only kept blocks matter.
    assert torch.equal(kept & blocks, p.mask.to_dense())


def test_peers_refuse_with_a_reason():
    sparse = problem("local(9)")
    assert "dense" in peers.peer("sdpa-flash").refuses(sparse)
    assert peers.peer("sdpa-flash").refuses(problem("causal")) is None
    doubled = replace(sparse, q=sparse.q.double())
    assert peers.peer("sparse_flash:triton").refuses(doubled)
    assert peers.peer("sparse_flash:torch").refuses(doubled) is None
    assert "window" in peers.peer("fa4").refuses(sparse)
    with pytest.raises(ValueError, match="unknown peer"):
        peers.peer("flax")


def test_memory_counts_what_is_held_at_once():
    def fn():
        a = torch.empty(1 << 20)  # 4 MiB
        del a
        return torch.empty(1 << 18), torch.empty(1 << 18)  # 1 MiB each

    assert measure.peak_bytes(fn, CPU) == pytest.approx(4 << 20, rel=0.01)


def test_a_case_that_runs_long_is_stopped_and_said_so():
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(measure.OverLimit), measure.time_limit(1):
        time.sleep(5)
    assert signal.getsignal(signal.SIGALRM) is before


def test_an_error_of_a_peer_is_a_result(monkeypatch):
    monkeypatch.setattr(peers.SparseFlash, "prepare", lambda *_: 1 / 0)
    result = measure.run(cases.Case(cases.Shape(1, 1, 128, 16), "causal", "causal", "sparse_flash"), CPU)
    assert result["failed"].startswith("ZeroDivisionError") and not finished(result)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    return run(Options(out=folder, quick=True, device="cpu", only=("N1024", "N512", "N4096 | causal")), QUIET)


def test_results_are_complete_and_correct(quick):
    stored = json.loads(quick.path.read_text())
    assert stored == quick.data
    measured = [e["result"] for e in stored["cases"].values() if finished(e["result"])]
    assert len(measured) >= 10
    for result in measured:
        if "forward_ms" in result:
            assert result["correct"] and result["backward_ms"] > 0 and result["extra_bytes"] > 0
    assert {"torch", "python", "cpu", "date", "source"} <= set(stored["environment"])


def test_flops_count_kept_pairs_only(quick):
    result = quick.get("B1 H2 N1024 D64 | causal | sparse_flash")
    flops = 4 * 2 * 64 * (1024 * 1025 // 2)
    assert result["forward_tflops"] == pytest.approx(flops / result["forward_ms"] / 1e9)
    assert result["backward_tflops"] == pytest.approx(2.5 * flops / result["backward_ms"] / 1e9)


def test_resuming_measures_only_what_is_missing(quick, tmp_path, monkeypatch):
    data = json.loads(quick.path.read_text())
    gone = "B1 H2 N1024 D64 | butterfly | sparse_flash"
    del data["cases"][gone]
    (tmp_path / "results.json").write_text(json.dumps(data))
    measured = []
    monkeypatch.setattr(measure, "run", lambda case, *_: measured.append(case.key) or {"refused": "stub"})
    again = run(Options(out=tmp_path, quick=True, device="cpu", only=("N1024", "N512", "N4096 | causal")), QUIET)
    assert measured == [gone] and len(again.data["cases"]) == len(quick.data["cases"])


def test_results_of_another_environment_are_set_aside(quick, tmp_path, monkeypatch):
    data = json.loads(quick.path.read_text())
    data["environment"]["torch"] = "1.0"
    (tmp_path / "results.json").write_text(json.dumps(data))
    monkeypatch.setattr(measure, "run", lambda *_: {"refused": "stub"})
    options = Options(out=tmp_path, quick=True, device="cpu", only=("N1024 D64 | causal | sparse",))
    assert len(run(options, QUIET).data["cases"]) == 1
    (aside,) = tmp_path.glob("results-*.json")
    assert json.loads(aside.read_text()) == data


def test_an_interrupt_keeps_what_was_measured(tmp_path, monkeypatch):
    def stop_at_second(case, *_):
        if "sparse_flash" in case.key:
            raise KeyboardInterrupt
        return {"refused": "stub"}

    monkeypatch.setattr(measure, "run", stop_at_second)
    with pytest.raises(KeyboardInterrupt):
        run(Options(out=tmp_path, quick=True, device="cpu", suites=("speedup",)), QUIET)
    assert list(Results.read(tmp_path).data["cases"]) == ["B1 H2 N1024 D64 | full | sdpa-flash"]
    assert (tmp_path / "report.html").exists()


def test_the_report_is_one_file_with_the_tables_of_the_json(quick):
    page = report.write(Results.read(quick.folder)).read_text()
    assert page.count("data:image/png;base64,") >= 4
    assert "http://" not in page and "https://" not in page and "<script" not in page
    for table in tables(quick.data):
        assert table.title in page
        for row in table.rows:
            assert all(f">{cell}<" in page for cell in row if "&" not in cell and "'" not in cell)


def test_unreadable_results_say_so(tmp_path):
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        Results.read(tmp_path)
    (tmp_path / "results.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="format 99"):
        Results.read(tmp_path)
