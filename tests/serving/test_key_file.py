"""The file of API keys: what it may say, what its errors say, and how a server follows its changes."""

import asyncio
import logging
import os
from pathlib import Path

import pytest

from diptych.control.admission.quota import QuotaLimits
from diptych.control.errors import ConfigError
from diptych.serving import edge_limits
from diptych.serving.keys.key_file import FIELDS, read_keys, read_secret
from diptych.serving.keys.key_record import KeyRecord, digest_of, fresh_key, tenant_of
from diptych.serving.keys.keyring import Keyring

WEB, OPERATOR = "key-of-the-web-0123456789", "key-of-the-operator-012345"
WHOLE = f"""
[[key]]
name = "web"
key = "{WEB}"
sha256 = ["{digest_of(b"another key of the web").hex()}", "{digest_of(b"a third").hex().upper()}"]
tenant = "shop"
admin = false
metrics = true
expires = 2030-01-31T12:00:00+02:00
models = ["one", "two"]
max_requests = 8
max_queued = 4
requests_per_minute = 600
tokens_per_minute = 100_000
tokens_per_day = 5_000_000

[[key]]
name = "operator"
key = "{OPERATOR}"
admin = true
expires = 2030-01-31
"""


def written(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "keys.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


def entry(**fields: str) -> str:
    """A [[key]] table; values are TOML."""
    given = {"name": '"web"', "key": f'"{WEB}"', **fields}
    return "[[key]]\n" + "".join(f"{name} = {value}\n" for name, value in given.items() if value)


def test_a_file_may_name_every_field(tmp_path: Path) -> None:
    web, operator = read_keys(written(tmp_path, WHOLE))
    assert web == KeyRecord(
        "web",
        tuple(digest_of(key) for key in (WEB.encode(), b"another key of the web", b"a third")),
        "shop",
        QuotaLimits(8, 4, 600, 100_000, 5_000_000),
        sees_all=True,
        expires_s=1896084000.0,
        models=("one", "two"),
    )
    assert (operator.tenant, operator.is_admin, operator.sees_all, operator.models) == ("operator", True, True, None)
    assert operator.expires_s == 1896048000.0 and operator.limits == QuotaLimits()
    assert all(f"\n{field} = " in WHOLE for field in FIELDS)
    assert "digest" not in repr(web)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has 0 [[key]] tables; between 1 and 10000"),
        ("[[key]\n", "is no TOML: an error at line 1, column 6"),
        ("key = 3\n", "key must be tables, [[key]]"),
        ("[key]\nname = 'a'\n", "key must be tables, [[key]]"),
        ("[web]\n", "has the unknown field 'web'; only [[key]] tables"),
        (entry(name=""), "entry 1: has no name"),
        (entry(name='"a b"'), "entry 1: name is 'a b'; it must be 1 to 64 letters, digits and ._@-"),
        (entry(name='"other"'), "name is 'other', which Diptych uses itself"),
        (entry(name='"api-key-1"'), "name is 'api-key-1', which Diptych uses itself"),
        (entry(tenant="3"), "entry 1 (web): tenant is 3; it must be 1 to 64 letters"),
        (entry(admn="true"), "entry 1: has the unknown field 'admn'; one of name, key, sha256"),
        (entry(key=""), "entry 1 (web): has 0 keys; between 1 and 8, in the fields key and sha256"),
        (entry(key="[]"), "has 0 keys"),
        (entry(key='"short"'), "key has 5 characters; it must have 16 to 4096"),
        (entry(key='"with a space in the middle"'), "key has 26 characters; it must have 16 to 4096, of ASCII"),
        (entry(key="17"), "key must be a text or a list of texts"),
        (entry(sha256='"abc"'), "sha256 has 3 characters; it must be 64 digits from 0 to f"),
        (entry(admin='"yes"'), "admin is 'yes'; it must be true or false"),
        (entry(tokens_per_day="0"), "tokens_per_day is 0; it must be a whole number in [1, 1000000000000000]"),
        (entry(max_requests="1.5"), "max_requests is 1.5; it must be a whole number"),
        (entry(max_queued="true"), "max_queued is True; it must be a whole number"),
        (entry(expires='"tomorrow"'), "expires is 'tomorrow'; it must be a time such as 2027-01-31T18:00:00Z, or"),
        (entry(expires="2027-01-31T18:00:00"), "expires is 2027-01-31 18:00:00; it must be a time such as"),
        (entry(models="[]"), "models must be a list of 1 to 64 names"),
        (entry() + entry(key='"another-key-0123456789"'), "there are two entries of the name 'web'"),
        (entry() + entry(name='"b"'), "'web' and 'b' have the same key"),
    ],
)  # fmt: skip
def test_errors_name_file_entry_field_value_and_limit(tmp_path: Path, text: str, words: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_keys(path)
    assert words in caught.value.message and str(path) in caught.value.message
    assert WEB not in caught.value.message


@pytest.mark.parametrize("field", [*FIELDS, "unknown"])
@pytest.mark.parametrize(
    "secret", ["sk-short", "a-secret-of-more-than-24-characters", "an ordinary phrase of a person"]
)
def test_no_error_shows_what_may_be_a_key_in_the_wrong_place(tmp_path: Path, field: str, secret: str) -> None:
    for text in (entry(**{field: f'"{secret}"'}), entry(**{field: f'["{secret}", 3]'}), f'{entry()}"{secret}" = 1\n'):
        try:
            read_keys(written(tmp_path, text))
        except ConfigError as error:
            assert secret not in error.message
        else:
            assert field in ("key", "name", "tenant", "models")
    for text in (f"{secret}\n", f'key = "{secret}\n', f"[[{secret}\n", f'"{secret}" = 1\n"{secret}" = 2\n'):
        with pytest.raises(ConfigError) as caught:
            read_keys(written(tmp_path, text))
        assert secret not in caught.value.message


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o640, 0o440, 0o400, 0o600])
def test_a_file_that_every_user_can_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path, WHOLE, mode)
    if mode & 0o006:
        with pytest.raises(ConfigError, match=f"every user of this host .mode {mode:04o}.: chmod 600 it; .* 0440"):
            read_keys(path)
    else:
        assert len(read_keys(path)) == 2
    assert path.stat().st_mode & 0o777 == mode


def test_what_is_no_file_or_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, words in (
        (tmp_path / "none", "cannot be read: No such file"),
        (tmp_path, "no regular file|Is a directory"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_keys(path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="no regular file"):
        read_keys(tmp_path / "pipe")
    path = written(tmp_path, WHOLE)
    monkeypatch.setattr(edge_limits, "KEY_FILE_BYTES", len(WHOLE))
    assert len(read_keys(path)) == 2
    monkeypatch.setattr(edge_limits, "KEY_FILE_BYTES", len(WHOLE) - 1)
    with pytest.raises(ConfigError, match="larger than"):
        read_keys(path)


def test_each_limit_of_the_file_and_one_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_limits, "KEY_ENTRIES", 3)
    many = [entry(name=f'"n{number}"', key=f'"{WEB}-{number}"') for number in range(4)]
    assert len(read_keys(written(tmp_path, "".join(many[:3])))) == 3
    with pytest.raises(ConfigError, match=r"has 4 .* tables; between 1 and 3"):
        read_keys(written(tmp_path, "".join(many)))
    for field, limit, values in (
        ("key", edge_limits.KEYS_OF_NAME, [f"{WEB}-{number}" for number in range(9)]),
        ("models", edge_limits.MODELS_OF_NAME, [f"m{number}" for number in range(65)]),
    ):
        for count, is_taken in ((limit, True), (limit + 1, False)):
            path = written(tmp_path, entry(**{field: str(values[:count])}))
            if is_taken:
                assert len(read_keys(path)) == 1
            else:
                with pytest.raises(ConfigError, match=f"1 (and|to) {limit}"):
                    read_keys(path)
    for length, is_taken in ((15, False), (16, True), (4096, True), (4097, False)):
        path = written(tmp_path, entry(key=f'"{"k" * length}"'))
        if is_taken:
            assert Keyring(path=path).find(b"k" * length) is not None
        else:
            with pytest.raises(ConfigError, match=f"key has {length} characters; it must have 16 to 4096"):
                read_keys(path)
    secret = tmp_path / "secret"
    secret.write_text("s" * edge_limits.SECRET_BYTES)
    secret.chmod(0o600)
    assert len(read_secret(secret, "admin_key_file")) == edge_limits.SECRET_BYTES
    secret.write_text("s" * (edge_limits.SECRET_BYTES + 1))
    with pytest.raises(ConfigError, match=r"admin_key_file is .* larger than 4 KiB"):
        read_secret(secret, "admin_key_file")


def test_keys_of_options_are_found_and_named_by_their_number() -> None:
    keys = Keyring(["one", "two", "one", "schlüssel"])
    assert [record.name for record in keys.records()] == ["api-key-1", "api-key-2", "api-key-3"]
    found = keys.find("schlüssel".encode())
    assert found is not None and found.tenant == tenant_of("schlüssel") and found.sees_all and not found.is_admin
    assert keys.find(b"") is None and keys.find(b"x" * 4097) is None and keys.find(b"three") is None
    with pytest.raises(ConfigError, match="api_key number 1 has 4097 bytes; it must have 1 to 4096"):
        Keyring(["x" * 4097])


def test_fresh_keys_differ_and_may_stand_in_a_file(tmp_path: Path) -> None:
    made = {fresh_key() for _ in range(100)}
    assert len(made) == 100 and all(len(key) > edge_limits.KEY_LEAST for key in made)
    assert len(read_keys(written(tmp_path, entry(key=str(sorted(made)[:8]))))) == 1


async def looked(keys: Keyring, times: int = 3) -> None:
    for _ in range(times):
        await keys.look()


def replaced(path: Path, text: str) -> None:
    """As editors and programs do it: another file under the same name."""
    new = path.with_name("new")
    new.write_text(text)
    new.chmod(0o600)
    new.replace(path)


@pytest.mark.asyncio
async def test_a_changed_file_counts_for_the_requests_after_it(tmp_path: Path) -> None:
    path = written(tmp_path, entry())
    keys = Keyring(path=path)
    assert keys.find(WEB.encode()) is not None
    replaced(path, entry(name='"b"', key='"another-key-0123456789"'))
    await keys.look()
    assert keys.find(WEB.encode()) is not None, "a file that was just changed may not be whole"
    await keys.look()
    assert keys.find(WEB.encode()) is None
    found = keys.find(b"another-key-0123456789")
    assert found is not None and found.name == "b" and keys.named("web") is None and keys.named("b") is found


@pytest.mark.asyncio
async def test_a_file_that_cannot_be_used_leaves_the_last_one_in_force_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path, entry())
    keys = Keyring(path=path)
    for text in (entry(admin="3"), "", "no TOML", None):
        caplog.clear()
        if text is None:
            path.unlink()
        else:
            replaced(path, text)
        await looked(keys, 5)
        assert keys.find(WEB.encode()) is not None and keys.complaint
        assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1
        assert WEB not in caplog.text
        [valid] = [family for family in keys.families("m") if family.name == "diptych:key_file_valid"]
        assert valid.samples[0].value == 0
    replaced(path, entry(admin="true"))
    await looked(keys)
    found = keys.find(WEB.encode())
    assert found is not None and found.is_admin and not keys.complaint


@pytest.mark.asyncio
async def test_a_file_is_used_once_its_mode_is_mended(tmp_path: Path) -> None:
    path = written(tmp_path, entry())
    keys = Keyring(path=path)
    path.write_text(entry(tenant='"shop"'))
    path.chmod(0o644)
    await looked(keys)
    assert "mode 0644" in keys.complaint
    path.chmod(0o640)
    await looked(keys)
    found = keys.named("web")
    assert found is not None and found.tenant == "shop" and not keys.complaint


@pytest.mark.asyncio
async def test_a_secret_that_kubernetes_swaps_is_read_again(tmp_path: Path) -> None:
    """keys.toml -> ..data/keys.toml, ..data -> a folder with a time in its name: a change swaps the link ..data."""
    for number, tenant in (("1", "a"), ("2", "b")):
        (tmp_path / f"..{number}").mkdir()
        written(tmp_path / f"..{number}", entry(tenant=f'"{tenant}"'), 0o440)
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "keys.toml").symlink_to("..data/keys.toml")
    keys = Keyring(path=tmp_path / "keys.toml")
    (tmp_path / "..data_tmp").symlink_to("..2")
    (tmp_path / "..data_tmp").replace(tmp_path / "..data")
    await looked(keys)
    found = keys.named("web")
    assert found is not None and found.tenant == "b"


@pytest.mark.asyncio
async def test_a_name_of_the_file_that_an_option_has_is_refused_before_and_after_a_change(tmp_path: Path) -> None:
    path = written(tmp_path, entry())
    with pytest.raises(ConfigError, match="'api-key-1' and 'web' have the same key"):
        Keyring([WEB], path)
    keys = Keyring(["mine"], path)
    replaced(path, entry() + entry(name='"b"', key="", sha256=f'"{digest_of(b"mine").hex()}"'))
    await looked(keys)
    assert "'api-key-1' and 'b' have the same key" in keys.complaint and keys.named("b") is None


@pytest.mark.asyncio
async def test_the_watch_ends_with_the_server(tmp_path: Path) -> None:
    keys = Keyring(path=written(tmp_path, entry()))
    keys.start()
    await asyncio.sleep(0)
    keys.stop()
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1


def test_a_secret_as_kubernetes_mounts_it_is_read_and_read_again_when_its_link_moves(tmp_path: Path) -> None:
    def publish(version: str, name: str) -> None:
        folder = tmp_path / f"..{version}"
        folder.mkdir()
        (folder / "keys.toml").write_text(f'[[key]]\nname = "{name}"\nkey = "{WEB}"\n')
        (folder / "keys.toml").chmod(0o440)  # what fsGroup makes of a Secret
        (tmp_path / "..data_tmp").symlink_to(folder.name)
        (tmp_path / "..data_tmp").rename(tmp_path / "..data")

    publish("one", "web")
    keys = tmp_path / "keys.toml"
    keys.symlink_to("..data/keys.toml")
    assert [record.name for record in read_keys(keys)] == ["web"]
    publish("two", "shop")
    assert [record.name for record in read_keys(keys)] == ["shop"]
    (tmp_path / "..two" / "keys.toml").chmod(0o444)  # the default of a Secret: every user of the host
    with pytest.raises(ConfigError, match="0440"):
        read_keys(keys)
