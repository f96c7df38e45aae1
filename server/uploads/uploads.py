"""Uploads that this server takes in: their checks, the files of those in pieces, and those in progress."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from manylora.server.process.threads import in_thread
from manylora.server.uploads.in_progress import UploadsInProgress

if TYPE_CHECKING:
    from manylora.server.uploads.staged_files import StagedFiles
    from manylora.server.uploads.validation import AdapterValidator


@dataclass(frozen=True, slots=True, kw_only=True)
class Uploads:
    """The parts that take uploads in."""

    validator: AdapterValidator
    staged: StagedFiles
    """Files of uploads in pieces, while they come."""
    in_progress: UploadsInProgress = field(default_factory=UploadsInProgress)

    async def sweep(self, open_ids: Callable[[], Awaitable[Set[str]]]) -> int:
        """Delete the files of uploads that are gone.

        Args:
            open_ids: Reads the ids of the uploads that still take bytes.

        Returns:
            Number of uploads whose files were deleted.
        """
        # First the files, then the rows: files are made after their row.
        staged = await in_thread(self.staged.ids)
        gone = set(staged) - await open_ids()
        doomed = [each for each in gone if not self.in_progress.is_writing(each)]
        for upload_id in doomed:
            await in_thread(self.staged.delete, upload_id)
        return len(doomed)
