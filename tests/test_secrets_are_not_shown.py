"""No key, secret or password is shown where settings are printed, nor stands in the arguments of a pod."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from diptych.bench.target import TargetConfig
from diptych.diagnosis.adapters.http_get import Site
from diptych.serving.api.server import ServerOptions
from diptych.serving.link.engine_options import EngineOptions, WorkerPlace

ROOT = Path(__file__).parent.parent
SECRET = re.compile(r"(\w*_)?(secret|password|passphrase|private_key|api_keys?|admin_key|key_to_\w+)")
MARKER = "marker-that-must-not-be-seen"
PLAIN_OPTIONS = re.compile(r"--(api-key|admin-key|password|token|secret)\b(?!-)")


def fields() -> Iterator[tuple[str, ast.ClassDef, ast.AnnAssign]]:
    """The file, the class and the field of each text or bytes with the name of a secret."""
    for path in sorted((ROOT / "src").rglob("*.py")):
        for found in ast.walk(ast.parse(path.read_text())):
            if not isinstance(found, ast.ClassDef) or not makes_repr(found):
                continue
            for line in found.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    kind = ast.unparse(line.annotation)
                    if SECRET.fullmatch(line.target.id) and re.search(r"\b(str|bytes)\b", kind):
                        yield str(path.relative_to(ROOT)), found, line


def makes_repr(found: ast.ClassDef) -> bool:
    made = [ast.unparse(each) for each in (*found.decorator_list, *found.bases)]
    return any("dataclass" in each or "Struct" in each or "NamedTuple" in each for each in made)


def test_a_field_that_holds_a_secret_is_left_out_of_what_is_printed() -> None:
    known = list(fields())
    assert len(known) >= 5
    shown = [
        f"{path}: {owner.name}.{ast.unparse(line.target)}"
        for path, owner, line in known
        if "repr=False" not in ast.unparse(line)
        and not any(isinstance(each, ast.FunctionDef) and each.name == "__repr__" for each in owner.body)
    ]
    assert not shown, "declare them with field(repr=False)"


def test_settings_are_printed_without_their_secrets() -> None:
    place = WorkerPlace(number=0, role="both", transfer="auto", secret=MARKER.encode())
    for settings in (
        ServerOptions(api_keys=(MARKER,), admin_key=MARKER),
        TargetConfig(url="http://127.0.0.1:1", api_key=MARKER),
        Site("http://127.0.0.1:1", MARKER),
        place,
        EngineOptions(place=place),
    ):
        assert MARKER not in f"{settings!r} {settings}"


def test_no_manifest_has_a_secret_in_arguments_or_in_plain_variables() -> None:
    files = sorted((ROOT / "deploy").rglob("*.yaml"))
    assert len(files) >= 5
    for path in files:
        text = path.read_text()
        assert not PLAIN_OPTIONS.search(text), path
        assert "kind: Secret" not in text and "stringData" not in text, path
        for name, following in re.findall(r"- name: (\w*(?:KEY|TOKEN|PASSWORD|SECRET)\w*)\n(.*)", text):
            assert "valueFrom" in following, (path, name)
