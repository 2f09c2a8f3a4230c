"""Noisy logits on disk: computed once, resumable, checksummed, extended at will, read in slices."""

from keepcover.store.filling import Filled
from keepcover.store.folder import LogitStore, size_in_words
from keepcover.store.grid import Chunk
from keepcover.store.key import StoreKey, data_fingerprint
from keepcover.store.reader import StoreReader, read_logits

__all__ = [
    "Chunk",
    "Filled",
    "LogitStore",
    "StoreKey",
    "StoreReader",
    "data_fingerprint",
    "read_logits",
    "size_in_words",
]
