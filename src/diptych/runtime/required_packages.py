"""Whether the packages that compute are installed: the base install has none of them."""

import sys
from collections.abc import Callable
from importlib.util import find_spec

from diptych.control.errors import ConfigError

REQUIRED = ("torch", "numpy")


def is_there(name: str) -> bool:
    """Whether a package can be imported, without importing it."""
    return sys.modules[name] is not None if name in sys.modules else find_spec(name) is not None


def require_packages(is_there: Callable[[str], bool] = is_there) -> None:
    """Raises ConfigError where a package is missing."""
    missing = [name for name in REQUIRED if not is_there(name)]
    if missing:
        raise ConfigError(
            f"computing needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed: "
            f"pip install '.[engine]' in the checkout ({sys.executable})"
        )
