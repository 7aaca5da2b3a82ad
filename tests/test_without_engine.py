"""The base install, without torch and numpy: what computes says in one sentence what is missing."""

import subprocess
import sys

import pytest

HIDDEN = "import sys\nsys.modules['torch'] = sys.modules['numpy'] = None\n"


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process that has neither torch nor numpy."""
    return subprocess.run((sys.executable, "-c", HIDDEN + code), capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("words", [["serve", "--port", "0"], ["generate", "hi"], ["calibrate"]], ids=str)
def test_a_command_says_it_in_one_sentence(words: list[str]) -> None:
    result = run(f"sys.argv = ['diptych', *{words!r}]\nfrom diptych.cli.main import main; main()")
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: computing needs torch and numpy, which are not installed: pip install ")
    assert "Traceback" not in result.stderr and result.stderr.count("\n") == 1


def test_the_library_says_it_when_a_model_is_made() -> None:
    code = "from diptych import LLM, SamplingParams\ntry:\n    LLM()\nexcept ValueError as error:\n    print(error)"
    result = run(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("computing needs torch and numpy")


def test_models_are_described_all_the_same() -> None:
    result = run("sys.argv = ['diptych', 'models']\nfrom diptych.cli.main import main; main()")
    assert result.returncode == 0, result.stderr
    assert any("stdlib-python" in line and "not here" in line for line in result.stdout.splitlines())
    assert "computing needs torch and numpy" in result.stdout
