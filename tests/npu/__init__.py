"""Tests that are particular to torch_npu and HCCL, and of the simulated NPU itself."""
