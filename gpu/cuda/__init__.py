"""The `cuda` backend: NVRTC-compiled kernels, driven through cuda-python."""
