"""Checks that need a GPU: nccl, bfloat16 kernels, streams, CUDA graphs.

tests/torch/test_gpu_bodies.py keeps the bodies in order where there is no GPU, by running them on the CPU.
"""
