"""What is particular to torch_npu and HCCL, and the simulated NPU itself."""
