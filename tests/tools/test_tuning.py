"""Tuned configs: what is kept, when it is used, and how it is chosen. All but the last test run without a GPU."""

import json
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from sparse_flash.cli import doctor
from sparse_flash.cli.app import app
from sparse_flash.kernels.launch import tuned
from sparse_flash.kernels.portable import backward, configs, forward
from sparse_flash.tools import tuning

CPU = torch.device("cpu")
DIM, BLOCK = 64, 64
GPU_NAME = tuned.gpu_name


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The test's own empty cache folder, and a GPU to tune for, in name only."""
    monkeypatch.setenv("SPARSE_FLASH_CACHE", str(tmp_path))
    monkeypatch.setattr(tuned, "gpu_name", lambda device: "Test GPU")
    tuned.forget()
    yield tmp_path / "tuned.json"
    tuned.forget()


def key(kernel="forward", block_size=BLOCK, **changed) -> tuned.Key:
    return tuned.key_of(kernel, torch.float16, DIM, block_size, CPU)._replace(**changed)


def keep(kernel="forward", number=-1, block_size=BLOCK, **changed) -> configs.Config:
    """Stores a candidate as the choice for a key."""
    candidates = configs.candidates(kernel, torch.float16, DIM, block_size, changed.get("v_head_dim"))
    tuned.store_choice(key(kernel, block_size, **changed), candidates[number], candidates[0], {})
    return candidates[number]


def builtin(kernel="forward", block_size=BLOCK) -> configs.Config:
    return configs.candidates(kernel, torch.float16, DIM, block_size)[0]


def asked() -> configs.Config:
    return configs.config_for("forward", torch.float16, DIM, BLOCK, CPU)


def test_a_choice_is_used_at_once_and_by_other_processes_and_the_built_in_one_takes_it_back():
    assert asked() == builtin()
    chosen = keep()
    assert asked() == chosen != builtin()
    program = (
        "import torch; from sparse_flash.kernels.launch import tuned; from sparse_flash.kernels.portable import configs;"
        "tuned.gpu_name = lambda device: 'Test GPU';"
        f"print(configs.config_for('forward', torch.float16, {DIM}, {BLOCK}, torch.device('cpu')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(chosen)
    keep(number=0)
    assert asked() == builtin() and tuned.count_choices(tuned.cache_file()) == 0


def test_choices_for_other_keys_stay():
    dense, sparse = keep(block_size=None), keep()
    keep("grad_q", number=1)
    assert asked() == sparse and configs.config_for("forward", torch.float16, DIM, None, CPU) == dense
    assert tuned.count_choices(tuned.cache_file()) == 3


@pytest.mark.parametrize(
    "changed",
    [
        {"gpu": "Other GPU"},
        {"torch": "2.0.0"},
        {"triton": "3.0.0"},
        {"backend": "hopper"},
        {"kernel": "grad_q"},
        {"dtype": "bfloat16"},
        {"head_dim": 128},
        {"block_size": 128},
        {"block_size": None},
        {"v_head_dim": 128},
    ],
    ids=str,
)
def test_a_choice_for_another_key_is_not_used(changed):
    keep(**changed)
    assert asked() == builtin()


def test_a_choice_for_a_head_dim_of_v_is_used_for_it_and_no_other():
    chosen = keep(v_head_dim=128)
    assert asked() == builtin() and configs.config_for("forward", torch.float16, DIM, BLOCK, CPU, 128) == chosen


def test_a_file_that_knows_no_head_dim_of_v_is_read_as_of_one_head_dim(cache):
    chosen = keep()
    data = json.loads(cache.read_text())
    del data["choices"][0]["v_head_dim"]
    cache.write_text(json.dumps(data))
    tuned.forget()
    assert asked() == chosen


def test_nothing_is_tuned_where_there_is_no_gpu(monkeypatch):
    keep()
    monkeypatch.setattr(tuned, "gpu_name", lambda device: None)
    tuned.forget()
    assert asked() == builtin()


@pytest.mark.parametrize("field", ["config", "instead_of"])
def test_a_choice_of_other_kernels_is_dropped_in_silence(cache, field):
    keep()
    data = json.loads(cache.read_text())
    data["choices"][0][field]["tile_m"] = 48
    cache.write_text(json.dumps(data))
    tuned.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert asked() == builtin()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "\x00\x01", '{"format": 9, "choices": []}', '{"format": 1, "choices": [{}]}', '{"format": 1}'], ids=repr
)
def test_a_corrupt_file_is_one_warning_that_names_it_and_the_way_out(cache, text):
    cache.write_text(text)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert asked() == builtin()
        assert (
            configs.config_for("forward", torch.float16, 128, None, CPU)
            == configs.candidates("forward", torch.float16, 128, None)[0]
        )
        configs.config_for("grad_kv", torch.float16, DIM, BLOCK, CPU)
    assert len(caught) == 1
    assert str(cache) in str(caught[0].message) and "delete the file" in str(caught[0].message)


def test_tuning_writes_a_corrupt_file_anew(cache):
    cache.write_text("{")
    with pytest.warns(RuntimeWarning, match="cannot read"):
        chosen = keep()
    assert asked() == chosen


def test_the_launchers_use_the_choices(monkeypatch):
    launched = {}

    def launch(kernel, grid, arguments, constants, options, variant, beside):
        launched[kernel.fn.__name__] = constants["TILE_M"], constants["TILE_N"], options["num_warps"], options["num_stages"]

    monkeypatch.setattr("sparse_flash.kernels.launch.launch.launch", launch)
    chosen = {kernel: keep(kernel, block_size=None) for kernel in configs.KERNELS}
    q = torch.zeros(1, 1, 64, DIM, dtype=torch.float16)
    out, lse = forward.attention_forward(q, q, q, None, 1.0)
    backward.attention_backward(q, None, q, q, q, out, lse, None, 1.0)
    for kernel, config in chosen.items():
        name = "attention_forward_kernel" if kernel == "forward" else f"{kernel}_kernel"
        assert launched[name] == (config.tile_m, config.tile_n, config.num_warps, config.num_stages)
        assert config != builtin(kernel, None)


@pytest.mark.parametrize("block_size", [None, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kernel", configs.KERNELS)
def test_candidates_are_few_distinct_and_start_with_the_built_in_config(kernel, dtype, head_dim, block_size):
    found = configs.candidates(kernel, dtype, head_dim, block_size)
    assert found[0] == configs.config_for(kernel, dtype, head_dim, block_size, CPU)
    assert 1 < len(found) <= configs.MOST_CANDIDATES and len(set(found)) == len(found)
    for config in found:
        for tile in (config.tile_m, config.tile_n):
            assert tile >= 16 and tile & (tile - 1) == 0 and (block_size or 128) % tile == 0
        assert config.num_warps in (1, 2, 4, 8) and 2 <= config.num_stages <= 4


@pytest.mark.parametrize("head_dim, v_head_dim, expected", [(64, 64, []), (192, 128, []), (128, 64, ["grad_q", "grad_kv"] * 2)])
def test_of_a_call_for_hopper_only_a_portable_backward_pass_is_tuned(monkeypatch, head_dim, v_head_dim, expected):
    monkeypatch.setattr(tuning.backends, "choose_backend", lambda *_: "hopper")
    problem = tuning.TuningProblem("causal", 128, heads=1, head_dim=head_dim, v_head_dim=v_head_dim)
    assert [task.key.kernel for task in tuning.make_tasks(problem, CPU)] == expected


class FakeClock:
    """Milliseconds by config: the time that ``task`` gives for the config that it launched last."""

    def __init__(self, times):
        self.times, self.last = times, None

    def finish(self):
        pass

    def milliseconds(self, launch):
        launch()
        return self.times(self.last)


def fake(times, wrong=(), failing=(), large=()):
    """(task, clock) whose candidates take times(number) ms. wrong, failing, large: numbers that give wrong results, none, or do not
    fit."""
    candidates = configs.candidates("forward", torch.float16, DIM, BLOCK)
    clock = FakeClock(times)

    def run(config):
        clock.last = candidates.index(config)
        if clock.last in failing:
            raise RuntimeError("out of registers\nand more")
        if clock.last in large:
            raise OutOfResources(131072, 101376, "shared memory")
        out = torch.ones(1, 1, 1000, DIM, dtype=torch.float16)
        if clock.last in wrong:
            out[0, 0, 500] *= 1.1  # one row of a thousand
        return {"out": out, "lse": torch.full((1, 1, 1000), -float("inf"))}

    return tuning.Task(key(), tuning.TuningProblem(), "dense", candidates, run), clock


def result_of(task_and_clock, limit=60.0):
    task, clock = task_and_clock
    (result,) = tuning.tune([task], limit, clock)
    return result


def test_the_fastest_candidate_is_chosen_kept_and_used():
    result = result_of(fake(lambda number: 1.0 if number == 3 else 2.0))
    assert result.chosen == result.task.candidates[3] == asked()
    assert result.gain == pytest.approx(1.0) and result.unreached == 0
    assert len(result.trials) == len(result.task.candidates)


@pytest.mark.parametrize("milliseconds, accepted", [(0.99, False), (0.97, True)])
def test_less_than_two_per_cent_is_no_reason_to_change(milliseconds, accepted):
    result = result_of(fake(lambda number: milliseconds if number == 3 else 1.0))
    assert (result.chosen != builtin()) == (asked() != builtin()) == accepted


def test_a_lucky_measurement_is_not_confirmed():
    times = iter([2.0, 1.0] + [2.0] * 100)
    result = result_of(fake(lambda number: next(times)))
    assert result.chosen == builtin() == asked() and result.gain == 0


def test_candidates_that_fail_or_are_wrong_are_passed_over_with_the_reason():
    result = result_of(fake(lambda number: 2.0 - number / 10 if number < 5 else 3.0, wrong={3}, failing={4}))
    assert result.chosen == result.task.candidates[2]
    wrong, failing = result.trials[3], result.trials[4]
    assert wrong.milliseconds is None and wrong.reason.startswith("wrong result: out differs by 0.0")
    assert failing.milliseconds is None and failing.reason == "RuntimeError: out of registers"


def test_where_the_built_in_config_fails_nothing_is_chosen():
    keep()
    result = result_of(fake(lambda number: 1.0, failing={0}))
    assert len(result.trials) == 1 and result.chosen == builtin()
    assert asked() != builtin()  # what was known before stays


def test_the_limit_ends_the_search_but_the_built_in_config_is_always_measured():
    result = result_of(fake(lambda number: 1.0), limit=0.0)
    assert len(result.trials) == 1 and result.unreached == len(result.task.candidates) - 1


def test_retuning_takes_back_a_choice_that_no_longer_gains():
    keep()
    result_of(fake(lambda number: 1.0))
    assert asked() == builtin()


def test_a_gpu_that_is_lost_ends_tuning_and_names_the_candidate():
    task, clock = fake(lambda number: 1.0, failing={2})

    def finish():
        if clock.last == 2:
            raise RuntimeError("illegal memory access")

    clock.finish = finish
    with pytest.raises(tuning.GpuLost, match=tuning.describe(task.candidates[2])):
        list(tuning.tune([task], 60.0, clock))


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")
def test_every_task_runs_its_kernel_and_its_candidates_agree():
    problem = tuning.TuningProblem(
        "causal & local(20)", 64, heads=1, head_dim=16, block_size=32, dtype=torch.float16, v_head_dim=32
    )
    tasks = tuning.make_tasks(problem, CPU, "triton")
    assert [(task.key.kernel, task.mask) for task in tasks] == [
        (kernel, mask) for mask in ("causal & local(20)", "dense") for kernel in configs.KERNELS
    ]
    for task in tasks:
        assert task.key.block_size == (None if task.mask == "dense" else 32)
        assert (task.key.head_dim, task.key.v_head_dim) == (16, 32)
        first, other = task.run(task.candidates[0]), task.run(task.candidates[1])
        assert tuning.disagreement(other, first) is None
        first[next(iter(first))][0, 0, 7] += 1.0
        assert tuning.disagreement(other, first)


def test_without_a_gpu_the_command_says_so(monkeypatch, cache):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["tune"])
    assert result.exit_code == 2 and "there is no GPU" in result.stderr
    assert "Traceback" not in result.output and not cache.exists()


def run_command(monkeypatch, make_tasks, clock, *options):
    monkeypatch.setattr(tuning, "unavailable", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tuning, "make_tasks", make_tasks)
    monkeypatch.setattr(tuning, "Clock", lambda: clock)
    result = CliRunner().invoke(app, ["tune", *options, "--limit", "60"])
    assert result.exit_code == 0, result.output
    return result


def test_the_command_prints_what_was_measured_and_chosen(monkeypatch, cache):
    task, clock = fake(lambda number: 1.0 if number == 3 else 2.0, failing={4}, large={5, 6})
    task = replace(task, left_out=7)  # before they were compiled
    result = run_command(monkeypatch, lambda *_: [task], clock)
    lines = {line.split("  ")[0].strip(): line for line in result.stdout.splitlines()}
    chosen, failed = (lines[tuning.describe(task.candidates[number])] for number in (3, 4))
    assert "1.000 ms" in chosen and "+100.0%" in chosen and "chosen" in chosen
    assert "skipped: RuntimeError: out of registers" in failed
    assert str(cache) in result.stdout
    assert tuning.describe(task.candidates[5]) not in lines
    assert "9 candidates were left out: this GPU has less shared memory than they take." in result.stdout


def test_the_command_tunes_for_v_of_another_head_dim_and_says_so(monkeypatch):
    task, clock = fake(lambda number: 1.0)
    asked, task = [], replace(task, key=task.key._replace(head_dim=256, v_head_dim=128))
    options = ["--head-dim", "192", "--v-head-dim", "128"]
    result = run_command(monkeypatch, lambda problem, *_: asked.append(problem) or [task], clock, *options)
    assert asked[0].head_dims == (192, 128) and "head_dim 256 of q and k, 128 of v" in " ".join(result.stdout.split())


def test_where_each_kernel_has_one_config_the_command_says_so(monkeypatch):
    assert "Nothing to choose" in run_command(monkeypatch, lambda *_: [], None).stdout


def test_doctor_mentions_the_file_where_there_is_one(cache):
    assert str(cache) not in CliRunner().invoke(app, ["doctor"]).output
    keep()
    assert f"1 tuned config in {cache}" in CliRunner().invoke(app, ["doctor"]).output
    cache.write_text("{")
    assert "cannot be read" in CliRunner().invoke(app, ["doctor"]).output


def test_doctor_says_whose_tile_sizes_a_gpu_has_and_whether_they_were_measured_on_such_a_chip(monkeypatch):
    class Properties:
        name, total_memory, major, minor = "Test GPU", 24 << 30, 8, 9

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties())
    monkeypatch.setattr(doctor, "_back_ends", lambda: "")
    for chip, shared, said in (
        ((8, 9), 101376, "by a rule, for 99 KiB of shared memory; not measured on such a chip"),
        ((9, 0), 232448, "measured on an H200"),
        ((7, 5), 65536, "none: Triton needs compute capability 8.0 or newer; this GPU has 7.5"),
    ):
        monkeypatch.setattr(configs, "detect_gpu", lambda device, chip=chip, shared=shared: configs.Gpu(chip, shared))
        output = " ".join(CliRunner().invoke(app, ["doctor"]).output.split())
        assert f"tile sizes {said}" in output, output


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_a_small_problem_is_tuned_for_real(backend, monkeypatch):
    monkeypatch.setattr(tuned, "gpu_name", GPU_NAME)
    tuned.forget()
    device = torch.device("cuda", torch.cuda.current_device())
    problem = tuning.TuningProblem("causal & local(200)", tokens=1024, heads=2, head_dim=64)
    tasks = [replace(task, candidates=task.candidates[:3]) for task in tuning.make_tasks(problem, device, backend)]
    results = list(tuning.tune(tasks, limit=120.0))
    assert len(results) == len(tasks) > 0
    for result in results:
        assert result.trials[0].milliseconds > 0 and result.chosen in result.task.candidates
        assert any(trial.milliseconds for trial in result.trials[1:]) or result.unreached
