"""The image of one version: a safetensors file as bytes, cut into buckets that travel and are checked one by one.

Keeps true: the header has a digest of every bucket, the manifest's checksum is the header's; what is read has passed
both. Tensors lie in the order of falling item size, so each is aligned; its bytes may lie in several buckets.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping

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
    rows = [columns := torch.zeros(128, dtype=torch.int64, device=data.device)]
    for block in words.split(1024):  # one megabyte: the second sum finds it in the cache
        rows.append(block.sum(1))
        columns += block.sum(0)
    return _hash(torch.cat(rows).cpu().numpy().tobytes() + data[words.numel() * 8:].cpu().numpy().tobytes())


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class Image:
    """Where each tensor of a version lies, and its buckets (start, end). Raises ValueError for a type that safetensors
    does not have."""

    def __init__(self, version: Version, tensors: Mapping[str, Tensor], bucket_mb: int) -> None:
        self._version, self._bucket, self._entries, self._tensors, offset = version, bucket_mb * 1_000_000, {}, [], 0
        for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
            if tensor.dtype not in _NAMES:
                raise ValueError(f"{name} has the type {tensor.dtype}, which no carrier takes")
            self._tensors.append((offset, tensor))
            self._entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape),
                                   "data_offsets": [offset, offset := offset + tensor.nbytes]}
        self.nbytes, self.buckets = offset, _cut(offset, self._bucket)
        self.raw = self._header(["0" * 32] * len(self.buckets))
        """The header, a multiple of 64 bytes long; its digests are those of `fill`."""

    def fill(self, data: Tensor) -> None:
        """Copy the tensors into `data`, uint8 [nbytes], and their digests into the header."""
        for offset, tensor in self._tensors:
            data[offset:offset + tensor.nbytes].copy_(flat(tensor))
        self.raw = self._header([digest(data[start:end]) for start, end in self.buckets])

    def _header(self, digests: list[str]) -> bytes:
        meta = {"version": str(self._version), "bucket": str(self._bucket), "digests": " ".join(digests)}
        plain = json.dumps({"__metadata__": meta, **self._entries}).encode()
        plain += b" " * (-(len(plain) + 8) % 64)
        return len(plain).to_bytes(8, "little") + plain

    def manifest(self, location: str) -> Manifest:
        return Manifest(self._version, location, self.nbytes, _hash(self.raw))


def read(raw: bytes, manifest: Manifest, data: Tensor, fetch: Callable[[int, Tensor], object]) -> dict[str, Tensor]:
    """The tensors, as views of `data`, uint8 [manifest.nbytes], whose every bucket `fetch(number, bucket)` fills.
    Raises EngineLost when the header or a bucket is not what was published."""
    if _hash(raw) != manifest.checksum:
        raise EngineLost(f"weights at {manifest.location} are torn, or not those of version {manifest.version}: their "
                         "header has another checksum")
    entries = json.loads(raw[8:])
    meta = entries.pop("__metadata__")
    digests = meta["digests"].split()
    for number, (start, end) in enumerate(_cut(manifest.nbytes, int(meta["bucket"]))):
        fetch(number, data[start:end])
        if digest(data[start:end]) != digests[number]:
            raise EngineLost(f"weights of version {manifest.version} at {manifest.location}: bucket {number + 1} of "
                             f"{len(digests)} has another checksum")
    return {name: data[slice(*entry["data_offsets"])].view(DTYPES[entry["dtype"]]).view(entry["shape"])
            for name, entry in entries.items()}


def _cut(nbytes: int, size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, nbytes)) for start in range(0, nbytes, size)]
