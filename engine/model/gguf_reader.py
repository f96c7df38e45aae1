"""gguf's reader of GGUF files, made safe for damaged ones: what lies past the end of the file is an error."""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType


class BoundedReader(GGUFReader):
    """Reads the head of a GGUF file.

    `GGUFReader` returns empty arrays past the end of the file, and loops over any number of items that the file claims.

    Raises:
        ValueError: The file ends before what it says that it has, or as `GGUFReader`.
    """

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> np.ndarray:  # noqa: ANN401
        values = super()._get(offset, dtype, count, override_order)
        if len(values) < count:
            raise ValueError(f"expected {count} values at byte {offset}, got {len(values)}")
        return values

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        if raw_type == GGUFValueType.ARRAY:  # type and number of items come first; each takes a byte at least
            self._get(orig_offs + 12, np.uint8, int(self._get(orig_offs + 4, np.uint64)[0]))
        return super()._get_field_parts(orig_offs, raw_type)

    def _build_fields(self, offs: int, count: int) -> int:
        self._get(offs, np.uint8, int(count) + int(self.fields["GGUF.tensor_count"].contents()))
        return super()._build_fields(offs, count)
