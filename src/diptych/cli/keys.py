"""``diptych keys new | check | usage``: the API keys of a server, by name."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from diptych.cli.command_line import Command
from diptych.cli.error_messages import errors_in_words
from diptych.cli.examples import examples
from diptych.cli.options import LOCAL_URL, Text, Whole
from diptych.cli.output import print_tables
from diptych.control.admission.quota import QuotaLimits
from diptych.control.errors import ConfigError
from diptych.diagnosis.adapters.http_get import Site
from diptych.report.text import Table
from diptych.serving.keys.key_file import LIMIT_FIELDS, check_name, read_keys
from diptych.serving.keys.key_record import KeyRecord, digest_of, fresh_key

keys = typer.Typer(help="Make, check and watch the API keys of a server.", no_args_is_help=True)


@keys.command(cls=Command, epilog=examples("keys new"))
def new(
    name: Annotated[str, typer.Argument(help="Name of the key's owner, shown in metrics and logs.")],
    tenant: Annotated[
        Text, typer.Option(help="Tenant whose responses and batches the key sees. Default: the name.")
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="Let the key open /admin, too.")] = False,
    max_requests: Annotated[Whole, typer.Option(help="Most requests at once. Default: no limit.")] = None,
    requests_per_minute: Annotated[Whole, typer.Option(help="Most requests in any minute. Default: no limit.")] = None,
    tokens_per_minute: Annotated[
        Whole, typer.Option(help="Most tokens of prompts and answers in any minute. Default: no limit.")
    ] = None,
    tokens_per_day: Annotated[
        Whole, typer.Option(help="Most tokens of prompts and answers in any 24 hours. Default: no limit.")
    ] = None,
) -> None:
    """Draw a new key. It is shown once; the server's file gets its hash alone."""
    with errors_in_words():
        for field, value in (("name", name), ("tenant", tenant)):
            if value is not None:
                check_name(field, value)
        limits = {
            "max_requests": max_requests,
            "requests_per_minute": requests_per_minute,
            "tokens_per_minute": tokens_per_minute,
            "tokens_per_day": tokens_per_day,
        }
        QuotaLimits(**limits)  # raises where one is impossible
        key = fresh_key()
        given = {"tenant": tenant, "admin": admin or None, **limits}
        lines = ["[[key]]", f'name = "{name}"', f'sha256 = "{digest_of(key.encode()).hex()}"']
        lines += [f"{field} = {_toml(value)}" for field, value in given.items() if value is not None]
        print(f"The key, for its owner; it is shown this once:\n\n{key}\n")
        print("The entry, for the file of --api-keys:\n\n" + "\n".join(lines))


@keys.command(cls=Command, epilog=examples("keys check"))
def check(file: Annotated[Path, typer.Argument(help="The file of --api-keys.")]) -> None:
    """Say whether a server would take a file of keys, and what is in it."""
    with errors_in_words():
        rows = tuple(map(_row, read_keys(file)))
        columns = ("name", "tenant", "keys", "admin", "expires", "models", "limits")
        print_tables([Table(str(file), columns, rows)], ())


@keys.command(cls=Command, epilog=examples("keys usage"))
def usage(
    url: Annotated[str, typer.Option(help="Address of the server.")] = LOCAL_URL,
    admin_key: Annotated[
        Text, typer.Option(help="An admin key of the server. Default: none.", envvar="DIPTYCH_ADMIN_KEY")
    ] = None,
) -> None:
    """Show what each name used since the start of a server, and what it has left."""
    with errors_in_words():
        site = Site.of(url, admin_key)
        try:
            found = msgspec.json.decode(site.get("/admin/keys"))
            rows = tuple(map(_usage_row, found["keys"]))
        except (msgspec.DecodeError, KeyError, TypeError):
            raise ConfigError(f"{site.url} says nothing of its keys", param="url") from None
        columns = (
            "name",
            "open",
            "requests",
            "refused",
            "prompt",
            "cached",
            "completion",
            "requests left",
            "tokens left",
        )
        unknown = found["unknown_key_requests"]
        notes = [f"{unknown:,} requests had a wrong key, or none"] if unknown else []
        complaint = [f"the file of keys is not used as it is: {found['complaint']}"] if found["complaint"] else []
        print_tables([Table("", columns, rows)], notes, complaint)


def _row(record: KeyRecord) -> tuple[str, ...]:
    expires = "" if record.expires_s is None else f"{datetime.fromtimestamp(record.expires_s, UTC):%Y-%m-%d %H:%M} UTC"
    limits = [f"{field}={getattr(record.limits, field):,}" for field in LIMIT_FIELDS if getattr(record.limits, field)]
    models = "any" if record.models is None else ", ".join(record.models)
    is_admin = "yes" if record.is_admin else ""
    return (record.name, record.tenant, str(len(record.digests)), is_admin, expires, models, ", ".join(limits))


def _usage_row(found: dict[str, Any]) -> tuple[str, ...]:
    used = found["usage"] or {}
    counts = [f"{used.get(field, 0):,}" for field in ("prompt_tokens", "cached_tokens", "completion_tokens")]
    left = [f"{found[field]['remaining']:,}" if found[field] else "" for field in ("requests", "tokens")]
    refused = sum(used.get("refused", {}).values())
    return (
        str(found["name"]),
        f"{found['open_requests']:,}",
        f"{used.get('requests', 0):,}",
        f"{refused:,}",
        *counts,
        *left,
    )


def _toml(value: str | int) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)
