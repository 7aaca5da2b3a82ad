"""What mypyc is to know of a class when it compiles it; without a compiler the hints say nothing."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr as mypyc_attr
else:

    def mypyc_attr(**options: Any) -> Any:
        """mypyc reads its own function of this name when it compiles."""
        return lambda cls: cls
