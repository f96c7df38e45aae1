"""All numbers of one step in one piece of memory: filled on the host, copied to the device once, read there in place.

Numbers with a fixed place in a step are fields. Each starts at a multiple of 64 bytes, so that kernels see the same
alignment in every step. Numbers that grow with contexts, mostly block tables, come after them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

ALIGN_BYTES = 64

Int32Array = npt.NDArray[np.int32]


class ImageLayout:
    """Places of the fields of a step. All are int32; some hold the bits of float32.

    Args:
        shapes: Shape of each field, by name.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._fields: dict[str, tuple[int, int, tuple[int, ...]]] = {}
        end = 0
        for name, shape in shapes.items():
            size = 4 * int(np.prod(shape, dtype=np.int64))
            self._fields[name] = (end, end + size, shape)
            end = aligned(end + size)
        self.num_bytes = end
        """Bytes of all fields; the growing part starts here."""

    def on_host(self, image: npt.NDArray[np.uint8]) -> dict[str, Int32Array]:
        """The fields as views of a host image."""
        return {
            name: image[start:end].view(np.int32).reshape(shape)
            for name, (start, end, shape) in self._fields.items()
        }

    def on_device(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        """The fields as views of the device's image, uint8 [bytes]."""
        return {
            name: image[start:end].view(torch.int32).view(shape)
            for name, (start, end, shape) in self._fields.items()
        }


class StepImages:
    """The image on the device, whose address never changes, and the host's image of the step that is being loaded.

    A host image is used for one step. If it is pinned, torch reuses its memory only after its copy has ended.

    Args:
        num_bytes: Largest size of a step.
        device: Device of the steps.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.device = torch.zeros(aligned(num_bytes), dtype=torch.uint8, device=device)
        """uint8 [bytes]: the image on the device."""
        self.host = torch.empty(0, dtype=torch.uint8)
        """uint8 [bytes]: the image that was sent last."""
        self._is_async = device.type == "cuda"
        self._end = 0

    def begin(self, layout: ImageLayout) -> dict[str, Int32Array]:
        """Begin a new host image; returns its fields to be filled."""
        self.host = torch.empty(len(self.device), dtype=torch.uint8, pin_memory=self._is_async)
        self._end = layout.num_bytes
        return layout.on_host(self.host.numpy())

    def append(self, numbers: Int32Array) -> slice:
        """Append int32 numbers to the image; returns their place in it, in bytes.

        Raises:
            ValueError: The image has no room for them.
        """
        start = self._end
        end = self._end + numbers.nbytes
        if end > len(self.device):
            raise ValueError(
                f"a step has {end} bytes of numbers, its image has room for {len(self.device)}"
            )
        self.host[start:end].view(torch.int32).numpy()[:] = numbers.reshape(-1)
        self._end = aligned(end)
        return slice(start, end)

    def send(self) -> None:
        """Copy the filled part of the image to the device. On a GPU the copy is in the order of the steps."""
        end = min(self._end, len(self.device))
        self.device[:end].copy_(self.host[:end], non_blocking=self._is_async)


def aligned(num_bytes: int) -> int:
    """The next multiple of `ALIGN_BYTES`."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
