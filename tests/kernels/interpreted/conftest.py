"""Tests in this folder run Triton kernels through its interpreter.

TRITON_INTERPRET must be set before Triton is first imported, and a process that has it cannot compile kernels: so they
are collected only in processes of their own, which tests/kernels/test_interpreter.py starts.
"""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]  # noqa: TID251
