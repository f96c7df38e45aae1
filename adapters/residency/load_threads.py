"""Threads that load and copy adapters beside the engine's steps, and give way to them.

A step uses every core, so a loader that is on one of them stops the whole step. Such a thread is therefore less
important to the operating system than those that compute: it gets what they leave, and at least a share that its
niceness fixes. And each of its operations keeps to one core. Knows nothing of the work.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

logger = logging.getLogger(__name__)

LOAD_NICENESS = 10
"""What loads add to the niceness of the engine: where both compete for a core, one tenth of it."""
COPY_NICENESS = 5
"""What copies add: a quarter of it, because a copy is short and a request may be ready but for it."""
MAX_NICENESS = 19


def loader_threads(count: int, *, has_idle_core: bool = False) -> ThreadPoolExecutor:
    """Threads that read, check and pack adapters.

    Args:
        count: How many.
        has_idle_core: Whether steps leave a core to others. Then loads compete with other processes rather than with
            steps, and are not to starve beside them.
    """
    niceness = COPY_NICENESS if has_idle_core else LOAD_NICENESS
    return ThreadPoolExecutor(count, "adapter-loader", _give_way, (niceness, torch.get_num_threads()))


def copier_thread() -> ThreadPoolExecutor:
    """One thread that copies images to the device, so that no copy waits behind a load."""
    return ThreadPoolExecutor(1, "adapter-copier", _give_way, (COPY_NICENESS, torch.get_num_threads()))


def _give_way(niceness: int, default_threads: int) -> None:
    """Prepare the calling thread: lower its priority, and let its operations use one core."""
    if sys.platform == "linux":  # elsewhere niceness is of the process
        thread = threading.get_native_id()
        try:
            os.setpriority(
                os.PRIO_PROCESS, thread, min(os.getpriority(os.PRIO_PROCESS, thread) + niceness, MAX_NICENESS)
            )
        except OSError as error:
            logger.warning("loading adapters may slow down steps: its priority cannot be lowered: %s", error)
    # torch counts a thread's cores from its first operation on; setting them also sets what threads that torch has not
    # seen yet start with, which another thread puts right.
    torch.get_num_threads()
    torch.set_num_threads(1)
    repair = threading.Thread(target=torch.set_num_threads, args=(default_threads,))
    repair.start()
    repair.join()
