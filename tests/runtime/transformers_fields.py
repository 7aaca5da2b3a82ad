"""Which fields of a config the code of transformers uses, by parsing it: nothing of it is run or imported.

A field is used where code has ``config.NAME``, ``getattr(config, "NAME")`` or ``hasattr(config, "NAME")`` for anything
that is called a config, where the configuration class (or one that it inherits from) declares it or takes it out of
``kwargs``, and where the code of rotary embeddings looks for it in ``rope_parameters``.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

# What every causal model shares: the base class of configurations, rotary embeddings, masks, caches, attention.
SHARED = (
    "configuration_utils.py",
    "modeling_rope_utils.py",
    "masking_utils.py",
    "cache_utils.py",
    "modeling_layers.py",
    "modeling_utils.py",
    "activations.py",
    "integrations/eager_attention.py",
    "integrations/heterogeneity",
    "integrations/sdpa_attention.py",
    "utils/generic.py",
    "utils/output_capturing.py",
)
CONFIG_CLASSES = ("PreTrainedConfig", "RotaryEmbeddingConfigMixin", "HeterogeneousConfigMixin")
# What code calls the config of a causal model. (Others are those of loading, of generation, of kernels.)
CONFIG_NAMES = (
    "config",
    "decoder_config",
    "effective_config",
    "layer_config",
    "output_config",
    "output_mtp_config",
    "text_config",
)
# Functions that read and write files: what they take out of ``kwargs`` says where files are, not what is in them.
FILE_FUNCTIONS = (
    "_dict_from_json_file",
    "_get_config_dict",
    "from_dict",
    "from_pretrained",
    "get_config_dict",
    "push_to_hub",
    "save_pretrained",
)


def fields_used(transformers: Path, model_type: str) -> dict[str, set[str]]:
    """The fields that the class of a model type uses, own and inherited, each with the files that use it.
    transformers: the folder of the package."""
    folder = transformers / "models" / model_type
    own = [folder / f"modeling_{model_type}.py", folder / f"configuration_{model_type}.py"]
    used: dict[str, set[str]] = {}
    no_fields: set[str] = set()
    for file in [*own, *_shared_files(transformers)]:
        others, names = _facts(file)
        no_fields |= others
        for name in names:
            used.setdefault(name, set()).add(file.relative_to(transformers).as_posix())
    return {name: files for name, files in used.items() if name not in no_fields}


@cache
def _facts(file: Path) -> tuple[frozenset[str], frozenset[str]]:
    """What is no field, and the fields, of a file: most are shared by all models."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(_no_fields(tree)), frozenset(_fields_in(tree))


def rope_fields_used(transformers: Path) -> set[str]:
    """The fields of ``rope_parameters`` that the shared code of rotary embeddings looks at."""
    tree = ast.parse((transformers / "modeling_rope_utils.py").read_text(encoding="utf-8"))
    declared = {
        statement.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name == "RopeParameters"
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    return declared | {name for node in ast.walk(tree) for name in _key_in(node, "rope_parameters")}


def _shared_files(transformers: Path) -> Iterator[Path]:
    for name in SHARED:
        path = transformers / name
        if path.is_dir():
            yield from sorted(path.glob("*.py"))
        elif path.exists():
            yield path


def _fields_in(tree: ast.Module) -> set[str]:
    found = {name for node in ast.walk(tree) for name in _field_of(node)}
    for node in _config_classes(tree):
        found |= set(_declared(node))
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    called = {function.attr for function in calls if isinstance(function, ast.Attribute)}
    return {name for name in found if not name.startswith("__")} - called


def _field_of(node: ast.AST) -> Iterator[str]:
    """The field that an expression looks at."""
    match node:
        case ast.Attribute(value=value, attr=name) if _is_config(value):
            yield name
        case ast.Call(
            func=ast.Name(id="getattr" | "hasattr" | "setattr"), args=[value, ast.Constant(value=str(name)), *_]
        ) if _is_config(value):
            yield name


def _declared(node: ast.ClassDef) -> Iterator[str]:
    """The fields of a configuration class: its annotations, what it looks at in itself, and what it takes out of the
    arguments that it was not made for."""
    for statement in node.body:
        is_field = isinstance(statement, ast.AnnAssign) and "ClassVar" not in ast.unparse(statement.annotation)
        if is_field and isinstance(statement.target, ast.Name):
            yield statement.target.id
        if isinstance(statement, ast.FunctionDef) and statement.name not in FILE_FUNCTIONS:
            for inner in ast.walk(statement):
                yield from _key_in(inner, "kwargs")
                yield from _own_field_of(inner)


def _own_field_of(node: ast.AST) -> Iterator[str]:
    """The field that a configuration looks at in itself."""
    match node:
        case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Load()):
            yield name
        case ast.Call(
            func=ast.Name(id="getattr" | "hasattr"), args=[ast.Name(id="self"), ast.Constant(value=str(name)), *_]
        ):
            yield name
        case ast.Compare(left=ast.Constant(value=str(name)), ops=[ast.In()], comparators=[ast.Name(id="kwargs")]):
            yield name


def _key_in(node: ast.AST, holder: str) -> Iterator[str]:
    """The key that an expression looks up in a mapping whose name begins with ``holder``."""
    match node:
        case ast.Subscript(value=value, slice=ast.Constant(value=str(name))) if _is_called(value, holder):
            yield name
        case ast.Call(
            func=ast.Attribute(value=value, attr="get" | "pop" | "setdefault"), args=[ast.Constant(value=str(name)), *_]
        ) if _is_called(value, holder):
            yield name


def _is_called(value: ast.expr, holder: str) -> bool:
    while isinstance(value, ast.Subscript):  # rope_parameters[layer_type]["factor"]
        value = value.value
    name = value.id if isinstance(value, ast.Name) else value.attr if isinstance(value, ast.Attribute) else ""
    return name.startswith(holder)


def _is_config(value: ast.expr) -> bool:
    """Whether an expression is the config of a model: ``config``, ``self.config``, ``config.get_text_config()``,
    ``config.per_layer_config[0]``."""
    match value:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in CONFIG_NAMES
        case ast.Call(func=ast.Attribute(attr="get_text_config")):
            return True
        case ast.Subscript(value=ast.Attribute(attr="per_layer_config")):
            return True
    return False


def _config_classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
        if node.name in CONFIG_CLASSES or bases & set(CONFIG_CLASSES):
            yield node


def _no_fields(tree: ast.Module) -> set[str]:
    """Functions, properties and variables of configuration classes: no file has them."""
    found = set()
    for node in _config_classes(tree):
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef):
                found.add(statement.name)
            if isinstance(statement, ast.Assign):
                found |= {target.id for target in statement.targets if isinstance(target, ast.Name)}
            if isinstance(statement, ast.AnnAssign) and "ClassVar" in ast.unparse(statement.annotation):
                found.add(ast.unparse(statement.target))
    return found
