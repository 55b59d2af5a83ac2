"""The operations as Triton kernels, for NVIDIA GPUs of compute capability 8.0 and up."""
