"""CPU backend: Numba kernels over the mirror itself.

Importing the package points Numba's disk cache at a folder that belongs to exactly these sources: Numba itself only
watches the file of the outermost function, and would go on using kernels whose inner parts have changed.
"""

from gpu.cpu.compile_cache import use_compile_cache

use_compile_cache()
