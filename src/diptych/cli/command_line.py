"""How words on the command line become options, and how a wrong word is answered: one sentence, status 2.

Owns the look of usage errors. The commands and their options are declared in main.py and in the files beside it.
"""

import os
import shlex
import shutil
import sys
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from diptych.base.terminal_text import guarded, shown
from diptych.cli.error_messages import OPTION_NAMES
from diptych.cli.other_names import translate

UsageError: Any = typer.BadParameter.__mro__[1]  # typer has click inside, or beside it, by its version
MOST_GUESSES = 3
SERVERS, SECRETS = ("serve", "front"), ("api_key", "admin_key")  # commands that run for long; their options with keys
KINDS = {"integer": "a whole number", "number": "a number", "boolean": "true or false"}


class Command(TyperCommand):
    """A command that knows the names which others have for its options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The command's options. Raises a usage error of one sentence."""
        names = [name for param in self.params for name in (*param.opts, *param.secondary_opts) if name[0] == "-"]
        known = {*names, "-h", "--help"}
        try:
            return super().parse_args(ctx, translate(args, known))
        except ValueError as error:
            raise UsageError(str(error), ctx) from None
        except UsageError as error:
            error.ctx = error.ctx or ctx
            if wrong := _unknown_option(error):
                raise UsageError(_no_option(wrong, ctx.info_name, known), ctx) from None
            if (value := _given_value(error, args)) is not None:
                raise UsageError(f"{_flag(error.param)} is {value!r}; {_expected(error.message)}", ctx) from None
            raise

    def invoke(self, ctx: Any) -> Any:
        """Run the command; its errors name settings as its options, what it prints does not control the terminal."""
        if ctx.info_name in SERVERS:
            _warn_of_secrets(ctx)
        token = OPTION_NAMES.set(_option_names(self, ctx))
        try:
            with guarded():
                return super().invoke(ctx)
        finally:
            OPTION_NAMES.reset(token)


class CommandGroup(TyperGroup):
    """All commands. A usage error of any is one line, and says where the right words are."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command line, and end the process with its status."""
        given = (args, "diptych", complete_var, False, windows_expand_args)
        if not standalone_mode:
            return super().main(*given, **extra)
        try:
            status = super().main(*given, **extra)
        except UsageError as error:
            _end(error)
        except typer.Abort:
            sys.exit(1)
        sys.exit(status if isinstance(status, int) else 0)


def _warn_of_secrets(ctx: Any) -> None:
    """Say that arguments can be read by others, where a key is one."""
    for name in SECRETS:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            instead = {"api_key": "--api-keys FILE or DIPTYCH_API_KEY", "admin_key": "--admin-key-file FILE"}[name]
            print(
                f"warning: the key of {option} can be read by every user of this machine, as all arguments can; "
                f"{instead} keeps it from them",
                file=sys.stderr,
            )


def _end(error: Any) -> NoReturn:
    """Report a usage error."""
    text = " ".join(error.format_message().split()).rstrip(".")
    command = error.ctx.command_path if error.ctx else "diptych"
    print(shown(f"error: {text[:1].lower()}{text[1:]} (see {command} -h)"), file=sys.stderr)
    sys.exit(error.exit_code)


def _unknown_option(error: Any) -> str | None:
    """The option that does not exist; None where the error is another."""
    name = getattr(error, "option_name", None)
    return str(name) if name is not None and hasattr(error, "possibilities") else None


def _no_option(wrong: str, command: str, known: Collection[str]) -> str:
    near = get_close_matches(wrong, known, MOST_GUESSES, 0.7) or sorted(name for name in known if wrong in name)
    hint = f"; did you mean {' or '.join(near[:MOST_GUESSES])}?" if near else ""
    return f"diptych {command} has no option {wrong}{hint}"


def _flag(param: Any) -> str:
    return str(max(param.opts, key=len))


def _given_value(error: Any, words: Sequence[str]) -> str | None:
    """The value of an option that is of the wrong kind; None where the error is another."""
    param = getattr(error, "param", None)
    if param is None or not error.message:
        return None
    values = [
        value if equals else following
        for word, following in zip(words, [*words[1:], ""], strict=True)
        for name, equals, value in [word.partition("=")]
        if name in param.opts
    ]
    return values[-1] if values else None


def _expected(message: str) -> str:
    """What a value must be, in plain words."""
    for kind, words in KINDS.items():
        if f"valid {kind}" in message:
            return f"it must be {words}"
    _, _, choices = message.partition(" is not one of ")
    return f"one of {choices.replace(chr(39), '')}" if choices else message


def _option_names(command: TyperCommand, ctx: Any) -> dict[str, str]:
    """The option of each setting; where a file of settings was given, only of those that were set by options."""
    has_file = ctx.params.get("config") is not None
    options = [
        (param.name, param.opts[0])
        for param in command.params
        if param.opts[0].startswith("--") and not (has_file and ctx.params.get(param.name) is None)
    ]
    return {option[2:].replace("-", "_"): option for _, option in options} | dict(options)


def own_command() -> str:
    """How a user of this terminal starts ``diptych``: by its name where the shell finds it, else by a path."""
    if shutil.which("diptych"):
        return "diptych"
    script = Path(__file__).parents[3] / "scripts" / "diptych"  # in a checkout
    path = str(script if script.exists() else Path(sys.executable).parent / "diptych")
    return shlex.quote(min(path, os.path.relpath(path), key=len))
