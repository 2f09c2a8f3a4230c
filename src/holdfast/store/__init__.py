"""Noisy logits on disk: computed once, resumable, checksummed, extended at will, read in slices."""

from holdfast.store.filling import Filled
from holdfast.store.folder import LogitStore, size_in_words
from holdfast.store.grid import Chunk
from holdfast.store.key import StoreKey, data_fingerprint
from holdfast.store.reader import StoreReader, read_logits

__all__ = [
    "Chunk", "Filled", "LogitStore", "StoreKey", "StoreReader", "data_fingerprint", "read_logits", "size_in_words"
]  # fmt: skip
