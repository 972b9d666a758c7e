"""Reads the small subset of Dockerfiles that ours use, and runs a build stage without a container engine.

Every absolute path of the image below /opt and /src becomes a path below a folder of ours; RUN lines run with an empty
environment. That proves that the install steps work from the locked files and the tracked sources alone.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.errors import DeployError

_IMAGE_PATHS = re.compile(r"(?<![\w.$}])/(opt|src)(?=[/\s]|$)")


class BadDockerfile(DeployError):
    """A Dockerfile uses an instruction or a source that it should not, or one of its steps fails."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: its upper-case name and the rest of the (joined) line."""

    name: str
    value: str


def parse_stages(text: str) -> list[list[Instruction]]:
    """The instructions of each stage, each beginning with its FROM."""
    joined = re.sub(r"\\\n\s*", " ", text)
    stages: list[list[Instruction]] = []
    for line in joined.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, _, value = line.strip().partition(" ")
        if name == "FROM":
            stages.append([])
        if not stages:
            raise BadDockerfile(f"{name} before FROM")
        stages[-1].append(Instruction(name, value.strip()))
    return stages


class StageRun:
    """Runs one build stage below `root`, taking sources from `context` as far as they are in `tracked`."""

    def __init__(self, root: Path, context: Path, tracked: Sequence[str], environment: Mapping[str, str]) -> None:
        self.root = root
        self._context = context
        self._tracked = tracked
        self._environment = environment
        self._workdir = root

    def run(self, stage: Sequence[Instruction], timeout_s: float) -> None:
        """Run every instruction in order. Raises BadDockerfile at the first that fails."""
        for instruction in stage:
            match instruction.name:
                case "FROM":
                    pass
                case "WORKDIR":
                    self._workdir = Path(self._inside(instruction.value))
                    self._workdir.mkdir(parents=True, exist_ok=True)
                case "COPY":
                    self._copy(instruction.value.split())
                case "RUN":
                    self._shell(instruction.value, timeout_s)
                case other:
                    raise BadDockerfile(f"{other} is not expected in a build stage")

    def _inside(self, text: str) -> str:
        return _IMAGE_PATHS.sub(lambda path: f"{self.root}/{path[1]}", text)

    def _copy(self, words: Sequence[str]) -> None:
        *sources, target = words
        for source in sources:
            files = [name for name in self._tracked if name == source or name.startswith(source + "/")]
            if not files:
                raise BadDockerfile(f"COPY {source}: not a tracked file or folder")
            # As Docker does: a file goes into a target that ends with a slash, a folder gives its contents.
            place = self._workdir / target
            place = place / Path(source).name if target.endswith("/") and files == [source] else place
            for name in files:
                destination = place / name[len(source) + 1 :] if name != source else place
                destination.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self._context / name, destination)

    def _shell(self, command: str, timeout_s: float) -> None:
        result = subprocess.run(
            ["/bin/sh", "-ec", self._inside(command)], cwd=self._workdir, env=dict(self._environment),
            capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
        if result.returncode != 0:
            raise BadDockerfile(f"RUN {command}\n{(result.stdout + result.stderr)[-2000:]}")
