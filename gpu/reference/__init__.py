"""NumPy oracle of the KV kernels: slow, plain, and the reference for the bytes of every backend."""

from gpu.reference.kv_kernels import ReferenceKVKernels

__all__ = ["ReferenceKVKernels"]
