"""A first start says how far it is."""

from __future__ import annotations

from pathlib import Path

from deploy.compile_progress import CompileProgress


def test_progress_reports_each_new_number_once_and_nothing_of_an_earlier_start(tmp_path: Path) -> None:
    log, told = tmp_path / "w1.log", list[str]()
    log.write_text("[INFO] kernels compiled: 60\n")
    progress = CompileProgress([log, tmp_path / "w2.log"], told.append)
    progress.tell()
    for lines in ("[INFO] kernels compiled: 0\n", "[INFO] kernels compiled: 3\n[INFO] kernels compiled: 9\n"):
        with log.open("a") as more:
            more.write(lines)
        progress.tell()
        progress.tell()
    minute = "first start: kernels are compiled, which takes about a minute and is kept"
    assert told == [minute, "first start: 9 kernels compiled"]
