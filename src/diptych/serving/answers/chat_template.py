"""One chat template of a model: compiled in a sandbox, and rendered as the renderer of transformers does.

Knows nothing of what messages mean. A template comes with the model's files and may be anything, so that what it does
has a limit of processor time: at the start of a server (``within``), and for a request (``limited``).
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, TypeVar

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from diptych.serving.long_work import check_wanted

Result = TypeVar("Result")
LONGEST_REPEATED = 2**20  # items of a sequence times a number, in a template
_POLL_S = 0.05
_GRACE_S = 0.25  # of processor time that a template has beyond its limit until it comes by where it is stopped
_limit = threading.local()  # seconds: of processor time of this thread, at which a template has to end


class OutOfTimeError(BaseException):
    """What a template is stopped with; no handler of ``Exception`` in it or in jinja2 sees it."""


class ChatTemplate:
    """A compiled template. Raises jinja2.TemplateError when it does not compile.

    missing: functions that it calls and the renderer lacks, where it does not ask first whether they are defined.
    """

    def __init__(self, source: str) -> None:
        environment = _Environment()
        try:
            tree = environment.parse(source)
            self.missing = _missing_functions(tree, environment)
            _check_time_in_loops(tree)
            self._compiled = environment.from_string(tree)
        except jinja2.TemplateError:
            raise
        except Exception as error:  # of Python's compiler, for blocks nested too deep; of constants that overflow
            raise jinja2.TemplateError(f"{type(error).__name__}: {error}") from None
        self.source = source

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The text. tools and documents are None where they are not given, as with transformers. Raises what the
        template raises."""
        defaults = {"tools": None, "documents": None, "add_generation_prompt": False}
        return self._compiled.render({**defaults, **variables, "messages": list(messages)})


def said(error: Exception) -> str:
    """What a failure of a template says, without the name of jinja2's own exceptions."""
    text = str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
    line = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
    return f"{line}{text}"[:500]


def within(limit_s: float, function: Callable[[], Result]) -> Result:
    """The result of a function, given up after so much processor time of its thread. Raises OutOfTimeError then, else
    what the function raises.

    A template stops itself at its next loop or call. An exception from outside could strike anywhere: in a finalizer,
    where Python drops it, or while a lock is held. Other work (jinja2's compiler, a filter on a long list) is left to
    end by itself."""
    outcome: list[Result] = []
    failure: list[BaseException] = []
    clocks: list[int] = []

    def run() -> None:
        _limit.seconds = limit_s
        if hasattr(time, "pthread_getcpuclockid"):
            clocks.append(time.pthread_getcpuclockid(threading.get_ident()))
        try:
            outcome.append(function())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="chat template", daemon=True)
    started = time.monotonic()
    thread.start()
    while thread.is_alive() and _seconds_used(clocks, started) <= limit_s + _GRACE_S:
        thread.join(_POLL_S)
    if failure:
        raise failure[0]
    if not outcome:
        raise OutOfTimeError
    return outcome[0]


@contextmanager
def limited(limit_s: float) -> Iterator[None]:
    """Give what this thread renders so much processor time. OutOfTimeError is raised at the next loop or call of a
    template beyond it, or where ``check_time`` is called."""
    earlier = getattr(_limit, "seconds", None)
    _limit.seconds = time.thread_time() + limit_s
    try:
        yield
    finally:
        _limit.seconds = earlier


def check_time() -> None:
    """Raise OutOfTimeError where the processor time of this thread is over, and UnwantedWorkError where the text is not
    wanted any more."""
    check_wanted()
    limit_s = getattr(_limit, "seconds", None)
    if limit_s is not None and time.thread_time() > limit_s:
        raise OutOfTimeError


def _seconds_used(clocks: Sequence[int], started: float) -> float:
    """Processor time of the thread that named its clock; where there is none, the time since it was started."""
    try:
        return time.clock_gettime(clocks[0])
    except (IndexError, OSError):  # not named yet, or the thread has ended
        return time.monotonic() - started


def _check_time_in_loops(tree: nodes.Template) -> None:
    for loop in list(tree.find_all(nodes.For)):
        check = nodes.Call(nodes.EnvironmentAttribute("check_time"), [], [], None, None)
        loop.body.insert(0, nodes.ExprStmt(check, lineno=loop.lineno))


class _Generation(Extension):
    """``{% generation %}`` marks what an assistant said, for training; the text is the same without it."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        """The statements up to endgeneration, in a scope of their own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _GuardedNamespace(Namespace):
    """A namespace without names that begin with an underscore, through which Python's internals could be reached."""

    def __init__(*args: Any, **fields: Any) -> None:
        self, *rest = args
        given = dict(*rest, **fields)
        for name in given:
            _check_name(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name that begins with an underscore: {name[:40]!r}")


class _Environment(ImmutableSandboxedEnvironment):
    """What a template may use."""

    intercepted_binops = frozenset(("*", "**"))
    check_time = staticmethod(check_time)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        self.globals["namespace"] = _GuardedNamespace

    def call(*args: Any, **kwargs: Any) -> Any:
        """A call of a template, where it has time left: a macro may call itself."""
        check_time()
        return None if args[2] is check_time else ImmutableSandboxedEnvironment.call(*args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Products and powers, but for those whose size is beyond reason."""
        if operator == "*":
            for several, count in ((left, right), (right, left)):
                is_repetition = isinstance(several, str | list | tuple) and isinstance(count, int)
                if is_repetition and len(several) * count > LONGEST_REPEATED:
                    raise OverflowError(f"a sequence of more than {LONGEST_REPEATED} items")
        elif isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > 2**16:
            raise OverflowError("a power of more than 65536 bits")
        return super().call_binop(context, operator, left, right)


def _missing_functions(tree: nodes.Template, environment: jinja2.Environment) -> list[str]:
    unknown = find_undeclared_variables(tree)
    called = {call.node.name for call in tree.find_all(nodes.Call) if isinstance(call.node, nodes.Name)}
    asked = {test.node.name for test in tree.find_all(nodes.Test) if isinstance(test.node, nodes.Name)}
    return sorted((called & unknown) - asked - set(environment.globals) - {"caller"})


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(message)
