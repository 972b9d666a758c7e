"""CPU backend: Numba kernels over the mirror itself."""
