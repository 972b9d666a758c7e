"""Errors of the `gpu` package.

    GpuError
    |-- LayoutError            a layout or format that cannot exist (raised at load)
    |-- ModelFileError         a model file that cannot be trusted or used (raised at load)
    |   |-- FileTruncated      the file is shorter than its own header says
    |   |-- TensorMissing      the architecture needs a tensor that the file lacks
    |   `-- UnsupportedModel   a sound file of an architecture, tensor type or option that we do not serve
    |-- DeviceUnavailable      no usable GPU, driver or CUDA package (raised at start; says what is missing)
    |-- DeviceFailure          a CUDA call failed: the device's state is unknown (ends the process)
    |-- KernelCompileError     NVRTC refused a kernel (raised at start; carries the compiler's log)
    |-- PlanError              a step plan or a call that breaks the cache's contract, refused before anything is queued
    |-- CapacityError          no page or device slot is free (the engine evicts, preempts or refuses)
    |-- UnfilledPage           a restored page still holds poison (counts as damaged, is recomputed)
    |-- InvariantViolation     a rule of the cache was broken by our own code (ends the process)
    |   |-- UnprovenAppend     mirror-store counts differ from the plan (quarantine)
    |   |-- MirrorDivergence   mirror and device bytes differ (quarantine)
    |   |-- PoisonedPage       a page that still holds poison was to be sealed or was handed out unpoisoned
    |   |-- WriteOutOfBounds   a write outside the cells that a plan owns
    |   `-- HoldViolation      a page freed, reused or evicted while something still holds it
    `-- NonFiniteInput         NaN or Inf reached append (fails that turn alone)
"""

from __future__ import annotations


class GpuError(Exception):
    """Root of the package's errors."""


class LayoutError(GpuError):
    """A KV layout or format that cannot exist. Raised at load; the message names field, value and limit."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field}={value!r}: {limit}")
        self.field = field
        self.value = value
        self.limit = limit


class ModelFileError(GpuError):
    """A model file that is damaged, hostile or not supported. Raised at load; the worker refuses to start."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field}={value!r}: {limit}")
        self.field = field
        self.value = value
        self.limit = limit


class FileTruncated(ModelFileError):
    """A model file is shorter than its header says. Raised at load; fetch the file again."""

    def __init__(self, field: str, needed: int, size: int) -> None:
        super().__init__(f"end of {field}", needed, f"file short by {needed - size} bytes")
        self.short_by = needed - size


class TensorMissing(ModelFileError):
    """A model file lacks a tensor that its architecture needs. Raised at load."""

    def __init__(self, name: str) -> None:
        super().__init__("tensor", name, f"tensor missing: {name}")


class UnsupportedModel(ModelFileError):
    """A sound model file that asks for something we do not serve. Raised at load; names what is served."""

    def __init__(self, what: str, value: object, served: str) -> None:
        super().__init__(what, value, f"{what} unsupported, served: {served}")


class DeviceUnavailable(GpuError):
    """No usable GPU, driver or CUDA package. Raised at start; the message says what is missing and how to get it."""


class DeviceFailure(GpuError):
    """A CUDA call failed. Such errors stay with the process, which ends; its turns go on elsewhere."""


class KernelCompileError(GpuError):
    """NVRTC refused a kernel source. Raised at start, with the compiler's log."""

    def __init__(self, file: str, log: str) -> None:
        super().__init__(f"gpu/kernels/{file}: {log}")
        self.file = file
        self.log = log


class PlanError(GpuError):
    """A step plan or cache call that breaks the contract. Refused before anything changes; a bug of the caller."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field}={value!r}: {limit}")
        self.field = field
        self.value = value
        self.limit = limit


class CapacityError(GpuError):
    """No free page or device slot. The engine evicts, preempts or refuses the request."""

    def __init__(self, what: str, needed: int, free: int) -> None:
        super().__init__(f"{what}: {needed} needed, {free} free")
        self.what = what
        self.needed = needed
        self.free = free


class UnfilledPage(GpuError):
    """A restored page still holds poison: a short read, or a writer that stored less than a page of cells.

    The caller abandons the page, counts it as damaged and recomputes.
    """


class InvariantViolation(GpuError):
    """A rule of the cache was broken by our own code. The worker quarantines itself."""


class UnprovenAppend(InvariantViolation):
    """The mirror-store counts of a step differ from its plan."""


class MirrorDivergence(InvariantViolation):
    """Mirror and device bytes of a page differ, or two pages that must be equal do.

    page_indices: the pages of the arena that may be wrong; none when that is not known. Turns that have read them in
    the mirror end with it (engine).
    """

    def __init__(self, message: str, page_indices: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.page_indices = page_indices


class PoisonedPage(InvariantViolation):
    """A page held poison where cells were expected, or was handed out without poison."""


class WriteOutOfBounds(InvariantViolation):
    """A write outside the cells that a plan owns."""


class HoldViolation(InvariantViolation):
    """A page was freed, reused or evicted while something still held it."""


class NonFiniteInput(GpuError):
    """NaN or Inf reached append. Fails that turn alone."""


def invariant(condition: bool, error: type[InvariantViolation], message: str) -> None:
    """Raise `error` unless `condition` holds; stays on in production."""
    if not condition:
        raise error(message)
