"""A first start says how far it is."""

from __future__ import annotations

from pathlib import Path

from deploy.compile_progress import CompileProgress


def test_progress_reports_each_new_number_once_and_nothing_of_an_earlier_start(tmp_path: Path) -> None:
    log, told = tmp_path / "w1.log", list[str]()
    log.write_text("[INFO] kernels compiled: 60\n")
    progress = CompileProgress([log, tmp_path / "w2.log"], told.append)
    progress.tell()
    with log.open("a") as more:
        more.write("[INFO] kernels compiled: 3\n[INFO] kernels compiled: 9\n")
    progress.tell()
    progress.tell()
    assert told == ["first start: 9 kernels compiled, kept for the next one"]
