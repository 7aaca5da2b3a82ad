"""scripts/link_bytecode.py: what was compiled beside its source is found in a folder of byte code, too."""

import importlib
import importlib.util
import py_compile
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from link_bytecode import compiled, link, place_of


@pytest.fixture(autouse=True)
def no_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte code is written beside its source, as where an environment is installed."""
    monkeypatch.setattr(sys, "pycache_prefix", None)


def test_byte_code_lies_where_python_looks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [tmp_path / "lib" / name for name in ("one.py", "package/two.py", "package/deep/three.py")]
    for source in sources:
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text("VALUE = 1\n")
        py_compile.compile(str(source), doraise=True)
    (tmp_path / "lib" / "package" / "data.pyc").touch()
    target = tmp_path / "target"
    assert link([tmp_path / "lib"], target) == len(sources) == len(list(compiled(tmp_path / "lib")))
    assert link([tmp_path / "lib"], target) == 0
    places = {place_of(file, target) for file in compiled(tmp_path / "lib")}
    monkeypatch.setattr(sys, "pycache_prefix", str(target))
    assert places == {Path(importlib.util.cache_from_source(str(source))) for source in sources}
    assert all(place.read_bytes() for place in places)


def test_byte_code_that_is_stale_is_replaced_and_what_it_was_linked_to_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "lib" / "stale_module.py", tmp_path / "target"
    source.parent.mkdir()
    source.write_text("VALUE = 1\n")
    beside = Path(str(py_compile.compile(str(source), doraise=True)))
    before = beside.read_bytes()
    link([source.parent], target)
    source.write_text("VALUE = 22\n")
    monkeypatch.setattr(sys, "pycache_prefix", str(target))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.syspath_prepend(source.parent)
    module = importlib.import_module("stale_module")
    monkeypatch.delitem(sys.modules, "stale_module")
    assert module.VALUE == 22
    assert not place_of(beside, target).is_symlink() and beside.read_bytes() == before
