"""Replayed launches: a stand-in for the CUDA driver reads its arguments; packing parameters needs no GPU."""

import ctypes
import struct
import threading
import types
import weakref

import pytest
import torch

pytest.importorskip("triton")

from sparse_flash.kernels.common.variant import KernelVariant
from sparse_flash.kernels.launch import launch, replay
from sparse_flash.kernels.launch.launch import descriptor_or_rows

PTX = """
.visible .entry some_kernel(
	.param .align 128 .b8 some_kernel_param_0[128],
	.param .u32 some_kernel_param_1,
	.param .u32 some_kernel_param_2,
	.param .u32 some_kernel_param_3,
	.param .u32 some_kernel_param_4,
	.param .u64 some_kernel_param_5,
	.param .u64 some_kernel_param_6,
	.param .u64 some_kernel_param_7,
	.param .u64 some_kernel_param_8,
	.param .u64 .ptr .global .align 1 some_kernel_param_9,
	.param .u32 some_kernel_param_10,
	.param .f32 some_kernel_param_11,
	.param .u64 .ptr .global .align 1 some_kernel_param_12,
	.param .u64 .ptr .global .align 1 some_kernel_param_13,
	.param .u64 .ptr .global .align 1 some_kernel_param_14
)
.reqntid 128
{
"""
SIGNATURE = {"q_tensor": "tensordesc<fp16[1,1,64,16]>", "lse_ptr": "*fp32", "heads": "i32", "one": "constexpr", "scale": "fp32"}
SIGNATURE |= {"variant": KernelVariant("*i64", *["constexpr"] * (len(KernelVariant._fields) - 1)), "DIM": "constexpr"}
SIZES = [128, *[4] * 4, *[8] * 4, 8, 4, 4, 8, 8, 8]


class Driver:
    """Records what is launched. Returns the statuses one after another, then 0."""

    def __init__(self, *statuses):
        self.statuses, self.launches, self.context = list(statuses), [], None

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        config = config._obj
        values = [ctypes.string_at(place, size) for place, size in zip(parameters, SIZES, strict=True)]
        grid = config.gridx, config.gridy, config.gridz, config.blockx, config.blocky, config.blockz, config.shared
        self.launches.append((grid, config.stream, function.value, values))
        return self.statuses.pop(0) if self.statuses else 0

    def cuTensorMapEncodeTiled(self, place, element, rank, address, shape, strides, box, ones, *rest):
        assert place.value % 64 == 0
        numbers = [address.value, element, rank, *shape, *strides, *box, *rest]
        ctypes.memmove(place.value, struct.pack(f"<{len(numbers)}Q", *numbers)[:128], 128)
        return 0

    def cuDriverGetVersion(self, version):
        version._obj.value = 13020
        return 0

    def cuCtxGetCurrent(self, context):
        context._obj.value = self.context
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):
        context._obj.value = 1234 + device
        return 0

    def cuCtxSetCurrent(self, context):
        self.context = context.value
        return 0

    def cuGetErrorString(self, status, text):
        text._obj.value = b"out of patience"
        return 0


def compiled(ptx: str = PTX, signature: dict = SIGNATURE, **changed):
    meta = {"num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": False, "global_scratch_size": 0}
    meta |= {"profile_scratch_size": 0, "num_warps": 4, "shared": 1000}
    meta |= {"tensordesc_meta": [{"swizzle": 1, "elem_size": 2, "elem_type": 9, "block_size": [1, 1, 64, 16]}]}
    source = types.SimpleNamespace(signature=signature)
    return types.SimpleNamespace(metadata=types.SimpleNamespace(**meta | changed), src=source, asm={"ptx": ptx}, function=77)


def inputs():
    q, lse, seed = torch.zeros(1, 2, 100, 16, dtype=torch.float16), torch.zeros(200), torch.zeros(1, dtype=torch.int64)
    return (q, lse, seed), [descriptor_or_rows(q, 64, 16), lse, 2, 1, 0.5, KernelVariant(seed), 16]


def call(kernel, arguments, inputs, *made):
    return replay.ReplayedCall([(kernel, (3, 2), arguments)], inputs, made, [])


@pytest.fixture
def driver(monkeypatch):
    stand_in = Driver()
    monkeypatch.setattr(replay, "raw_stream", lambda device: 5)
    monkeypatch.setattr(replay, "current_gpu", lambda: None)  # like the index of a CPU
    monkeypatch.setattr(replay, "_driver", lambda: stand_in)
    replay._driver_version.cache_clear()
    yield stand_in
    replay._driver_version.cache_clear()


def test_a_launch_made_again_has_the_parameters_of_the_first_and_the_addresses_of_now(driver):
    tensors, arguments = inputs()
    launch = call(compiled(), arguments, tensors)
    moved = tuple(t.clone() for t in tensors)
    launch.again(moved)
    grid, stream, function, values = driver.launches[-1]
    assert grid == (3, 2, 1, 128, 1, 1, 1000) and (stream, function) == (5, 77)
    # Triton's element type 9 on the device is 8 for the driver. Dimensions start with the innermost.
    encoded = struct.unpack("<16Q", values[0])
    assert encoded[:3] == (moved[0].data_ptr(), 8, 4) and encoded[3:7] == (16, 100, 2, 1)
    assert encoded[7:10] == (32, 3200, 6400) and encoded[11:15] == (16, 64, 1, 1)
    assert [int.from_bytes(v, "little") for v in values[1:9]] == [1, 2, 100, 16, 3200, 1600, 16, 1]
    assert int.from_bytes(values[9], "little") == moved[1].data_ptr()
    assert int.from_bytes(values[10], "little") == 2 and struct.unpack("f", values[11]) == (0.5,)
    assert int.from_bytes(values[12], "little") == moved[2].data_ptr()
    assert values[13:] == [bytes(8)] * 2


def test_the_third_call_of_a_kind_is_replayed_with_results_of_its_own(driver, monkeypatch):
    launched, counters = [], [torch.zeros(1, dtype=torch.int64) for _ in range(9)]
    mask, kernel = type("Mask", (), {})(), types.SimpleNamespace(fn=None)
    monkeypatch.setattr(launch, "launch", lambda *given: launched.append(given) or compiled())

    def called(q, key=(0.5,)):
        def run(recording):
            results, counter = recording.fresh(torch.zeros(400)), recording.each_time(counters.pop)
            arguments = [descriptor_or_rows(q, 64, 16), results[200:], 2, 1, 0.5, KernelVariant(counter)]
            recording.launch(kernel, ((3, 2), arguments, {"DIM": 16}, {}))
            return results, counter

        return launch.launch_or_repeat(kernel, mask, key, (q,), run)

    q = torch.zeros(1, 2, 100, 16, dtype=torch.float16)
    before = [called(q)[0] for _ in range(2)]
    assert len(launched) == 2 and not driver.launches
    other = q.clone()
    results, counter = called(other)
    assert len(launched) == 2 and results.shape == (400,) and all(results is not one for one in before)
    values = driver.launches[-1][3]
    assert struct.unpack("<16Q", values[0])[0] == other.data_ptr()
    assert [int.from_bytes(values[i], "little") for i in (9, 12)] == [results.data_ptr() + 800, counter.data_ptr()]
    called(q.transpose(1, 2).contiguous().transpose(1, 2))
    called(q, (0.25,))
    called(q, None)
    assert len(launched) == 5 and len(driver.launches) == 1


def test_tensors_that_were_one_when_a_launch_was_recorded_are_not_told_apart_but_launched_anew(driver):
    tensors, arguments = inputs()
    lse = tensors[1]
    arguments[-2] = KernelVariant(lse)
    launch = call(compiled(), arguments, (tensors[0], lse, lse))
    moved = lse.clone()
    assert launch.again((tensors[0], moved, moved))
    values = driver.launches[-1][3]
    assert {int.from_bytes(values[i], "little") for i in (9, 12)} == {moved.data_ptr()}
    assert not launch.again((tensors[0], lse, moved)) and len(driver.launches) == 1
    assert launch.again((tensors[0], lse, lse)) and len(driver.launches) == 2


def test_threads_that_share_a_launch_never_mix_their_addresses(driver):
    tensors, arguments = inputs()
    launch = call(compiled(), arguments, tensors)
    sets = [tensors, *([t.clone() for t in tensors] for _ in range(3))]
    threads = [threading.Thread(target=lambda given=given: [launch.again(given) for _ in range(200)]) for given in sets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(driver.launches) == 800
    for *_, values in driver.launches:
        seen = [int.from_bytes(values[place][:8], "little") for place in (0, 9, 12)]
        assert seen in [[t.data_ptr() for t in given] for given in sets]


@pytest.mark.parametrize("current", [None, 99])
def test_a_thread_without_a_context_gets_pytorchs(driver, current):
    driver.context = current
    thread = threading.Thread(target=replay.ensure_context, args=(1,))
    thread.start()
    thread.join()
    assert driver.context == (1235 if current is None else 99)


def test_a_remembered_launch_keeps_no_tensor(driver):
    tensors, arguments = inputs()
    seen = [weakref.ref(t) for t in tensors]
    launch = call(compiled(), arguments, tensors)
    del tensors, arguments
    assert [ref() for ref in seen] == [None] * 3
    tensors = inputs()[0]
    assert launch.again(tensors)
    seen = [weakref.ref(t) for t in tensors]
    del tensors
    assert [ref() for ref in seen] == [None] * 3


def test_addresses_that_need_another_kernel_are_not_launched(driver):
    tensors, arguments = inputs()
    launch = call(compiled(), arguments, tensors)
    assert not launch.again((tensors[0], torch.zeros(201)[1:], tensors[2])) and not driver.launches
    assert launch.again(tensors) and len(driver.launches) == 1


def test_an_error_of_the_driver_is_raised_in_its_words(driver):
    tensors, arguments = inputs()
    driver.statuses = [2]
    with pytest.raises(RuntimeError, match="out of patience"):
        call(compiled(), arguments, tensors).again(tensors)


def test_what_cannot_be_launched_again_says_why_in_a_sentence(driver, monkeypatch):
    assert replay.refusal(compiled()) is None
    assert "clusters" in replay.refusal(compiled(num_ctas=2))
    assert "scratch" in replay.refusal(compiled(global_scratch_size=64))
    changed = PTX.replace(".param .f32 some_kernel_param_11,", ".param .f64 some_kernel_param_11,")
    assert "other parameters than" in replay.refusal(compiled(ptx=changed))
    monkeypatch.setattr(replay, "_driver", lambda: None)
    assert "libcuda" in replay.refusal(compiled())
