"""Files and batches of a server, over HTTP: what ``diptych batch`` asks for. Streams files; prints nothing."""

import http.client
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from types import UnionType
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request

from diptych.base.private_files import open_private
from diptych.control.errors import ConfigError, RequestError
from diptych.diagnosis.adapters.http_get import Site, open_url

CHUNK_BYTES = 2**20
TIMEOUT_S = 120.0
MOST_ERROR_BYTES = 2**16
_FILE = {"id": str}
_BATCH: Mapping[str, type | UnionType] = {
    "id": str,
    "status": str,
    "endpoint": str,
    "input_file_id": str,
    "output_file_id": str | None,
    "error_file_id": str | None,
    "errors": dict | None,
    "expires_at": int | None,
    "request_counts": dict | None,
}
_COUNTS = ("total", "completed", "failed")


@dataclass(frozen=True, slots=True)
class BatchClient:
    """Every call raises RequestError for what the server refuses, ConfigError when it cannot be reached."""

    site: Site

    def upload(self, path: Path) -> str:
        """The id of the file as the server knows it."""
        boundary = uuid.uuid4().hex
        name = path.name.replace("\\", "\\\\").replace('"', '\\"')
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
        ).encode()
        tail = f"\r\n--{boundary}--\r\n".encode()

        def body() -> Iterator[bytes]:
            yield head
            with path.open("rb") as file:
                while chunk := file.read(CHUNK_BYTES):
                    yield chunk
            yield tail

        headers = {
            "Content-Type": f"multipart/form-data; boundary={boundary}",
            "Content-Length": str(len(head) + path.stat().st_size + len(tail)),
        }
        return str(self._checked(self._send("POST", "/v1/files", body(), headers), "/v1/files", _FILE)["id"])

    def create(self, file_id: str, endpoint: str, window: str) -> dict[str, Any]:
        """A new batch."""
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": window}
        headers = {"Content-Type": "application/json"}
        found = self._send("POST", "/v1/batches", json.dumps(body).encode(), headers)
        return self._as_batch(found, "/v1/batches")

    def batch(self, batch_id: str) -> dict[str, Any]:
        """How far a batch is."""
        path = f"/v1/batches/{batch_id}"
        return self._as_batch(self._ask("GET", path), path)

    def batches(self, limit: int) -> list[dict[str, Any]]:
        """Batches, the newest first."""
        found = self._checked(self._ask("GET", f"/v1/batches?limit={limit}"), "/v1/batches", {"data": list})
        return [self._as_batch(batch, "/v1/batches") for batch in found["data"]]

    def cancel(self, batch_id: str) -> dict[str, Any]:
        """Give up what is not done of a batch."""
        path = f"/v1/batches/{batch_id}/cancel"
        return self._as_batch(self._ask("POST", path), path)

    def file(self, file_id: str) -> dict[str, Any]:
        """What is known of a file."""
        path = f"/v1/files/{file_id}"
        return self._checked(self._ask("GET", path), path, {**_FILE, "filename": str, "bytes": int})

    def download(self, file_id: str, path: Path) -> None:
        """Write a file of the server to ``path``; what was there is replaced when the file is whole."""
        part = path.with_name(f"{path.name}.part")
        try:
            with self._open("GET", f"/v1/files/{file_id}/content") as reply, _private(part) as file:
                shutil.copyfileobj(reply, file, CHUNK_BYTES)
            part.replace(path)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None

    def delete_file(self, file_id: str) -> None:
        """The server may forget this file."""
        self._ask("DELETE", f"/v1/files/{file_id}")

    def _ask(self, method: str, path: str) -> dict[str, Any]:
        with self._open(method, path) as reply:
            try:
                return self._object(reply.read(), path)
            except (HTTPException, OSError) as error:
                raise self._unreachable(error) from None

    def _object(self, data: bytes, path: str) -> dict[str, Any]:
        """A reply as an object. Raises RequestError."""
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            where = self.site.url + path.partition("?")[0]
            raise RequestError(f"{where}: the reply is no JSON object; is this a server with batches?")
        return found

    def _as_batch(self, found: Any, path: str) -> dict[str, Any]:
        """A batch with all fields that are read of it: what a server may leave out is None, or 0 lines."""
        batch = {**dict.fromkeys(_BATCH), **self._checked(found, path, _BATCH)}
        counts = self._checked(batch["request_counts"] or {}, path, dict.fromkeys(_COUNTS, int | None))
        batch["request_counts"] = {name: counts.get(name) or 0 for name in _COUNTS}
        return batch

    def _checked(self, found: Any, path: str, fields: Mapping[str, type | UnionType]) -> dict[str, Any]:
        """A reply with the fields that are read of it. Raises RequestError that names the one that is not as it
        should be: the server may be another kind of server."""
        if not isinstance(found, dict):
            raise RequestError(f"{self.site.url}{path}: an entry of the reply is no object")
        for name, kind in fields.items():
            value = found.get(name)
            if not isinstance(value, kind) or isinstance(value, bool):
                how = "has no" if value is None else "has an unexpected"
                raise RequestError(f"{self.site.url}{path}: the reply {how} {name!r}; is this a server with batches?")
        return found

    def _open(self, method: str, path: str) -> Any:
        request = Request(self.site.url + path, method=method, headers=self._key())
        try:
            return open_url(request, TIMEOUT_S)
        except HTTPError as error:
            raise RequestError(_refusal(error.code, error.read(MOST_ERROR_BYTES))) from None
        except (URLError, HTTPException, OSError) as error:
            raise self._unreachable(error) from None

    def _send(self, method: str, path: str, body: Iterator[bytes] | bytes, headers: dict[str, str]) -> dict[str, Any]:
        """Send a request with a body that is streamed. A server that refuses it in the middle is still listened to."""
        parts = urlsplit(self.site.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.netloc, timeout=TIMEOUT_S)
        try:
            with suppress(BrokenPipeError, ConnectionResetError):  # by a refusal, which is read
                connection.request(method, parts.path + path, body, {**headers, **self._key()})
            reply = connection.getresponse()
            text = reply.read()
            if reply.status >= 300:
                raise RequestError(_refusal(reply.status, text))
            return self._object(text, path)
        except (HTTPException, OSError) as error:
            raise self._unreachable(error) from None
        finally:
            connection.close()

    def _key(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.site.key}"} if self.site.key else {}

    def _unreachable(self, error: Exception) -> ConfigError:
        return ConfigError(f"cannot reach {self.site.url}: {getattr(error, 'reason', error)}", param="url")


def _private(path: Path) -> IO[bytes]:
    """Texts of answers: for their owner alone."""
    return os.fdopen(open_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb")


def _refusal(status: int, body: bytes) -> str:
    """The message of an error reply."""
    text = body.decode("utf-8", "replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {status}: {text[:200]}"
