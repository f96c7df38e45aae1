"""A server that speaks the protocol of S3, in threads of this process, on a free port.

moto keeps what it stores in its own module: servers of one process, one after the other, share their buckets.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import unquote

import httpx
from moto.s3.models import s3_backends
from moto.server import ThreadedMotoServer

ACCESS_KEY = "AKIAMANYLORATESTS0000001"
SECRET_KEY = "secret-of-the-tests-that-no-log-may-hold"
ACCOUNT = "123456789012"
SIGNED = {
    "Authorization": "AWS4-HMAC-SHA256 Credential=tests/20260101/us-east-1/s3/aws4_request, Signature=none"
}
"""The server only looks for the owner in it and checks nothing."""
NUMBERS = itertools.count()


@dataclass
class S3Server:
    """One server, and how tests get at objects from behind."""

    url: str
    http: httpx.Client

    def environment(self) -> dict[str, str]:
        """Settings that obstore needs."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.url,
        }

    def new_bucket(self) -> str:
        bucket = f"manylora-{next(NUMBERS)}"
        assert self.http.put(f"/{bucket}").status_code == 200
        return bucket

    def keys(self, bucket: str) -> list[str]:
        listed = self.http.get(f"/{bucket}", params={"list-type": "2"})
        assert listed.status_code == 200, listed.text
        return sorted(unquote(key) for key in re.findall("<Key>(.*?)</Key>", listed.text))

    def get(self, bucket: str, key: str) -> bytes:
        found = self.http.get(f"/{bucket}/{key}")
        assert found.status_code == 200, found.text
        return found.content

    def put(self, bucket: str, key: str, content: bytes) -> None:
        assert self.http.put(f"/{bucket}/{key}", content=content).status_code == 200

    def flip_a_bit(self, bucket: str, key: str) -> None:
        content = bytearray(self.get(bucket, key))
        content[len(content) // 2] ^= 1
        self.put(bucket, key, bytes(content))

    def unfinished_uploads(self, bucket: str) -> int:
        return self.http.get(f"/{bucket}", params={"uploads": ""}).text.count("<Upload>")

    def make_older(self, bucket: str, seconds: float) -> None:
        """Let all objects have been stored earlier."""
        for key in s3_backends[ACCOUNT]["aws"].buckets[bucket].keys.values():
            key.last_modified -= timedelta(seconds=seconds)

    @contextmanager
    def refusing_keys(self) -> Iterator[None]:
        """From now on only keys that this server issued are let in: none."""
        self.http.post("/moto-api/reset-auth", content=b"0")
        try:
            yield
        finally:
            self.http.post("/moto-api/reset-auth", content=b"inf")


@contextmanager
def s3_server() -> Iterator[S3Server]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        with httpx.Client(
            base_url=f"http://{host}:{port}", headers=SIGNED, trust_env=False, timeout=30
        ) as client:
            yield S3Server(str(client.base_url), client)
    finally:
        server.stop()
