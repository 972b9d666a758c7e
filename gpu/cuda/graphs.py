"""Captured steps, one per shape; replaying one costs a single launch.

The first step of a shape runs launch by launch, which loads its kernels; the second is captured.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

from cuda.core import Stream

from gpu.cuda.step_shape import StepShape

_MAX_GRAPHS: Final = 64


class StepGraphs:
    """Graphs by shape, least recently used dropped first. A graph keeps raw addresses: buffers must outlive it."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._graphs: OrderedDict[StepShape, Any | None] = OrderedDict()
        self.num_captured = 0

    def launch(self, shape: StepShape, record: Callable[[Any], None]) -> None:
        """Queue the step of a shape. `record(stream)` launches its kernels, on a stream or into a capture."""
        if shape not in self._graphs:
            self._graphs[shape] = None
            self._drop_oldest()
            record(self._stream)
            return
        graph = self._graphs[shape]
        if graph is None:
            graph = self._graphs[shape] = self._capture(record)
        self._graphs.move_to_end(shape)
        graph.launch(self._stream)

    def close(self) -> None:
        """Drop every graph; none may be running."""
        for graph in self._graphs.values():
            if graph is not None:
                graph.close()
        self._graphs.clear()

    def _drop_oldest(self) -> None:
        if len(self._graphs) <= _MAX_GRAPHS:
            return
        _, graph = self._graphs.popitem(last=False)
        if graph is not None:
            self._stream.sync()
            graph.close()

    def _capture(self, record: Callable[[Any], None]) -> Any:
        builder = self._stream.create_graph_builder()
        builder.begin_building()
        record(builder)
        self.num_captured += 1
        return builder.end_building().complete()
