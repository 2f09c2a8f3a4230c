"""Noisy logits on disk: computed once, resumable, checksummed, extended at will, read in slices."""

from keepcover.store.folder import Filled, LogitStore, read_logits, size_in_words
from keepcover.store.grid import Chunk
from keepcover.store.key import StoreKey, data_fingerprint

__all__ = ["Chunk", "Filled", "LogitStore", "StoreKey", "data_fingerprint", "read_logits", "size_in_words"]
