"""get_accelerator() on a CUDA device."""

from __future__ import annotations

import torch

from shardwise_deepspeed.accelerator import Accelerator


def test_cuda_is_an_accelerator() -> None:
    cuda = Accelerator("cuda")
    assert (cuda.device_name(), cuda.device_name(0), cuda.current_device_name()) == ("cuda", "cuda:0", "cuda:0")
    assert cuda.is_available() and cuda.device_count() >= 1 and cuda.communication_backend_name() == "nccl"
    with cuda.device(0), cuda.stream(cuda.Stream()):
        tensor = cuda.FloatTensor([1.0, 2.0])
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        begin.record()
        tensor += 1
        end.record()
    cuda.synchronize()
    assert cuda.on_accelerator(tensor) and tensor.tolist() == [2.0, 3.0] and begin.elapsed_time(end) >= 0
    assert 0 < cuda.memory_allocated() <= cuda.max_memory_allocated() <= cuda.total_memory()
    assert 0 < cuda.available_memory() < cuda.total_memory() and cuda.memory_stats()
    cuda.manual_seed(1)
    state = cuda.get_rng_state()
    first = torch.rand(1, device="cuda")
    cuda.set_rng_state(state)
    assert torch.equal(first, torch.rand(1, device="cuda"))
    assert cuda.is_pinned(cuda.pin_memory(torch.ones(1))) and torch.float32 in cuda.supported_dtypes()
    cuda.empty_cache()
    cuda.reset_peak_memory_stats()
