"""The lowest versions that may be installed have no vulnerability that is known and that concerns what is used here."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

PROJECT = Path(__file__).parent.parent / "pyproject.toml"
FIXED_IN = {  # the version with the last fix
    "cryptography": "44.0.1",  # of the OpenSSL that its wheels contain
    "jinja2": "3.1.6",  # the sandbox
    "pydantic": "2.4.0",
    "python-multipart": "0.0.22",
    "starlette": "0.49.1",  # ranges of files, parts of forms
    "torch": "2.6",
}


def lowest_versions() -> dict[str, Version]:
    project = tomllib.loads(PROJECT.read_text())["project"]
    texts = [*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)]
    found: dict[str, Version] = {}
    for requirement in map(Requirement, texts):
        for specifier in requirement.specifier:
            if specifier.operator == ">=":
                version = Version(specifier.version)
                found[requirement.name] = min(version, found.get(requirement.name, version))
    return found


@pytest.mark.parametrize("name", FIXED_IN)
def test_no_version_with_a_known_vulnerability_is_allowed(name: str) -> None:
    assert lowest_versions()[name] >= Version(FIXED_IN[name])
