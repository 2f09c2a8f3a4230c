"""Noisy logits on disk: computed once, resumable, checksummed, extended at will, read in slices."""

from keepcover.store.filling import Filled, size_in_words
from keepcover.store.folder import LogitStore, read_logits
from keepcover.store.grid import Chunk
from keepcover.store.key import StoreKey, data_fingerprint

__all__ = ["Chunk", "Filled", "LogitStore", "StoreKey", "data_fingerprint", "read_logits", "size_in_words"]
