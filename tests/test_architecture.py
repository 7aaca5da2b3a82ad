"""The plan of the house, enforced: imports point down, and the deciding code stays pure."""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "diptych"

# What each part may import of ours (itself always).
MAY_IMPORT = {
    "control": set(),
    "base": {"control"},
    "http1": {"control"},
    "tls": {"control"},
    "runtime": {"base", "control", "tls"},
    "workload": {"control"},
    "report": {"control"},
    "timeline": {"control"},
    "search": {"control", "report"},
    "simulation": {"base", "control", "report", "search", "timeline", "workload"},
    "advisor": {"base", "control", "report", "search", "simulation", "workload"},
    "calibration": {"base", "control", "runtime", "serving", "simulation"},
    "diagnosis": {"advisor", "base", "control", "report", "simulation", "timeline", "workload"},
    "serving": {"base", "control", "http1", "runtime", "timeline", "tls", "web"},
    "vllm_plugin": {"base"},
    "bench": {"base", "control", "http1", "report", "search", "workload"},
    "web": {"advisor", "base", "control", "diagnosis", "report", "simulation", "timeline", "workload"},
    "bundled": set(),
    "cli": {
        "advisor", "base", "control", "diagnosis", "runtime", "simulation", "serving", "bench", "web", "workload",
        "report", "search", "timeline", "calibration", "tls", "__version__",
    },
    "__init__": {"base", "control", "serving"},
    "__main__": {"cli"},
}  # fmt: skip

# Not in control: whatever reads a clock, waits, talks, or draws from a global random.
FORBIDDEN_IN_CONTROL = {
    "asyncio", "concurrent", "datetime", "io", "logging", "multiprocessing", "os", "pathlib", "queue", "random",
    "secrets", "select", "selectors", "shutil", "signal", "socket", "subprocess", "tempfile", "threading", "time",
    "urllib", "uuid",
}  # fmt: skip

# The front end never loads torch; of serving, only the worker process and the library face that needs no server may.
SERVING_WITH_TORCH = ("worker", "llm.py")


# What the front end may read of runtime, without torch or numpy: sizes, formats, the configs of model families, and the
# table of connectors.
TORCH_FREE_RUNTIME = {
    "dtypes", "required_packages",
    "device.cpu_only", "device.garbage", "device.thread_limits",
    "kv_cache.checkpoint_geometry", "kv_cache.kv_geometry", "kv_cache.layer_groups",
    "weights.checkpoint", "weights.mapped_file", "weights.safetensors_directory", "weights.safetensors_file",
    "weights.stored_tensor", "weights.weight_bytes", "weights.weight_format",
    "quantization", "quantization.fp8_weight", "quantization.packed_weight", "quantization.quantization_config",
    "gguf", "gguf.ggml_types", "gguf.gguf_checkpoint", "gguf.gguf_config",
    "gguf.gguf_families", "gguf.gguf_file", "gguf.gguf_metadata", "gguf.gguf_model",
    "gguf.gguf_vocabulary", "sampling.grammar", "tiers", "tiers.extent_format",
    "transfer", "transfer.connector", "transfer.kv_format",
    "models", *(f"models.{path.stem}" for path in (SOURCE / "runtime" / "models").glob("[a-z]*.py")),
}  # fmt: skip


def modules() -> Iterator[tuple[str, Path]]:
    """(part of the house, file) of every module."""
    for path in sorted(SOURCE.rglob("*.py")):
        relative = path.relative_to(SOURCE)
        yield (relative.parts[0] if len(relative.parts) > 1 else relative.stem), path


@dataclass(frozen=True)
class Facts:
    """What a file has. imports: modules, in functions too, but not for type checking only. named: modules, and what is
    taken from them, in any import. functions: name and number of lines (of a command without its options, a line each).
    literals: line and members of each. literal_names: of those that are given names at the top."""

    imports: tuple[str, ...]
    named: tuple[tuple[str, tuple[str, ...]], ...]
    classes: tuple[str, ...]
    functions: tuple[tuple[str, int], ...]
    names: frozenset[str]  # of variables and parameters
    literals: tuple[tuple[int, tuple[str, ...]], ...]
    literal_names: tuple[str, ...]


@cache
def facts(path: Path) -> Facts:
    """The facts of a source file, which is parsed once."""
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    classes = tuple(node.name for node in nodes if isinstance(node, ast.ClassDef))
    functions = tuple(
        (node.name, num_lines(node)) for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    literals = list(literals_of(nodes))
    places = {id(node) for node, _ in literals}
    assigned = [node for node in tree.body if isinstance(node, ast.Assign) and id(node.value) in places]
    return Facts(
        tuple(imported(path, nodes)),
        tuple(named(nodes)),
        classes,
        functions,
        frozenset(names),
        tuple((node.lineno, members) for node, members in literals),
        tuple(target.id for node in assigned for target in node.targets if isinstance(target, ast.Name)),
    )


def named(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each module of any import, with the names that are taken from it."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module, tuple(alias.name for alias in node.names)


def imports(path: Path) -> tuple[str, ...]:
    """Every module that the file imports."""
    return facts(path).imports


def num_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function, as Facts counts them: the options of a command are declared in its parameters."""
    assert node.end_lineno is not None
    hints = [ast.unparse(parameter.annotation) for parameter in node.args.args if parameter.annotation is not None]
    is_command = any(hint.startswith("Annotated[") for hint in hints)
    return node.end_lineno - (node.body[0].lineno if is_command else node.lineno) + 1


def imported(path: Path, nodes: Sequence[ast.AST]) -> Iterator[str]:
    """The modules that a file imports, as Facts has them."""
    skipped = {
        id(inner)
        for node in nodes
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in nodes:
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield node.module


def test_imports_point_down() -> None:
    wrong = []
    for part, path in modules():
        assert part in MAY_IMPORT, f"{part} is not in the plan"
        targets = {name.split(".")[1] for name in imports(path) if name.startswith("diptych.")}
        wrong += [f"{path.relative_to(SOURCE)} imports {name}" for name in targets - {part} - MAY_IMPORT[part]]
    assert wrong == []


def test_control_is_pure_standard_library() -> None:
    for path in sorted((SOURCE / "control").rglob("*.py")):
        for name in imports(path):
            root = name.split(".")[0]
            if root == "diptych":
                continue
            assert root in sys.stdlib_module_names, f"{path.name} imports {name}"
            assert root not in FORBIDDEN_IN_CONTROL, f"{path.name} imports {name}"


def test_only_the_worker_side_of_serving_loads_torch() -> None:
    for part, path in modules():
        if part == "serving" and path.relative_to(SOURCE / "serving").parts[0] not in SERVING_WITH_TORCH:
            for name in imports(path):
                assert name.split(".")[0] not in ("torch", "numpy"), f"{path.name} imports {name}"
                if name.startswith("diptych.runtime"):
                    assert name.removeprefix("diptych.runtime.") in TORCH_FREE_RUNTIME, f"{path.name} imports {name}"


def test_what_the_front_end_reads_of_the_runtime_is_free_of_torch() -> None:
    for name in sorted(TORCH_FREE_RUNTIME):
        path = SOURCE / "runtime" / name.replace(".", "/")
        for imported in imports(path / "__init__.py" if path.is_dir() else path.with_suffix(".py")):
            assert imported.split(".")[0] not in ("torch", "numpy"), f"{name} imports {imported}"
            if imported.startswith("diptych.runtime"):
                assert imported.removeprefix("diptych.runtime.") in TORCH_FREE_RUNTIME, f"{name} imports {imported}"


def test_functions_stay_small() -> None:
    for _, path in modules():
        for name, lines in facts(path).functions:
            assert lines <= 60, f"{path}: {name} has {lines} lines"


def test_nothing_unpickles() -> None:
    for _, path in modules():
        for name in imports(path):
            assert name.split(".")[0] not in ("pickle", "marshal", "shelve", "dill", "cloudpickle"), path


def test_no_file_and_no_class_has_the_name_of_another() -> None:
    files, classes = Counter[str](), Counter[str]()
    for _, path in modules():
        files[path.name] += path.name not in ("__init__.py", "__main__.py")
        classes.update(facts(path).classes)
    assert [name for name, count in files.items() if count > 1] == []
    assert [name for name, count in classes.items() if count > 1] == []


def literals_of(nodes: Sequence[ast.AST]) -> Iterator[tuple[ast.Subscript, tuple[str, ...]]]:
    """Each Literal of several members that is written out, with its members in their order by name."""
    for node in nodes:
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("Literal", "typing.Literal"):
            members = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            if len(members) > 1:
                yield node, tuple(sorted(ast.unparse(member) for member in members))


def test_a_literal_is_declared_once_and_its_name_means_one_thing() -> None:
    """Two declarations of the same members part as soon as one of them gets another; import the first."""
    places: dict[tuple[str, ...], list[str]] = {}
    names = Counter[str]()
    for _, path in modules():
        for line, members in facts(path).literals:
            places.setdefault(members, []).append(f"{path.relative_to(SOURCE)}:{line}")
        names.update(facts(path).literal_names)
    assert {members: found for members, found in places.items() if len(found) > 1} == {}
    assert [name for name, count in names.items() if count > 1] == []
    assert len(names) > 20


def test_a_metric_of_an_engine_that_several_parts_read_is_named_once() -> None:
    shared = (SOURCE / "base" / "engine_load_metrics.py").read_text()
    names = set(re.findall(r'"((?:vllm|sglang|llamacpp):\w+)"', shared))
    assert len(names) == 13
    for _, path in modules():
        if path.name in ("engine_load_metrics.py", "serving_metrics.py", "alert_files.py"):
            continue
        named = set(re.findall(r'"((?:vllm|sglang|llamacpp):\w+?)(?:_total|_count)?"', path.read_text()))
        assert not named & names, path


def test_no_variable_is_called_one() -> None:
    for _, path in modules():
        assert "one" not in facts(path).names, path


def test_a_worker_knows_nothing_of_the_fleet() -> None:
    for path in sorted((SOURCE / "control" / "engine").rglob("*.py")):
        for name in imports(path):
            for room in ("cluster", "router", "admission"):
                assert not name.startswith(f"diptych.control.{room}"), f"{path.name} imports {name}"


def test_modules_import_each_other_in_no_circle() -> None:
    """Imports within functions and for type checking only count, too. What ``diptych`` itself offers to users is loaded
    when it is asked for: no module of ours asks for more than its version."""
    names = {module_name(path): path for _, path in modules()}
    graph = {name: imported_modules(path, names) - {name, "diptych"} for name, path in names.items()}
    del graph["diptych"]
    circles = {tuple(sorted(name.removeprefix("diptych.") for name in circle)) for circle in circles_of(graph)}
    assert circles == set()


def module_name(path: Path) -> str:
    """The dotted name of a source file."""
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path, names: Mapping[str, Path]) -> set[str]:
    """The modules of ours that a file names in any import."""
    found = set()
    for module, taken in facts(path).named:
        inner = {f"{module}.{name}" for name in taken}
        found |= inner & names.keys() or {module}
    return found & names.keys()


def circles_of(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Groups of modules that reach each other, by Kosaraju's algorithm."""
    reversed_graph: dict[str, set[str]] = {name: set() for name in graph}
    for name, targets in graph.items():
        for target in targets:
            reversed_graph[target].add(name)
    order: list[str] = []
    seen: set[str] = set()
    for name in graph:
        collect(name, graph, seen, order)
    seen.clear()
    circles = []
    for name in reversed(order):
        group: list[str] = []
        collect(name, reversed_graph, seen, group)
        if len(group) > 1:
            circles.append(set(group))
    return circles


def collect(start: str, graph: Mapping[str, set[str]], seen: set[str], order: list[str]) -> None:
    """Append what is reached from ``start`` and was not seen, each after all that it reaches."""
    if start in seen:
        return
    seen.add(start)
    waiting = [(start, iter(sorted(graph[start])))]
    while waiting:
        name, targets = waiting[-1]
        following = next((target for target in targets if target not in seen), None)
        if following is None:
            waiting.pop()
            order.append(name)
        else:
            seen.add(following)
            waiting.append((following, iter(sorted(graph[following]))))
