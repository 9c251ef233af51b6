"""Laws of the tool environments: built once, whole or not at all, from full pins."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from quantkit.environments import build
from quantkit.errors import ToolError

SIX = "six==1.17.0\n"


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of locks of our own, and a cache folder of our own."""
    folder = tmp_path / "locks"
    folder.mkdir()
    monkeypatch.setattr(build, "LOCKS", folder)
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.mark.parametrize("name", build.names())
def test_the_shipped_locks_are_full_pins_without_the_packages_that_break_a_cpu(name: str) -> None:
    pins = build.pins(name)
    assert "torch" in pins
    if name == "serve-cpu":
        assert not {"torchvision", "torchaudio", "torchcodec", "triton"} & set(pins)


def test_only_the_cuda_build_of_torch_satisfies_the_cuda_lock() -> None:
    text = (build.LOCKS / "serve-cuda.txt").read_text()
    assert f"torch==={build.pins('serve-cuda')['torch']}\n" in text


@pytest.mark.parametrize("line", ["six", "six>=1", "six==1.*", "six @ file:///x", "-r other.txt"])
def test_a_line_that_is_no_full_pin_is_refused(locks: Path, line: str) -> None:
    (locks / "tiny.txt").write_text(f"# fine\n{line}\n")
    with pytest.raises(ToolError, match="not a full pin") as caught:
        build.pins("tiny")
    assert caught.value.faults[0].where.endswith("tiny.txt:2")


def test_an_unknown_name_lists_the_known(locks: Path) -> None:
    (locks / "tiny.txt").write_text(SIX)
    with pytest.raises(ToolError, match="tiny"):
        build.sync("nonsense")


def test_pins_decide_the_folder_and_comments_do_not(locks: Path) -> None:
    lock = locks / "tiny.txt"
    lock.write_text(SIX)
    first = build.folder("tiny")
    lock.write_text("# a word more\n" + SIX)
    assert build.folder("tiny") == first
    lock.write_text("six==1.16.0\n")
    assert build.folder("tiny") != first


def test_a_build_happens_once_holds_what_the_lock_says_and_wipes_what_a_killed_one_left(locks: Path) -> None:
    (locks / "tiny.txt").write_text(SIX)
    rubbish = build.folder("tiny") / "bin" / "rubbish"
    rubbish.parent.mkdir(parents=True)
    rubbish.write_text("half")
    assert build.doctor()[0]["state"] == "a build was cut short"
    python = build.sync("tiny")
    assert not rubbish.exists()
    printed = subprocess.run([python, "-c", "import six; print(six.__version__)"], capture_output=True, text=True)
    assert printed.stdout.strip() == "1.17.0"
    made = (build.folder("tiny") / build.READY).stat().st_mtime_ns
    assert build.sync("tiny") == python
    assert (build.folder("tiny") / build.READY).stat().st_mtime_ns == made
    assert build.doctor()[0]["state"].startswith("built")


def test_a_failed_build_says_why_and_counts_for_nothing(locks: Path) -> None:
    (locks / "tiny.txt").write_text("six==0.0.0.1\n")
    with pytest.raises(ToolError, match="No matching distribution") as caught:
        build.sync("tiny")
    assert "quantkit env sync tiny" in caught.value.faults[0].do
    assert build.doctor()[0]["state"] == "a build was cut short"


def test_a_second_builder_waits_for_the_first(locks: Path, tmp_path: Path) -> None:
    (locks / "tiny.txt").write_text(SIX)
    code = "import sys; from pathlib import Path; from quantkit.environments import build;"
    code += f"build.LOCKS = Path({str(locks)!r}); print(build.sync('tiny'))"
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = {process.communicate(timeout=120)[0].strip() for process in both}
    assert answers == {str(build.folder("tiny") / "bin" / "python")}


def test_an_environment_for_gpus_is_refused_without_a_driver(locks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (locks / "tiny.txt").write_text(SIX)
    monkeypatch.setitem(build.FACTS, "tiny", build.Facts(1, 0.1, driver=True))
    monkeypatch.setattr(build, "has_driver", lambda: False)
    with pytest.raises(ToolError, match="no driver"):
        build.sync("tiny")
    assert not build.folder("tiny").exists()
    assert build.doctor()[0]["machine"] == "no NVIDIA driver"
