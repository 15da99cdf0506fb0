"""Repeated calls are launched with their own addresses, and otherwise as the first: a stand-in for the CUDA driver reads them."""

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

SIGNATURE = {"q_tensor": "tensordesc<fp16[1,1,64,16]>", "lse_ptr": "*fp32", "heads": "i32", "one": "constexpr", "scale": "fp32"}
SIGNATURE |= {"variant": KernelVariant("*i64", *["constexpr"] * (len(KernelVariant._fields) - 1)), "DIM": "constexpr"}
# As Triton compiles them: a tensor's map, lengths and strides; lse, heads, the scale, a seed, and memory that no kernel asks for.
POINTER = ".u64 .ptr .global .align 1"
PARAMETERS = [*[".u32"] * 4, *[".u64"] * 4, POINTER, ".u32", ".f32", *[POINTER] * 3]
SIZES = [128, *[4] * 4, *[8] * 4, 8, 4, 4, 8, 8, 8]
Q, LSE, SEED = 0, 9, 12  # parameters with addresses


def ptx(parameters: list[str] = PARAMETERS) -> str:
    named = [f".param {kind} kernel_param_{number}" for number, kind in enumerate(parameters, 1)]
    return ".visible .entry kernel(\n.param .align 128 .b8 kernel_param_0[128],\n" + ",\n".join(named) + "\n)\n.reqntid 128\n{\n"


class Driver:
    """Keeps the addresses, and the heads and scales, of what is launched."""

    def __init__(self):
        self.launches, self.numbers = [], []

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        values = [ctypes.string_at(place, size) for place, size in zip(parameters, SIZES, strict=True)]
        self.launches.append(tuple(int.from_bytes(values[which][:8], "little") for which in (Q, LSE, SEED)))
        self.numbers.append((int.from_bytes(values[LSE + 1], "little"), *struct.unpack("f", values[LSE + 2])))
        return 0

    def cuTensorMapEncodeTiled(self, place, element, rank, address, *rest):
        assert place.value % 64 == 0
        ctypes.memmove(place.value, address.value.to_bytes(8, "little"), 8)
        return 0


def compiled(code: str | None = None, **changed):
    meta = {"num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": False, "global_scratch_size": 0}
    meta |= {"profile_scratch_size": 0, "num_warps": 4, "shared": 1000}
    meta |= {"tensordesc_meta": [{"swizzle": 1, "elem_size": 2, "elem_type": 9, "block_size": [1, 1, 64, 16]}]}
    source, meta = types.SimpleNamespace(signature=SIGNATURE), types.SimpleNamespace(**meta | changed)
    return types.SimpleNamespace(metadata=meta, src=source, asm={"ptx": code or ptx()}, function=77)


def inputs() -> tuple[torch.Tensor, ...]:
    return torch.zeros(1, 2, 100, 16, dtype=torch.float16), torch.zeros(200), torch.zeros(1, dtype=torch.int64)


def recorded(*tensors):
    """A launch that was made with q, lse and a seed, which may be lse."""
    q, lse, seed = tensors
    arguments = [descriptor_or_rows(q, 64, 16), lse, 2, 1, 0.5, KernelVariant(seed), 16]
    return replay.ReplayedCall([(compiled(), (3, 2), arguments)], tensors, (), [])


def addresses(tensors) -> tuple[int, ...]:
    return tuple(t.data_ptr() for t in tensors)


@pytest.fixture
def driver(monkeypatch):
    stand_in = Driver()
    monkeypatch.setattr(replay, "raw_stream", lambda device: 5)
    monkeypatch.setattr(replay, "current_gpu", lambda: None)  # like the index of a CPU
    monkeypatch.setattr(replay, "_driver", lambda: stand_in)
    monkeypatch.setattr(replay, "_driver_version", lambda: 13020)
    return stand_in


def test_the_third_call_of_a_kind_is_replayed_into_new_results(driver, monkeypatch):
    launched, counters = [], [torch.zeros(1, dtype=torch.int64) for _ in range(9)]
    mask, kernel = type("Mask", (), {"selected_from": None})(), types.SimpleNamespace(fn=None)
    monkeypatch.setattr(launch, "launch", lambda *given: launched.append(given) or compiled())

    def called(q, key=(0.5,)):
        def run(recording):
            results, counter = recording.fresh(torch.zeros(400)), recording.each_time(counters.pop)
            arguments = [descriptor_or_rows(q, 64, 16), results[200:], 2, 1, 0.5, KernelVariant(counter)]
            recording.launch(kernel, ((3, 2), arguments, {"DIM": 16}, {}))
            return results, counter

        return launch.launch_or_repeat_alike(kernel, mask, key, (q,), run)

    q = inputs()[0]
    before = [called(q)[0] for _ in range(2)]
    assert len(launched) == 2 and not driver.launches
    other = q.clone()
    results, counter = called(other)
    assert len(launched) == 2 and results.shape == (400,) and all(results is not one for one in before)
    assert driver.launches == [(other.data_ptr(), results.data_ptr() + 800, counter.data_ptr())] and driver.numbers == [(2, 0.5)]
    called(q.transpose(1, 2).contiguous().transpose(1, 2))
    called(q, (0.25,))
    assert len(launched) == 4 and len(driver.launches) == 1
    seen = [weakref.ref(tensor) for tensor in (other, results, counter)]
    del other, results, counter
    assert [tensor() for tensor in seen] == [None] * 3


def test_tensors_that_need_another_kernel_or_gpu_are_launched_again(driver, monkeypatch):
    q, lse, seed = inputs()
    apart, alike, moved = recorded(q, lse, seed), recorded(q, lse, lse), lse.clone()
    assert not apart.again((q, torch.zeros(201)[1:], seed))  # it starts at no multiple of 16 bytes
    assert not alike.again((q, lse, moved))  # of which the recorded launch had one
    with monkeypatch.context() as patch:
        patch.setattr(replay, "current_gpu", lambda: 1)
        assert not apart.again((q, lse, seed))
    assert not driver.launches
    assert apart.again((q, lse, seed)) and alike.again((q, moved, moved)) and alike.again((q, lse, lse))
    assert driver.launches == list(map(addresses, ((q, lse, seed), (q, moved, moved), (q, lse, lse))))


def test_threads_that_share_a_launch_never_mix_their_addresses(driver):
    sets = [inputs() for _ in range(4)]
    call = recorded(*sets[0])
    threads = [threading.Thread(target=lambda given=given: [call.again(given) for _ in range(200)]) for given in sets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(driver.launches) == 800 and set(driver.launches) == set(map(addresses, sets))


def test_what_cannot_be_launched_again_says_why_in_a_sentence(driver, monkeypatch):
    assert replay.refusal(compiled()) is None
    assert "clusters" in replay.refusal(compiled(num_ctas=2))
    assert "scratch" in replay.refusal(compiled(global_scratch_size=64))
    assert "other parameters than" in replay.refusal(compiled(ptx([kind.replace("f32", "f64") for kind in PARAMETERS])))
    monkeypatch.setattr(replay, "_driver", lambda: None)
    assert "libcuda" in replay.refusal(compiled())
