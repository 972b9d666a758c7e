"""One thing that the doctor has looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Finding:
    """fine: it can be used. detail: what was found, or what to do. needed: what was asked for fails without it.

    facts: figures for `--json`.
    """

    subject: str
    fine: bool
    detail: str
    needed: bool = True
    facts: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def missing(self) -> bool:
        """Whether something has to be done."""
        return self.needed and not self.fine
