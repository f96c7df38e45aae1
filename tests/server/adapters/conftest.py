from __future__ import annotations

import pytest

from s3_server import S3Server


@pytest.fixture
def bucket(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A new bucket of an S3 that the environment names."""
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    return s3.new_bucket()
