"""The demo's data set: this machine's Python standard library, packed into one shard of byte windows.

A sample is a window of at most CONTEXT + 1 bytes of one document. On disk the shard is the bytes
one after another; the index (offset, length, document) is kept apart, as packed data sets do, so a
damaged shard still has a healthy-looking index. Reading *cleans* a sample: NUL bytes are dropped,
because source text has none and 0 is the padding token. A block of the shard that reads back as
zeros (a hole left by a crashed copy) therefore becomes a sample with no token at all.
"""

import hashlib
import json
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

CONTEXT = 128  # tokens a sample predicts; a window holds one byte more
VOCABULARY = 256
PADDING = 0
SIZE_BYTES = 3_000_000  # about 24,000 samples: more than a demo run reads, so one epoch suffices
SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "__pycache__",
    "turtledemo",
}


@dataclass(frozen=True)
class Sample:
    """One cleaned sample. `tokens` is uint8 of at most CONTEXT + 1; `fingerprint` is over the raw bytes."""

    index: int
    name: str
    tokens: np.ndarray
    raw_length: int
    fingerprint: str

    @property
    def targets(self) -> int:
        """How many tokens of the sample are predicted; 0 when every label is masked."""
        return max(0, len(self.tokens) - 1)

    @property
    def mask_density(self) -> float:
        """Share of the context whose label counts, 0 … 1."""
        return self.targets / CONTEXT


class Shard:
    """A packed shard on disk. Reads go to the file each time, so damage on disk is seen."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "shard-0000.bin"
        index = np.load(directory / "shard-0000.index.npy", allow_pickle=False)
        self.offsets, self.lengths, self.documents = index[0], index[1], index[2]
        described = json.loads((directory / "shard-0000.json").read_text())
        self.names: list[str] = described["documents"]
        self.starts: list[int] = described["starts"]
        self.digest: str = described["sha256"]
        self._file = self.path.open("rb", buffering=0)  # a buffer would show what was there before

    def __len__(self) -> int:
        return len(self.offsets)

    def name(self, index: int) -> str:
        """Return the sample id: document and byte offset in it, e.g. `json/decoder.py@256`."""
        document = int(self.documents[index])
        return f"{self.names[document]}@{int(self.offsets[index]) - self.starts[document]}"

    def read(self, index: int) -> Sample:
        """Read and clean one sample."""
        self._file.seek(int(self.offsets[index]))
        raw = self._file.read(int(self.lengths[index]))
        tokens = np.frombuffer(raw, dtype=np.uint8)
        return Sample(
            index=index,
            name=self.name(index),
            tokens=tokens[tokens != PADDING],
            raw_length=len(raw),
            fingerprint=hashlib.sha256(raw).hexdigest()[:16],
        )

    def close(self) -> None:
        """Close the shard file."""
        self._file.close()


def build(directory: Path, *, size_bytes: int = SIZE_BYTES) -> None:
    """Pack the standard library's sources into `directory`.

    Raises:
        FileNotFoundError: this Python has no readable sources (a zipped or stripped standard library).
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    packed = bytearray()
    names: list[str] = []
    starts: list[int] = []
    rows: list[tuple[int, int, int]] = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(relative.parts[:-1]) or relative.name.startswith("_sysconfigdata"):
            continue  # tests say little, and what the build wrote differs on every machine
        text = path.read_bytes().replace(b"\0", b"")
        if not text:
            continue
        start = len(packed)
        rows += [
            (start + at, min(CONTEXT + 1, len(text) - at), len(names))
            for at in range(0, len(text) - 1, CONTEXT)
        ]
        names.append(relative.as_posix())
        starts.append(start)
        packed += text
        if len(packed) >= size_bytes:
            break
    if not rows:
        raise FileNotFoundError(
            f"{root}: no Python sources to train on; use a Python that ships its .py files"
        )
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "shard-0000.bin").write_bytes(packed)
    np.save(directory / "shard-0000.index.npy", np.array(rows, dtype=np.int64).T)
    described = {"documents": names, "starts": starts, "sha256": hashlib.sha256(packed).hexdigest()}
    (directory / "shard-0000.json").write_text(json.dumps(described))


def punch_hole(shard: Shard, index: int) -> None:
    """Overwrite one sample's bytes on disk with zeros, as a hole in a copied file reads."""
    with shard.path.open("r+b") as file:
        file.seek(int(shard.offsets[index]))
        file.write(bytes(int(shard.lengths[index])))


def overwrite_with_binary(shard: Shard, indexes: Iterable[int], seed: int) -> None:
    """Overwrite samples on disk with random non-ASCII bytes, as a compressed file in a text mix reads."""
    generator = np.random.Generator(np.random.PCG64(seed))
    with shard.path.open("r+b") as file:
        for index in indexes:
            file.seek(int(shard.offsets[index]))
            length = int(shard.lengths[index])
            file.write(generator.integers(128, 256, size=length, dtype=np.uint8).tobytes())


def collate(samples: list[Sample]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return inputs and targets (int64) and the label mask (bool), each batch × CONTEXT, right-padded."""
    inputs = np.full((len(samples), CONTEXT), PADDING, dtype=np.int64)
    targets = np.full((len(samples), CONTEXT), PADDING, dtype=np.int64)
    mask = np.zeros((len(samples), CONTEXT), dtype=bool)
    for row, sample in enumerate(samples):
        count = sample.targets
        inputs[row, :count] = sample.tokens[:count]
        targets[row, :count] = sample.tokens[1 : count + 1]
        mask[row, :count] = True
    return inputs, targets, mask
