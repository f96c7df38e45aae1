"""`manylora` where few files may be open."""

from __future__ import annotations

import resource

from manylora.cli import main

SOFT = 128
HARD = 192

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, HARD))
    main()
