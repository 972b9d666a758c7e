"""A device made of host memory, to test the mirror's rules without a GPU: late mirror stores and faults on request."""

from gpu.simulated.backend import SimulatedBackend
from gpu.simulated.faults import Fault, FaultyKernels, FaultyPoison, StoreFault
from gpu.simulated.memory import SimulatedMemory

__all__ = ["Fault", "FaultyKernels", "FaultyPoison", "SimulatedBackend", "SimulatedMemory", "StoreFault"]
