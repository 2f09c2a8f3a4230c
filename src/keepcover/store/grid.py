"""Which images and draws one file holds, and how files tile a store. Arithmetic only."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

_NAME = re.compile(r"images-(\d{8})-(\d{8})\.draws-(\d{6})-(\d{6})\.safetensors")


@dataclass(frozen=True)
class Chunk:
    """Some images and some of their draws: what one file holds.

    Example:
        >>> chunk = Chunk(range(0, 256), range(64, 128))
        >>> chunk.name
        'images-00000000-00000256.draws-000064-000128.safetensors'
        >>> Chunk.of_name(chunk.name) == chunk
        True
    """

    rows: range
    draws: range

    @property
    def name(self) -> str:
        rows, draws = self.rows, self.draws
        return f"images-{rows.start:08d}-{rows.stop:08d}.draws-{draws.start:06d}-{draws.stop:06d}.safetensors"

    @classmethod
    def of_name(cls, name: str) -> Chunk | None:
        """What a file of this name holds; None for any other file."""
        a, b, c, d = map(int, found.groups()) if (found := _NAME.fullmatch(name)) else (0, 0, 0, 0)
        return cls(range(a, b), range(c, d)) if a < b and c < d else None

    @property
    def count(self) -> int:
        """Noisy images."""
        return len(self.rows) * len(self.draws)

    def overlaps(self, other: Chunk) -> bool:
        pairs = ((self.rows, other.rows), (self.draws, other.draws))
        return all(a.start < b.stop and b.start < a.stop for a, b in pairs)

    def __str__(self) -> str:
        return f"images {self.rows.start} to {self.rows.stop - 1}, draws {self.draws.start} to {self.draws.stop - 1}"


@dataclass(frozen=True)
class Grid:
    """Images in blocks of ``chunk_images``; the draws of a block in files that begin anywhere.

    New files end at multiples of ``chunk_draws``, so a store that grew from 100 draws to 256 has a shorter file where
    the first run ended, and nothing is computed twice.

    Example:
        >>> grid = Grid(images=500, chunk_images=256, chunk_draws=64)
        >>> [str(chunk) for chunk in grid.missing([Chunk(range(0, 256), range(0, 64))], range(0, 100))]
        ['images 256 to 499, draws 0 to 63', 'images 0 to 255, draws 64 to 99', 'images 256 to 499, draws 64 to 99']
    """

    images: int
    chunk_images: int
    chunk_draws: int

    def rows(self, block: int) -> range:
        return range(block * self.chunk_images, min((block + 1) * self.chunk_images, self.images))

    def fits(self, chunk: Chunk) -> bool:
        """Whether the chunk's images are one block of this grid."""
        return chunk.rows.start < self.images and chunk.rows == self.rows(chunk.rows.start // self.chunk_images)

    def by_block(self, chunks: Iterable[Chunk]) -> dict[int, list[Chunk]]:
        """Chunks of each block, by first draw; of those that begin together the longest comes first."""
        found: dict[int, list[Chunk]] = defaultdict(list)
        for chunk in sorted(chunks, key=lambda chunk: (chunk.draws.start, -chunk.draws.stop)):
            found[chunk.rows.start // self.chunk_images].append(chunk)
        return found

    def missing(self, chunks: Iterable[Chunk], span: range) -> list[Chunk]:
        """The chunks still to be computed before every image has these draws, the first draws of all images first."""
        there, found, tall = self.by_block(chunks), [], self.chunk_draws
        for block in range(-(-self.images // self.chunk_images)):
            for gap in (piece for chunk, piece in cover(there[block], span) if chunk is None):
                ends = (range(at, at + tall) for at in range(gap.start - gap.start % tall, gap.stop, tall))
                cut = (range(max(gap.start, one.start), min(gap.stop, one.stop)) for one in ends)
                found += [Chunk(self.rows(block), one) for one in cut]
        return sorted(found, key=lambda chunk: (chunk.draws.start, chunk.rows.start))

    def common_draws(self, chunks: Collection[Chunk]) -> int:
        """How many draws every image has, from the first on."""
        most = max((chunk.draws.stop for chunk in chunks), default=0)
        return next((gap.draws.start for gap in self.missing(chunks, range(most))), most)


def cover(chunks: Sequence[Chunk], span: range) -> Iterator[tuple[Chunk | None, range]]:
    """``span`` cut into pieces, each with the chunk that holds it or None; ``chunks`` are one block's, in order.

    Example:
        >>> list(cover([Chunk(range(9), range(2, 4))], range(0, 5)))
        [(None, range(0, 2)), (Chunk(rows=range(0, 9), draws=range(2, 4)), range(2, 4)), (None, range(4, 5))]
    """
    at = span.start
    while at < span.stop:
        holding = next((chunk for chunk in chunks if chunk.draws.start <= at < chunk.draws.stop), None)
        later = (chunk.draws.start for chunk in chunks if chunk.draws.start > at)
        end = holding.draws.stop if holding else min(later, default=span.stop)
        yield holding, range(at, min(end, span.stop))
        at = end
