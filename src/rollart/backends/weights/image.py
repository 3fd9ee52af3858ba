"""The image of one version: a safetensors file as bytes, cut into buckets that travel and are checked one by one.

Keeps true: the header has a digest of every bucket, the manifest's checksum is the header's; what is read has passed
both. Tensors lie in the order of falling item size, so each is aligned; its bytes may lie in several buckets.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rollart.core.errors import EngineLost
from rollart.core.types import Manifest, Version

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
          "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
          "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def flat(tensor: Tensor) -> Tensor:
    """Its bytes, uint8 [n], without a copy where it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def digest(data: Tensor) -> str:
    """Of bytes, uint8 [n]: BLAKE2b over the sums of its 64-bit words by row and by column of 128, in exact integers
    modulo 2^64. Any one changed byte and any two swapped words change it; it costs about one reading of the data."""
    data = data.clone() if data.storage_offset() % 8 else data
    words = data[:len(data) // 1024 * 1024].view(torch.int64).view(-1, 128)
    columns = torch.zeros(128, dtype=torch.int64, device=data.device)
    rows = [columns]
    for block in words.split(1024):  # one megabyte: the second sum finds it in the cache
        rows.append(block.sum(1))
        columns += block.sum(0)
    out = hashlib.blake2b(torch.cat(rows).cpu().numpy().tobytes(), digest_size=16)
    out.update(data[words.numel() * 8:].cpu().numpy().tobytes())
    return out.hexdigest()


@dataclass(frozen=True)
class Header:
    """`raw` as it stands at the file's beginning, a multiple of 64 bytes. `buckets`: (start, end) in the data."""

    raw: bytes
    entries: Mapping[str, tuple[torch.dtype, tuple[int, ...], int, int]]
    nbytes: int
    buckets: list[tuple[int, int]]
    digests: list[str]

    @classmethod
    def parse(cls, raw: bytes, manifest: Manifest) -> Header:
        """Raises EngineLost when it is not the manifest's."""
        if header_checksum(raw) != manifest.checksum:
            raise EngineLost(f"weights at {manifest.location} are torn, or not those of version {manifest.version}: "
                             "their header has another checksum")
        plain = json.loads(raw[8:])
        meta = plain.pop("__metadata__")
        entries = {name: (DTYPES[entry["dtype"]], tuple(entry["shape"]), *entry["data_offsets"])
                   for name, entry in plain.items()}
        nbytes = max((entry[3] for entry in entries.values()), default=0)
        return cls(raw, entries, nbytes, _cut(nbytes, int(meta["bucket_bytes"])), meta["digests"].split())

    def check(self, number: int, bucket: Tensor, manifest: Manifest) -> None:
        """Raises EngineLost when these bytes are not those that were published as this bucket."""
        if digest(bucket) != self.digests[number]:
            raise EngineLost(f"weights of version {manifest.version} at {manifest.location}: bucket {number + 1} of "
                             f"{len(self.buckets)} has another checksum")

    def views(self, data: Tensor) -> dict[str, Tensor]:
        """The tensors, as views of data, uint8 [nbytes]."""
        return {name: data[start:end].view(dtype).view(shape)
                for name, (dtype, shape, start, end) in self.entries.items()}


    def pull(self, data: Tensor, start: Callable[[int, Tensor], Callable[[], object]], manifest: Manifest,
             ) -> dict[str, Tensor]:
        """The tensors in `data`, uint8 [nbytes]: `start(number, bucket)` begins to fill a bucket and returns what waits
        for it; each is checked while the next one comes."""
        parts = [data[low:high] for low, high in self.buckets]
        coming = [start(0, parts[0])] if parts else []
        for number, part in enumerate(parts):
            coming[number]()
            if number + 1 < len(parts):
                coming.append(start(number + 1, parts[number + 1]))
            self.check(number, part, manifest)
        return self.views(data)


def header_checksum(raw: bytes) -> str:
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


def _cut(nbytes: int, size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, nbytes)) for start in range(0, nbytes, size)]


class Plan:
    """Where each tensor goes. Raises ValueError for a type that safetensors does not have."""

    def __init__(self, version: Version, tensors: Mapping[str, Tensor], bucket_mb: int) -> None:
        self.version, self._bucket, self._tensors, offset = version, bucket_mb * 1_000_000, [], 0
        self._entries: dict[str, object] = {}
        for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
            if tensor.dtype not in _NAMES:
                raise ValueError(f"{name} has the type {tensor.dtype}, which no carrier takes")
            self._tensors.append((offset, tensor))
            self._entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape),
                                   "data_offsets": [offset, offset := offset + tensor.nbytes]}
        self.nbytes, self.buckets = offset, _cut(offset, self._bucket)

    def fill(self, number: int, out: Tensor) -> str:
        """Copy bucket `number` into `out`, uint8 [its bytes]; returns its digest."""
        start, end = self.buckets[number]
        for offset, tensor in self._tensors:
            low, high = max(start, offset), min(end, offset + tensor.nbytes)
            if low < high:
                out[low - start:high - start].copy_(flat(tensor)[low - offset:high - offset])
        return digest(out)

    def header(self, digests: list[str] | None = None) -> bytes:
        """Its length does not depend on the digests."""
        meta = {"format": "pt", "version": str(self.version), "bucket_bytes": str(self._bucket),
                "digests": " ".join(digests or ["0" * 32] * len(self.buckets))}
        plain = json.dumps({"__metadata__": meta, **self._entries}).encode()
        plain += b" " * (-(len(plain) + 8) % 64)
        return len(plain).to_bytes(8, "little") + plain

    def manifest(self, location: str, header: bytes) -> Manifest:
        return Manifest(self.version, location, self.nbytes, header_checksum(header))
