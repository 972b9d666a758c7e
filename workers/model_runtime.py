"""Makes a backend from settings: model file, weights, cache, kernels."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

from gpu.backend import Backend
from gpu.cache import MirrorArena
from gpu.cpu.backend import CpuBackend, unified_cache
from gpu.cpu.compile_cache import compiling
from gpu.cpu.kv_kernels import NumbaKVKernels
from gpu.cpu.sampling import HostSampler
from gpu.cpu.threads import CpuThreads
from gpu.errors import DeviceUnavailable
from gpu.layout import KVLayout
from gpu.model.config import ModelConfig
from gpu.model.forward import HostModel
from gpu.model.rope import rope_table
from gpu.model.tensors import WeightStorage
from gpu.simulated.backend import SimulatedBackend
from gpu.warm_up import warm_up
from snapshot_store.fingerprint import Fingerprint
from workers.fingerprints import fingerprint_of
from workers.model_plan import plan_model
from workers.model_source import LoadedSource, open_model
from workers.settings import WorkerSettings

_log = logging.getLogger(__name__)
_HOST_STORAGE = MappingProxyType({"auto": None, "f32": WeightStorage.F32, "bf16": WeightStorage.BF16})
_CUDA_STORAGE = MappingProxyType({"auto": "BF16", "bf16": "BF16", "int8": "INT8", "int4": "INT4"})


@dataclass(frozen=True, slots=True)
class ModelRuntime:
    """A loaded model on its backend, its kernels compiled. context_length: tokens of prompt and reply together.

    device: what computes, for people. warm_up_rows_per_s: how fast a few prompt rows were computed; a lower bound.
    """

    source: LoadedSource
    layout: KVLayout
    backend: Backend
    fingerprint: Fingerprint
    context_length: int
    device: str
    warm_up_rows_per_s: float

    @property
    def arena_cells(self) -> int:
        """Cells of an empty arena."""
        return self.backend.cache.num_pages * self.layout.page_size

    def close(self) -> None:
        """Release the backend. The engine must have stopped."""
        self.backend.close()


def load_runtime(settings: WorkerSettings) -> ModelRuntime:
    """Open the model, pack its weights, allocate the mirror, compute the fingerprint and compile every kernel.

    Raises ModelFileError, TokenizerError, LayoutError, or for `cuda` DeviceUnavailable, that names what is wrong.
    """
    begun = time.monotonic()
    source = open_model(settings.model)
    config, layout, num_pages = plan_model(source.config, settings)
    load = _load_cuda if settings.backend == "cuda" else _load_host
    with load(settings, source, config, layout) as (backend, storage, device):
        fingerprint = fingerprint_of(source, layout, backend, storage)
        rows_per_s = warm_up(backend)
    _log.info("%s on %s ready in %.1f s: %d pages", source.name, backend.name, time.monotonic() - begun, num_pages)
    return ModelRuntime(source, layout, backend, fingerprint, config.context_length, device, rows_per_s)


@contextmanager
def _load_host(
    settings: WorkerSettings, source: LoadedSource, config: ModelConfig, layout: KVLayout
) -> Iterator[tuple[Backend, str, str]]:
    """A backend that computes on the host, how it stores weights, with what; inside, its kernels may be compiled."""
    mirror = MirrorArena.allocate(settings.mirror_bytes // layout.page_bytes * layout.page_bytes)
    threads = CpuThreads(settings.threads)
    weights = source.load_weights(_HOST_STORAGE[settings.weights])
    kernels, rope, sampler = NumbaKVKernels(threads), rope_table(config), HostSampler()
    # Numba compiles a kernel for all formats and shapes; whether a model needs it depends on its architecture.
    with compiling(f"{settings.backend}-{config.architecture}"):
        model = HostModel(config, weights, threads)
        storage = weights.layers[0].q.storage.value
        attest, resident, device = settings.attest, settings.kv_resident, f"{settings.threads} threads"
        if settings.backend == "simulated":
            yield (
                SimulatedBackend(
                    model, layout, mirror, kernels, rope, sampler, settings.max_step_rows, attest=attest,
                    resident_cells=resident, threads=threads,
                ),
                storage, device,
            )  # fmt: skip
        else:
            cache = unified_cache(layout, mirror, kernels, rope, attest=attest, resident_cells=resident)
            yield CpuBackend(model, cache, sampler, settings.max_step_rows, threads), storage, device


@contextmanager
def _load_cuda(
    settings: WorkerSettings, source: LoadedSource, config: ModelConfig, layout: KVLayout
) -> Iterator[tuple[Backend, str, str]]:
    """A backend on a GPU, how it stores weights, the name and UUID of the GPU."""
    try:
        from gpu.cuda.load import CudaOptions, load_cuda_backend
        from gpu.cuda.weight_packing import PackedStorage
    except ImportError as error:
        raise DeviceUnavailable(
            f'the cuda backend needs the package {error.name}: pip install "kvalet[worker,cuda13]"'
        ) from error
    options = CudaOptions(
        device=settings.device,
        storage=PackedStorage[_CUDA_STORAGE[settings.weights]],
        mirror_bytes=settings.mirror_bytes,
        device_kv_bytes=None if settings.device_kv_mib is None else settings.device_kv_mib << 20,
        max_sequences=2 * settings.slots + 2,
        step_rows=settings.max_step_rows,
        attest=settings.attest,
        resident_cells=settings.kv_resident,
    )
    backend = load_cuda_backend(source.source, config, layout, rope_table(config), options)
    yield backend, options.storage.name.lower(), f"{backend.device.name}, GPU-{backend.device.uuid}"
