"""Training: it learns, stops where it must, saves whole, and goes on where it was."""

import csv
import itertools
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_lm import ON_CPU, SETTINGS, SHAPE
from typer.testing import CliRunner

from examples.train_lm import checkpoint, memory
from examples.train_lm.cli import app
from examples.train_lm.data import Tokens
from examples.train_lm.evaluate import by_position, load_decoder, losses
from examples.train_lm.parallel import World
from examples.train_lm.settings import PRESETS, Settings, check_settings, every_nth_dense
from examples.train_lm.train import NotFinite

ROOT = Path(__file__).parents[2]


def state(run) -> list[torch.Tensor]:
    moments = [t for s in run.optimizer.state.values() for t in s.values()]
    return [*(p.detach().clone() for p in run.model.parameters()), *(m.clone() for m in moments)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.open()))


def test_a_run_learns_and_leaves_its_numbers_and_pictures(run):
    one = run(steps=30)
    before = one.evaluate(4)
    assert before == pytest.approx(math.log(300), abs=0.2)
    assert one.train(save_every=10, evaluate_every=15, windows=4)
    assert one.evaluate(4) < before - 0.5
    rows = rows_of(one.folder / "steps.csv")
    assert [(int(row["step"]), int(row["tokens"])) for row in rows] == [(step, 256 * step) for step in range(1, 31)]
    assert len(rows_of(one.folder / "evaluations.csv")) == 2
    assert (one.folder / "loss.png").stat().st_size > 5000 and any((one.folder / "tensorboard").iterdir())
    assert sorted(p.name for p in one.folder.glob("step-*")) == ["step-0000020", "step-0000030"]


def test_a_run_that_ctrl_c_stopped_goes_on_and_ends_bit_for_bit_where_an_uninterrupted_one_ends(run, monkeypatch):
    whole, first = run("whole"), run("parts")
    whole.train()
    step = first.step

    def interrupted():
        if first.progress.step == 2:
            signal.raise_signal(signal.SIGINT)
        return step()

    monkeypatch.setattr(first, "step", interrupted)
    assert not first.train()
    assert checkpoint.latest(first.folder).name == "step-0000003"
    second = run("parts")
    assert second.progress.step == 3 and second.progress.position == 3 * 256 and second.resumed
    second.train()
    assert same(state(whole), state(second))


def test_accumulated_passes_take_the_step_of_one_pass(run):
    once, twice = run("once", micro_tokens=256), run("twice", micro_tokens=64)
    losses = [(once.step()["loss"], twice.step()["loss"]) for _ in range(3)]
    assert all(a == pytest.approx(b, rel=1e-5) for a, b in losses)
    torch.testing.assert_close(state(once)[:3], state(twice)[:3], rtol=1e-3, atol=1e-4)


def save_elsewhere(one, tokens: Path, script: str) -> subprocess.CompletedProcess:
    """Goes on from the last checkpoint of ``one`` by a step and saves, in a process of its own, after lines of a script."""
    program = f"""
import os, resource, signal
from pathlib import Path
from examples.train_lm import checkpoint
from examples.train_lm.train import Run
from tiny_lm import ON_CPU, SETTINGS
run = Run(SETTINGS, Path({str(one.folder)!r}), Path({str(tokens)!r}), ON_CPU)
run.step()
{script}
run.save()
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, cwd=ROOT, env=environment)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "function, step",
    [("checkpoint.FileSystemWriter.finish", 3), ("checkpoint.os.replace", 3), ("checkpoint.shutil.rmtree", 4)],
    ids=["while tensors are written", "before it is renamed", "before earlier ones are removed"],
)
def test_a_save_that_is_killed_leaves_the_last_one_whole(function, step, run, tokens):
    one = run()
    for _ in range(3):  # two to keep, and one to remove
        one.step()
        one.save()
    done = save_elsewhere(one, tokens, f"{function} = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode == -signal.SIGKILL, done.stderr
    again = run()
    assert again.progress.step == step and same(state(again), state(one)) == (step == 3)
    again.step()
    again.save()  # what the killed save left is in nobody's way
    assert checkpoint.latest(one.folder).name == f"step-{step + 1:07d}" and not list(one.folder.glob("*.partial"))


@pytest.mark.ranks
def test_a_full_disk_is_said_and_leaves_the_last_checkpoint_whole(run, tokens):
    one = run()
    one.step()
    one.save()
    done = save_elsewhere(one, tokens, "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))")
    assert done.returncode == 1
    assert "step-0000002 could not be written" in done.stderr and "the last one, step-0000001, is whole" in done.stderr
    assert run().progress.step == 1


def test_sequences_grow_at_the_step_that_was_asked_for_and_a_resumed_run_knows(run):
    changes = {"masks": ("causal",), "length": 64, "extend_to": 128, "extend_at": 3}
    one = run("one", **changes)
    lengths = []
    for _ in range(4):
        lengths.append((one.length, *one._batch(0).tokens.shape))
        one.step()
    assert lengths == [(64, 2, 64)] * 3 + [(128, 1, 128)]
    one.save()
    again = run("one", **changes)
    assert again.length == 128 and again.progress.position == 4 * 256
    assert again.step()["loss"] == one.step()["loss"]


def test_a_checkpoint_of_another_run_is_refused_and_says_what_differs(run):
    one = run()
    one.step()
    one.save()
    with pytest.raises(ValueError, match=r"learning_rate is 0.5 here and 0.01 there; give the same settings, another --out, or"):
        run(learning_rate=0.5)
    assert run(learning_rate=0.5, fresh=True).progress.step == 0
    (one.folder / "step-0000001" / "run.json").write_text("{}")
    with pytest.raises(ValueError, match="is no checkpoint of this program"):
        run()


def test_a_loss_that_is_not_finite_stops_the_run_and_says_where(run):
    one = run()
    one.step()
    one.save()
    block = one.model.blocks[1]
    with torch.no_grad():
        for weight in (block.gate_proj.weight, block.up_proj.weight):
            weight.mul_(1e25)  # the product of both is past float32
    where = r"at step 2, tokens 256 to 512 .*the output of blocks\.1\.down_proj.*rank 0.*step-0000001 is the last"
    with pytest.raises(NotFinite, match=where):
        one.step()
    with torch.no_grad():
        one.model.blocks[0].attention.gain[1] = math.nan
    with pytest.raises(NotFinite, match=r"parameter blocks\.0\.attention\.gain"):
        one.step()


def test_a_dense_checkpoint_goes_on_under_sparse_masks(run):
    dense = run("dense", masks=("causal",))
    dense.train()
    start = checkpoint.latest(dense.folder)
    sparse = run("sparse", masks=("causal & local(16)", "causal"), start=start)
    assert sparse.progress.step == 0 and same(list(dense.model.parameters()), list(sparse.model.parameters()))
    assert sparse.evaluate(4) < math.log(300) - 0.05
    sparse.train()
    assert run("sparse", masks=("causal & local(16)", "causal"), start=start).progress.step == 6
    with pytest.raises(ValueError, match=r"of another model: embed.weight is \(400, 32\) here and \(300, 32\) there"):
        run("other", shape=replace(SHAPE, vocabulary=400), start=start)


def test_evaluation_reaches_beyond_the_trained_length(run, tokens):
    one = run()
    one.train()
    model, held_out, device = load_decoder(one.folder, ON_CPU.device), Tokens(tokens, "held_out", 300), ON_CPU.device
    nats = losses(model, held_out, 200, 2, device)
    assert nats.shape == (2, 200) and nats.isfinite().all() and by_position(nats)[0].last == 200
    assert losses(model, held_out, 64, 4, device).mean().item() == pytest.approx(one.evaluate(4), rel=1e-4)
    with pytest.raises(ValueError, match="fewer than one sequence of 5,000"):
        losses(model, held_out, 5000, 1, device)


TEXT = f"--text {ROOT / 'docs'}"
BAD = [
    ("train --preset 7B", "preset must be one of tiny, 30M, 150M, 1B, 8B; got '7B'"),
    ("train --mask 'causal & locl(3)'", "locl"),
    ("train --mask 'local(64)'", "write 'causal & (local(64))'"),
    ("train --mask 'topk_blocks(2, block=16)' --packed", "does not keep packed documents apart here"),
    ("train --mask 'topk_blocks(2, block=16) | locl(3)'", "locl"),
    ("train --length 64 --extend-to 128", "--extend-to and --extend-at go together"),
    ("train --length 64 --micro-tokens 100", "pass --micro-tokens 64"),
    ("train --length 64 --micro-tokens 64 --step-tokens 100", "pass --step-tokens 64"),
    ("train --minutes 1", "either --steps or --minutes"),
    ("train --parallel pp", "ddp or fsdp"),
    ("train --recompute some", "none, selective, full"),
    ("train --offload 9 --recompute full --preset 30M", "--offload must be 0 to 8"),
    ("train --context 2", "must divide the 1 that torchrun started; got 2"),
    ("train --text /nowhere", "must be a folder of text"),
    ("train --mask causal --mask causal --dense-every 4", "--mask causal"),
    (f"train {TEXT} --held-out 1.5", "more than 0 and less than 1; got 1.5"),
    (f"train {TEXT} --most-bytes 10", "an eighth of --most-bytes, 10; pass more"),
    ("train --device meta", "--device must be cpu, cuda, cuda:1, ... or auto; got 'meta'"),
    ("train --device cuda", "--device cuda needs a GPU, and PyTorch sees none; pass --device cpu"),
    ("compare --mask full", "lets tokens see later ones"),  # of both masks, before one is trained
]


@pytest.mark.parametrize("given, message", BAD)
def test_input_that_cannot_work_is_one_sentence_before_training_starts(given, message, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    command, *options = shlex.split(given)
    options = ["--length", "128", "--steps", "2", "--device", "cpu", *options, "--out", str(tmp_path / "run")]
    options += ["--data", str(tmp_path / "data")] if command == "train" else []
    result = CliRunner().invoke(app, [command, *options])
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split()) and "Traceback" not in result.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("changes", [{"length": 512}, {"extend_to": 512, "extend_at": 3}], ids=str)
def test_a_held_out_text_that_is_too_short_is_said_before_the_first_step(changes, run):
    one = run(step_tokens=512, micro_tokens=512, chunk=512, **changes)
    with pytest.raises(ValueError, match="the held-out text has 450 tokens, fewer than one sequence of 512"):
        one.train()
    assert one.progress.step == 0


@pytest.mark.parametrize(
    "mask, packed, said",
    [
        ("sdpa", False, "mask 'sdpa' is not supported where GPUs share a sequence"),
        ("topk_blocks(2, block=16)", False, "mask 'topk_blocks(2, block=16)' is not supported where GPUs share a sequence"),
        ("causal & sinks(4)", True, "mask 'causal & sinks(4)' counts positions from the start of each"),
    ],
)
def test_gpus_that_share_sequences_refuse_masks_by_name(mask, packed, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        check_settings(replace(SETTINGS, context=2, masks=(mask,), packed=packed), 4)


# Tokens of a sequence, on how many GPUs, and measured peaks in GiB, on H100 and H200: benchmarks/results/training.
PEAKS = [
    ("8B", {"recompute": "full"}, 131_072, 1, 29.76),  # of 3 layers
    ("150M", {"recompute": "none", "step_tokens": 131_072}, 65_536, 1, 27.52),  # in two passes
    ("150M", {"recompute": "selective"}, 131_072, 1, 34.94),
    ("8B", {"recompute": "full", "offload": 10}, 1_572_864, 4, 132.9),
]


@pytest.mark.parametrize("preset, options, length, ranks, measured", PEAKS)
def test_the_estimate_of_memory_is_within_a_twentieth_of_measured_peaks(preset, options, length, ranks, measured):
    shape = replace(PRESETS[preset], layers=3) if (preset, ranks) == ("8B", 1) else PRESETS[preset]
    sizes = {"length": length, "micro_tokens": length, "step_tokens": length, "chunk": length} | options
    settings = check_settings(Settings(shape, context=ranks, **sizes), ranks)
    world = SimpleNamespace(size=ranks, replicas=1, mesh=None if ranks == 1 else "all ranks")
    assert sum(memory.estimate_memory(settings, world, "fsdp").values()) == pytest.approx(measured, rel=0.05)


def test_too_little_memory_is_said_with_what_to_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (139 << 30, 141 << 30))
    settings = check_settings(Settings(PRESETS["1B"], length=131_072, micro_tokens=131_072, step_tokens=131_072, chunk=131_072))
    with pytest.raises(ValueError, match=r"needs 179 GiB, has 139: use --recompute selective"):
        memory.check(settings, World(torch.device("cuda", 0)), "ddp")
    assert "about 178.7" in memory.check(settings, ON_CPU, "ddp")


def test_settings_survive_their_file_and_those_of_an_older_version_are_read():
    assert Settings.from_json(SETTINGS.to_json()) == SETTINGS
    saved = json.loads(SETTINGS.to_json())
    assert saved["shape"]["dim"] == 32
    assert Settings.from_json(json.dumps(saved | {"check_every": 5})) == SETTINGS
    assert every_nth_dense("causal & local(4)", 4) == ("causal & local(4)",) * 3 + ("causal",)


ON_A_CPU = (
    "--preset tiny --vocabulary 300 --length 64 --chunk 128 --step-tokens 256 --micro-tokens 64 --no-compile --device cpu "
    "--mask 'causal & local(32)'"
)


def invoke(command: str, code=0) -> str:
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code == code, result.output
    return result.output


def test_commands_train_evaluate_generate_export_and_plot(tmp_path):
    """The whole way of a user, on text of their own."""
    for number in range(12):
        (tmp_path / "text" / f"p{number}").mkdir(parents=True)
        (tmp_path / "text" / f"p{number}" / "a.py").write_text("\n".join(f"x{number}_{i} = {i} * {number}" for i in range(200)))
    run, data = tmp_path / "run", f"--data {tmp_path}/data"
    options = f"{ON_A_CPU} --packed --text {tmp_path}/text --steps 2 --evaluate-every 2 --windows 2"
    said = invoke(f"train {options} {data} --out {run}")
    assert "held out" in said and "memory: about" in said and "held-out loss" in said
    assert "positions" in invoke(f"evaluate {run} --length 64 --length 128 --windows 2 {data} --device cpu")
    assert invoke(f"generate {run} --prompt 'x1_1 =' --count 5 {data} --device cpu").startswith("x1_1 =")
    exported = invoke(f"export {run} {tmp_path}/hf {data}")
    assert "from_pretrained" in exported and "no tokenizer" not in exported and (tmp_path / "hf" / "tokenizer.json").exists()
    assert "no tokenizer" in invoke(f"export {run} {tmp_path}/bare --data {tmp_path}/elsewhere")
    invoke(f"plot {run} --target {tmp_path}/loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 5000


def test_measured_costs_are_printed_written_and_drawn(tmp_path):
    options = "--preset tiny --no-compile --step-tokens 64 --steps 1 --warm 0 --device cpu --length 32 --length 64"
    masks = ["sdpa", "causal & local(32)"]
    said = invoke(f"cost {options} --mask {masks[0]} --mask '{masks[1]}' --out {tmp_path}/costs.json")
    costs = json.loads((tmp_path / "costs.json").read_text())["costs"]
    assert [(cost["mask"], cost["length"]) for cost in costs] == list(itertools.product(masks, (32, 64)))
    assert all(cost["tokens_per_second"] == pytest.approx(64 / cost["seconds"]) and cost["gib"] is None for cost in costs)
    assert said.count("tokens/s") == 4 and "GiB" not in said  # not measured on a CPU
    invoke(f"plot-costs {tmp_path}/costs.json --target {tmp_path}/costs.png")
    assert (tmp_path / "costs.png").stat().st_size > 5000


def launched(ranks: int, command: str, expected: int = 0) -> str:
    port = 20_000 + os.getpid() % 9000
    launcher = shlex.split(f"-m torch.distributed.run --nproc-per-node {ranks} --master-port {port} -m examples.train_lm")
    run = [sys.executable, *launcher, *shlex.split(command)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=600, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == expected, done.stdout + done.stderr
    return done.stdout


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["tokenizers", "tensorboard"])
def test_a_missing_library_is_named_with_the_way_to_install_it(name):
    program = f"import sys, runpy; sys.modules[{name!r}] = None; runpy.run_module('examples.train_lm', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and done.stderr.strip() == f"{name} is missing: pip install 'sparse-flash[train]'"


@pytest.mark.ranks
def test_ranks_stop_together_where_a_number_is_not_finite(tokens, tmp_path):
    given = f"{ON_A_CPU} --data {tokens} --tokens {tokens.parent}/tokens.npy --out {tmp_path} --parallel fsdp"
    # A learning rate past all reason: some steps later numbers are infinite, in some rank's part of the parameters.
    said = launched(2, f"train {given} --steps 60 --warmup 0 --learning-rate 1e30", expected=1)
    assert "the first that is not finite is" in " ".join(said.split())


@pytest.mark.ranks
def test_two_ranks_take_the_steps_of_one(tokens, tmp_path):
    """Each on its own sequences; ``parallel/test_models_on_ranks.py`` has ranks that share them, and checkpoints of other ranks."""
    given = f"{ON_A_CPU} --data {tokens} --tokens {tokens.parent}/tokens.npy --parallel fsdp"
    given += " --evaluate-every 2 --save-every 2 --windows 3 --warmup 2 --steps 4"
    for ranks in (1, 2):
        launched(ranks, f"train {given} --out {tmp_path}/{ranks}")
    for a, b in zip(*(rows_of(tmp_path / name / "steps.csv") for name in ("1", "2")), strict=True):
        assert float(a["loss"]) == pytest.approx(float(b["loss"]), rel=1e-4)
        assert float(a["gradient_norm"]) == pytest.approx(float(b["gradient_norm"]), rel=1e-3)


@pytest.mark.ranks
def test_costs_are_of_all_ranks_and_of_sequences_that_they_share(tmp_path):
    options = "--preset tiny --no-compile --device cpu --mask causal --length 256 --step-tokens 256 --steps 1 --warm 0"
    said = launched(2, f"cost {options} --parallel fsdp --context 2 --out {tmp_path}/costs.json")
    (found,) = json.loads((tmp_path / "costs.json").read_text())["costs"]
    assert said.count("tokens/s") == 1
    assert [found[name] for name in ("ranks", "parallel", "context", "micro_tokens")] == [2, "fsdp", 2, 256]
