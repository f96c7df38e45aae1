"""Every way to upload a bad adapter that we know, as makers of bytes with the refusal each must meet.

The parser's tests run the table against files; the server's tests may run it over HTTP. All cases are made for one
base, so each is wrong in exactly one way.
"""

from __future__ import annotations

from bad_configs import config_cases
from bad_upload import BadUpload, Upload
from bad_weights import container_cases, meaning_cases
from lora_files import config_bytes, q_and_v, weights_bytes
from manylora.adapters.base_shape import BaseShape


def good_upload(base: BaseShape) -> Upload:
    """A sound adapter of rank 8 on q_proj and v_proj of every layer."""
    return Upload(config_bytes(), weights_bytes(q_and_v(base)))


def bad_uploads(base: BaseShape) -> list[BadUpload]:
    """All cases for a base."""
    cases = [
        *container_cases(base),
        *meaning_cases(base),
        *config_cases(good_upload(base).weights, max_rank=64),
    ]
    names = [case.name for case in cases]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two cases share a name: {sorted(repeated)}")
    return cases
