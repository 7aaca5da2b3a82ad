"""The benchmarks are run by hand; what they import and call them by must still exist."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
PARTS = sorted(BENCHMARKS.glob("*_parts/*.py"))
MODULES = [
    *(path.stem for path in sorted(BENCHMARKS.glob("*.py"))),
    *(f"{path.parent.name}.{path.stem}" for path in PARTS),
]
IMPORTS = """
import argparse, importlib, sys
paths = list(sys.path)
ours = {name.split(".")[0] for name in sys.argv[1:]} | {"diptych", "tests"}
for name in sys.argv[1:]:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert error.name.split(".")[0] not in ours, f"{name}: {error}"
    else:
        if "_parts." in name and hasattr(module, "main"):
            parser = argparse.ArgumentParser(description=module.__doc__)
            module.add_options(parser)
            parser.add_argument("--json")
            parser.format_help()
    sys.path[:] = paths
    for other in ("servers", "common"):  # each script's own
        sys.modules.pop(other, None)
"""


LIMITS = """
from engine import StepWork, kind_of_products
ceilings = {"read_gbps": 10.0, "bf16_gflops": 100.0, "int8_gflops": 200.0, "fp32_gflops": 50.0}
found = StepWork(8, 10**9, 2e9, 0.05).limit(ceilings, "bf16")
assert (found["limit"], found["ceiling"]) == ("read bandwidth", round(8 / 0.15, 1)), found
found = StepWork(2048, 10**9, 4e12, 0.05).limit(ceilings, "int8")
assert (found["limit"], found["int8 products ms"]) == ("int8 products", 20_000.0), found
assert StepWork(1, 10**6, 1e6, 0.05).limit(ceilings, "bf16")["limit"] == "attention"
kinds = [kind_of_products(*each, ceilings) for each in (("avx512_bf16", "none"), ("avx512", "none"), ("avx2", "int4"))]
assert kinds == ["bf16", "fp32", "int8"], kinds
"""


HOSTILE = """
from collections import Counter
from hostile import Course, percentile
from hostile_attacks import ATTACKS, Pace
assert len({attack.name for attack in ATTACKS}) == len(ATTACKS)
course = Course(attacks=[(10.0, 20.0)], calms=[(0.0, 10.0), (25.0, 30.0)])
waits = [(5.0, 1.0), (10.5, 1.0), (15.0, 0.1), (21.0, 2.0), (24.0, 1.0), (26.0, 2.0), (29.0, 1.0), (24.5, 12.0)]
assert course.split(waits) == ([1.0, 1.0], [1.0, 0.1, 2.0, 12.0]), course.split(waits)
assert (percentile(range(1, 101), 99), percentile([3.0], 50), percentile([], 99)) == (99, 3.0, None)
pace = Pace(0.2, 10.0, 1.0)
assert pace.pause_s(11.0, 1.2) < 1e-9 and abs(pace.pause_s(11.0, 1.4) - 1.0) < 1e-9 and pace.pause_s(20.0, 1.4) == 0.0
small = next(attack for attack in ATTACKS if attack.name == "small requests")
ends = ["200", "429 queue_full", "open at the end", "429 queue_full without Retry-After", "503 queue_full", "500",
        "ECONNRESET", "unanswered", "partial 200: ECONNRESET", "closed by the server", "dropped"]
for server in ("serve", "front"):
    assert set(small.wrong_ends(Counter(ends).items(), server)) == set(ends[3:])
deep = next(attack for attack in ATTACKS if attack.name == "deep JSON")
assert deep.wrong_ends([("200", 2), ("400", 1)], "serve") == {"200": 2} and not deep.wrong_ends([("200", 2)], "front")
for attack in ATTACKS:
    assert not [end for end in attack.expect if not end.split()[0].isdigit()], attack
"""

REPLIES = """
from loopback import Reply, is_by_the_book
def reply(*parts):
    found = Reply()
    for part in parts:
        found.feed(part)
    return found
end, body = bytes([13, 10]), b'{"code":"no_room"}'
head = b"HTTP/1.1 503 X" + end + b"content-length: 18" + end
bare, told = head + end + body, head + b"retry-after: 1" + end + end + body
assert reply(bare).fate("") == "503 no_room without Retry-After" and not is_by_the_book(reply(bare).fate(""))
assert reply(told).fate("") == "503 no_room" and is_by_the_book(reply(told).fate(""))
for size in range(1, len(told)):
    part = reply(told[:size])
    assert not part.is_whole and not is_by_the_book(part.fate("ECONNRESET", is_closed=True)), size
assert reply(told[:-1]).fate("ECONNRESET") == "partial 503: ECONNRESET" and reply().fate("ECONNRESET") == "ECONNRESET"
chunked = b"HTTP/1.1 200 OK" + end + b"transfer-encoding: chunked" + end + end
last = b"1" + end + b"0" + end + b"0" + end + end
whole = chunked + b"2710" + end + b"x" * 10_000 + end + last
for size in (*range(1, 300), *range(8000, 8300), *range(9900, len(whole))):
    assert reply(whole[:size], whole[size:]).is_whole and not reply(whole[:size]).is_whole, size
assert reply(*(bytes([byte]) for byte in whole)).fate("") == "200"
until_closed = b"HTTP/1.1 200 OK" + end + end + b"x"
assert reply(until_closed).fate("closed", is_closed=True) == "200"
assert reply(until_closed).fate("ECONNRESET") == "partial 200: ECONNRESET" and reply(b"abc").fate("") == "no HTTP"
"""

SLOPE = """
import numpy as np
from soak import slope_interval
times = np.arange(3000.0)
noise = np.random.default_rng(3).normal(0, 1, 3000)
for step in range(1, 3000):
    noise[step] += 0.95 * noise[step - 1]  # neighbours are alike
slope, low, high = slope_interval(times, 100 + times / 3600 * 6 + noise)
alone = 1.96 * noise.std() / ((times / 3600).std() * len(times) ** 0.5)
assert low < slope < high and low < 6 < high and high - low > 4 * alone, (slope, low, high, alone)
assert np.allclose(slope_interval(times, 50 + times / 3600 * 2), 2)
"""


def run(code: str, *arguments: str) -> None:
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=BENCHMARKS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_a_hostile_client_is_answered_is_counted_by_what_is_documented() -> None:
    run(HOSTILE)


def test_a_reply_counts_as_answered_only_when_it_is_whole() -> None:
    run(REPLIES)


def test_the_interval_of_a_slope_knows_that_neighbours_are_alike() -> None:
    run(SLOPE)


def test_the_largest_part_of_a_step_is_what_limits_it() -> None:
    run(LIMITS)


def test_every_benchmark_can_be_imported_and_every_part_has_options() -> None:
    run(IMPORTS, *MODULES)


def test_a_command_lists_its_parts_and_refuses_others() -> None:
    for command in sorted({path.parent.name.removesuffix("_parts") for path in PARTS}):
        listed = subprocess.run(
            [sys.executable, f"{command}.py", "--help"], cwd=BENCHMARKS, capture_output=True, text=True
        )
        assert listed.returncode == 0, listed.stderr
        wrong = subprocess.run(
            [sys.executable, f"{command}.py", "no-part"], cwd=BENCHMARKS, capture_output=True, text=True
        )
        assert wrong.returncode == 1 and f"{command} has no part 'no-part'" in wrong.stderr
        for path in PARTS:
            if path.parent.name == f"{command}_parts" and "\ndef main(" in path.read_text():
                assert f"  {path.stem} " in listed.stdout, (command, path.stem)


def test_the_readme_of_the_benchmarks_names_commands_that_exist_and_all_of_them() -> None:
    text = (BENCHMARKS / "README.md").read_text()
    commands = {
        path.name for path in BENCHMARKS.glob("*.py") if re.search(r"parse_args\(|\brun_part\(\"", path.read_text())
    }
    named = set(re.findall(r"(?<![\w/.-])(\w+\.py)\b", text))
    elsewhere = {path.name for path in (BENCHMARKS.parent / "scripts").glob("*.py")}
    assert commands <= named, sorted(commands - named)
    assert named <= {path.name for path in BENCHMARKS.rglob("*.py")} | elsewhere, sorted(named)
    for command, part in re.findall(r"(\w+)\.py ([a-z_]+)\b", text):
        if (BENCHMARKS / f"{command}_parts").is_dir():
            assert (BENCHMARKS / f"{command}_parts" / f"{part}.py").is_file(), f"{command}.py {part}"


@pytest.mark.system
@pytest.mark.parametrize("part", ["rows", "engine", "steps", "sampling", "phases"])
def test_the_parts_for_a_gpu_run_to_their_end_on_a_tiny_model_without_one(part: str) -> None:
    root = BENCHMARKS.parent
    environment = {**os.environ, "DIPTYCH_GPU_DEVICE": "cpu", "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    command = [sys.executable, "-m", f"benchmarks.gpu_parts.{part}"]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(json.loads(line)["what"] for line in done.stdout.splitlines())
