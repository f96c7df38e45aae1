"""Objects in a bucket of S3. Every request has its own time limit, and what obstore raises becomes an error of ours.

Keys, region and endpoint are obstore's business, which reads AWS_... .
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from manylora.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from obstore import ObjectMeta

logger = logging.getLogger(__name__)

PART_BYTES = 8 << 20
"""Most bytes of an object in one request."""
PARTS_AT_ONCE = 4
CONNECT_S = 5.0
REQUEST_S = 30.0
"""Time limit of a request, and of all tries of it together."""
RETRIES = 3
DOWN_S = 5.0
"""Seconds after a request without an answer in which nothing else is asked of S3."""
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_KIND = re.compile(r"kind: (\w{1,64})")
_METADATA_SERVICE = "/latest/api/token"


class Bucket:
    """A bucket, or a folder in it. Thread-safe. Every method raises CapacityError (storage.unavailable) without S3.

    Args:
        bucket: Its name.
        prefix: Folder in the bucket; may be empty. Keys are relative to it.
        allow_http: Let the endpoint be one without TLS.
    """

    def __init__(self, bucket: str, prefix: str, *, allow_http: bool = False) -> None:
        limit = timedelta(seconds=REQUEST_S)
        try:
            self._store = S3Store(
                bucket,
                prefix=prefix or None,
                disable_bulk_delete=True,  # not every S3 has it
                client_options={
                    "allow_http": allow_http,
                    "connect_timeout": timedelta(seconds=CONNECT_S),
                    "timeout": limit,
                },
                retry_config={"max_retries": RETRIES, "retry_timeout": limit},
            )
        except (BaseError, ValueError) as error:
            raise ConfigError(
                "registry.blob_url names S3, but an AWS_... variable of the environment is not understood "
                f"({type(error).__name__}).",
                param="registry.blob_url",
            ) from error
        self.name = f"s3://{bucket}/{prefix}".rstrip("/")
        self._down_until = 0.0

    def put(self, key: str, content: bytes | bytearray | Path) -> None:
        """Store an object, in parts if it is large. Returns once S3 confirmed all of it."""
        with self._asking():
            obstore.put(
                self._store, key, content, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE
            )

    def get(self, key: str, start: int, num_bytes: int) -> tuple[memoryview, int]:
        """Bytes of an object, and the size of all of it; raises FileNotFoundError if there is none."""
        with self._asking(is_there=False):
            try:
                found = obstore.get(self._store, key, options={"range": (start, start + num_bytes)})
                return memoryview(found.bytes()), found.meta["size"]
            except BaseError as error:
                if reason_of(error)[0] != "InvalidRange":
                    raise
                return memoryview(b""), start  # the object ends here

    def size(self, key: str) -> int | None:
        """Bytes of an object; None if there is none."""
        with self._asking():
            try:
                return obstore.head(self._store, key)["size"]
            except FileNotFoundError:
                return None

    def delete(self, keys: str | Sequence[str]) -> None:
        """Remove objects; what is not there is no error."""
        with self._asking():
            obstore.delete(self._store, keys)

    def objects(self, folder: str) -> Iterator[ObjectMeta]:
        """All objects below a folder."""
        with self._asking():
            for page in obstore.list(self._store, prefix=folder):
                yield from page

    def folders(self, folder: str) -> list[str]:
        """Names of the folders in a folder."""
        with self._asking():
            found = obstore.list_with_delimiter(self._store, prefix=folder)["common_prefixes"]
        return [path.rstrip("/").rpartition("/")[2] for path in found]

    def probe(self, folder: str) -> None:
        """Store, read and delete a few bytes, and list a folder.

        Raises:
            ConfigError: S3 refuses, and why.
        """
        key = f"probe/{secrets.token_hex(16)}"
        content = secrets.token_bytes(16)
        with self._asking(is_probe=True):
            obstore.put(self._store, key, content)
            is_same = obstore.get(self._store, key).bytes() == content
            obstore.delete(self._store, key)
            next(iter(obstore.list(self._store, prefix=folder)), None)
        if not is_same:
            raise self._refused("it gave back other bytes than were stored")

    def unavailable(self) -> CapacityError:
        """The error for what cannot be had now."""
        message = "The adapter store cannot be reached; try again."
        return CapacityError(message, retry_after_s=DOWN_S, code="storage.unavailable")

    @contextlib.contextmanager
    def _asking(self, *, is_there: bool = True, is_probe: bool = False) -> Iterator[None]:
        """Turn what obstore raises into our errors. Its words stay out of them and of the log: they quote requests."""
        if not is_probe and time.monotonic() < self._down_until:
            raise self.unavailable()
        try:
            yield
        except (BaseError, FileNotFoundError) as error:
            reason, is_answer = reason_of(error)
            if not is_there and isinstance(error, FileNotFoundError) and reason != "NoSuchBucket":
                raise FileNotFoundError(self.name) from None
            logger.warning("%s: %s", self.name, reason)
            if is_probe and is_answer:
                raise self._refused(reason) from None
            if not is_answer:
                self._down_until = time.monotonic() + DOWN_S
            raise self.unavailable() from None

    def _refused(self, reason: str) -> ConfigError:
        keys = "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL"
        what = f"{self.name} cannot be used ({reason}). Manylora puts, gets, deletes and lists objects there"
        return ConfigError(
            f"{what}: check registry.blob_url and {keys}.", param="registry.blob_url"
        )


def reason_of(error: Exception) -> tuple[str, bool]:
    """A short reason, and True if it is an answer of S3, which would come again.

    obstore says both only in its text: its errors have no fields, and most are a GenericError. No other place reads it.
    """
    text = str(error)
    code, status, kind = (
        found and found[1] for found in (part.search(text) for part in (_CODE, _STATUS, _KIND))
    )
    if _METADATA_SERVICE in text:
        return "no AWS credentials were found", True
    if status is None:
        return f"no answer: {kind or type(error).__name__}", False
    return code or f"status {status}", not status.startswith("5")
