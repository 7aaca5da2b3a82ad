"""Triton kernels of the engine on GPUs. Triton's interpreter runs the very same code on a CPU, for tests.

One law binds all of them: the bits of a row depend on that row alone, not on how many rows are beside it, nor on how a
prompt was cut. So the tile shapes and the order of every sum are functions of the layer's shape, never of the batch:
where a kernel may share its work out or do it in one program, both add the same parts in the same order, and the
compiler may not contract a product and a sum into one instruction, which it would do in one of them and not in the
other.
"""

from importlib.util import find_spec


def has_triton() -> bool:
    """Whether Triton is installed. Asks without importing it, which takes half a second."""
    return find_spec("triton") is not None
