"""Ascend NPUs that are not there: the real torch_npu over a stand-in for the CANN runtime and HCCL, in host memory.

    python -m tests.simulated_npu run python -m pytest tests/npu       # with HYPER_PARALLEL_PLATFORM=torch-npu
    python -m tests.simulated_npu check                                # why it cannot run here, if it cannot
    python -m tests.simulated_npu calls                                # the table of CANN's calls

`run` compiles the C files of ``cann/`` with gcc (`build`), and has every Python process below it load the result in
place of CANN as soon as it imports torch_npu (`preload`). The operators that torch_npu registers then run torch's CPU
kernels on the memory of the simulated device (`aten_kernels`, `fused_kernels`). docs/simulated_npu.md says how far this
goes.
"""
